"""Who runs in each step: fairness, admission, preemption, and prefixes that are waited for."""

from dataclasses import replace

import pytest

from megaspan.engine.plan import LEAST_CHUNK
from megaspan.engine.request import State
from tests.engine.engines import GREEDY, assert_solo, drain, fix_costs, prompt, tokens_of

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("step_seconds", [1.6, 8.0])
def test_a_long_prompt_starves_nobody(model, make, step_seconds):
    """P59: while 50 chunks, or 10, are read, who decodes gets a token a step, who arrives is soon served."""
    engine = make(pages=256, step_seconds=step_seconds)
    fix_costs(engine, 0.1)  # 16 or 80 tokens a step
    engine.submit(prompt(20, 1), replace(GREEDY, max_tokens=150), "decoding")
    while not any(output.token_ids for output in engine.step()):
        pass
    engine.submit(prompt(800, 2), GREEDY, "long")
    seen, steps, short_after = [], 0, None
    while engine.requests["long"].generated == 0:
        if steps == 3:
            engine.submit(prompt(12, 3), GREEDY, "short")
        outputs = engine.step()
        steps += 1
        got = {output.request_id for output in outputs if output.token_ids}
        seen.append("decoding" in got)
        if "short" in got and short_after is None:
            short_after = steps - 3
    assert steps >= 80 / step_seconds
    assert all(seen)
    assert short_after is not None
    assert short_after <= 3
    drain(engine)


def test_a_long_prompt_is_read_beside_short_ones_without_end(make):
    """P59: neither who is nearest to its first token nor who has waited longest gets the whole step."""
    engine = make(pages=128, step_seconds=2.0)
    fix_costs(engine, 0.1)  # 20 tokens a step, and the short prompts that wait have always more
    engine.submit(prompt(200), GREEDY, "long")
    steps = short_answers = 0
    while engine.requests["long"].generated == 0:
        for seed in range(4 - engine.stats().running - engine.stats().waiting):
            engine.submit(prompt(16, 10 * steps + seed), replace(GREEDY, max_tokens=1))
        short_answers += sum(output.finish_reason is not None for output in engine.step())
        steps += 1
        assert steps <= 25, "the long prompt is starved"
    assert short_answers >= steps // 2, "the short prompts are starved"
    drain(engine)


def test_a_step_reads_something_however_slow_the_machine(make):
    engine = make()
    fix_costs(engine, 1e6)
    engine.submit(prompt(60), GREEDY, "one")
    engine.step()
    assert engine.requests["one"].computed == LEAST_CHUNK
    drain(engine)


def test_chunks_shrink_as_a_prompt_gets_long(make):
    """P60: every step of reading it keeps to its time, and little of that is left unused."""
    engine = make(pages=256, step_seconds=0.2)
    fix_costs(engine, 1e-3, 1e-5)
    engine.submit(prompt(900), GREEDY, "long")
    request, chunks = engine.requests["long"], []
    while request.state is not State.decoding:
        before = request.computed
        engine.step()
        chunks.append((before, request.computed - before))
    for context, tokens in chunks[:-1]:
        assert 0.16 < engine.cost.seconds(tokens, context) <= 0.2
    assert chunks[-2][1] < chunks[0][1] / 4
    drain(engine)


def test_the_same_long_prompt_is_computed_once(model, make):
    """Who comes second waits for the first one's rows."""
    engine = make(step_seconds=1.0)
    fix_costs(engine, 0.05)  # 20 tokens a step
    ids = prompt(80)
    first, second = engine.generate([ids, ids], GREEDY)
    assert (first[-1].cached_tokens, second[-1].cached_tokens) == (0, 76)
    assert engine.stats().prompt_tokens_total == 84
    for outputs in (first, second):
        assert_solo(model, ids, GREEDY, outputs)


def test_who_waits_for_a_prefix_goes_on_when_its_reader_is_aborted(model, make):
    engine = make(step_seconds=1.05)
    fix_costs(engine, 0.05)
    ids = prompt(80)
    for name in ("one", "two"):
        engine.submit(ids, GREEDY, name)
    engine.step()
    assert engine.requests["two"].state is State.waiting
    engine.abort("one")
    outputs = drain(engine)
    assert outputs["two"][-1].cached_tokens == 20  # what had been read stays
    assert_solo(model, ids, GREEDY, outputs["two"])


def test_who_computes_the_same_prefix_at_the_same_time_shares_its_pages(model, make, monkeypatch):
    """The pages behind the shared ones, one of them half full, stay the request's own."""
    engine = make(step_seconds=2.2)
    fix_costs(engine, 0.1)  # 22 tokens a step: 5 pages and a half
    monkeypatch.setattr("megaspan.engine.admission._reader_ahead", lambda *arguments: None)
    ids = prompt(40)
    longer = [ids + prompt(5, 1), ids + prompt(5, 2)]
    for each, outputs in zip(longer, engine.generate(longer, GREEDY), strict=True):
        assert_solo(model, each, GREEDY, outputs)
    assert engine.stats().requests_total["error"] == 0


@pytest.mark.parametrize("host_pages", [0, 64])
def test_preempted_requests_give_what_they_give_alone(model, make, host_pages):
    """More growth than the pool holds: the latest arrivals give way and go on later."""
    engine = make(pages=20, host_pages=host_pages)
    prompts = [prompt(20, seed) for seed in range(4)]
    params = replace(GREEDY, max_tokens=30)
    for ids, outputs in zip(prompts, engine.generate(prompts, params), strict=True):
        assert_solo(model, ids, params, outputs)
    stats = engine.stats()
    assert stats.preempted_total > 0
    assert stats.generation_tokens_total == 4 * 30


def test_the_first_to_arrive_is_not_preempted(make):
    engine = make(pages=20)
    names = [engine.submit(prompt(20, seed), replace(GREEDY, max_tokens=30)) for seed in range(4)]
    ended = [output.request_id for _ in range(400) for output in engine.step() if output.finish_reason]
    assert ended[0] == names[0]


def test_preempted_sampling_goes_on_with_its_draws(model, make):
    """The draw's number is the request's own; penalties count what was drawn before."""
    engine = make()
    params = replace(
        GREEDY, temperature=1.0, seed=9, presence_penalty=1.5, repetition_penalty=1.3, max_tokens=12
    )
    expected = tokens_of(engine.generate([prompt(20)], params)[0])
    engine.submit(prompt(20), params, "one")
    outputs = []
    for _ in range(20):
        outputs += engine.step()
        request = engine.requests.get("one")
        if request is not None and request.slot >= 0 and request.generated in (3, 7):
            engine.scheduler.preempt(request)
    assert engine.stats().preempted_total >= 2
    assert tokens_of(outputs) == expected


def test_preempted_between_chunks_goes_on_from_its_full_pages(model, make):
    """P61: what was read is not lost, and what was half read is not reused."""
    engine = make(step_seconds=2.2)
    fix_costs(engine, 0.1)
    ids = prompt(60)
    engine.submit(ids, GREEDY, "one")
    engine.step()
    request = engine.requests["one"]
    assert request.computed == 22
    engine.scheduler.preempt(request)
    engine.step()
    assert request.computed == 20 + 22
    outputs = drain(engine)["one"]
    assert outputs[-1].cached_tokens == 0  # its own rows are no hit
    assert_solo(model, ids, GREEDY, outputs)


def test_more_requests_than_seats_are_served_in_order(make):
    engine = make(max_running=2)
    names = [engine.submit(prompt(10, seed), replace(GREEDY, max_tokens=2)) for seed in range(7)]
    ended = {}
    for step in range(60):
        ended |= {output.request_id: step for output in engine.step() if output.finish_reason}
    steps = [ended[name] for name in names]
    assert steps == sorted(steps)


def test_short_prompts_do_not_use_up_the_tokens_of_a_step(make):
    """P59: where tokens are cheap it is not the time that is shared out, but the longest chunk."""
    engine = make(pages=256, max_chunk=64)
    fix_costs(engine, 1e-6)
    engine.submit(prompt(900, 1), GREEDY, "long")
    for number in range(40):
        engine.submit(prompt(64, 100 + number), replace(GREEDY, max_tokens=1), f"short-{number}")
        engine.step()
    assert engine.requests.get("long") is None or engine.requests["long"].generated
    drain(engine)
