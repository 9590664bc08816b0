"""What a request asks of the engine it gets, and it gets it whatever shares its batch."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaspan.engine.sampling import SamplingParams
from megaspan.errors import Overloaded, UserError
from tests.engine.engines import (
    GREEDY,
    answer,
    assert_idle,
    assert_solo,
    drain,
    make_engine,
    poison_freed_pages,
    prompt,
    tokens_of,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=8, ignore_eos=True)


def test_a_request_gives_what_it_gives_alone(model, engine):
    """Bit for bit, greedy and sampled, whatever shares its batch and however its prompt was cut."""
    prompts = [prompt(length, length) for length in (1, 7, 8, 9, 12, 33, 70)]  # around K and the page
    params = [replace(GREEDY if number % 2 else SAMPLED, max_tokens=3 + number) for number in range(7)]
    for ids, each, outputs in zip(prompts, params, engine.generate(prompts, params), strict=True):
        assert_solo(model, ids, each, outputs)


WORKLOADS = st.lists(
    st.tuples(
        st.lists(st.sampled_from([5, 6]), min_size=1, max_size=40),  # few tokens: prefixes are shared
        st.integers(1, 10),
        st.sampled_from([0.0, 1.0]),
        st.integers(0, 6),  # steps before it arrives
        st.none() | st.integers(0, 8),  # steps before it is aborted
    ),
    min_size=1,
    max_size=7,
)


@settings(max_examples=15)
@given(WORKLOADS, st.sampled_from(["write_through", "write_back"]), st.booleans())
def test_any_small_workload_gives_its_solo_runs(model, workload, policy, reuse):
    """16 pages for up to 7 requests of 12: prefixes are shared, evicted, restored, requests preempted."""
    options = {"host_pages": 12, "write_policy": policy} if reuse else {"prefix_cache": False}
    engine = make_engine(model, pages=16, max_running=4, **options)
    poison_freed_pages(engine)
    outputs, expected = {}, {}
    for step in range(400):
        for number, (ids, count, temperature, arrival, aborted) in enumerate(workload):
            if step == arrival:
                params = SamplingParams(max_tokens=count, temperature=temperature, seed=number)
                expected[engine.submit(ids, params, str(number))] = (ids, params)
            if aborted is not None and step == arrival + aborted:
                engine.abort(str(number))
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        if step > 6 and not engine.has_work:
            break
    for request_id, (ids, params) in expected.items():
        if outputs[request_id][-1].finish_reason != "abort":
            assert_solo(model, ids, params, outputs[request_id])
    assert_idle(engine)
    engine.close()


def test_seeds_reproduce_in_other_company(engine):
    ids = prompt(30)
    alone = engine.generate([ids], SAMPLED)[0]
    again = engine.generate([prompt(20, 1), ids, prompt(50, 2)], SAMPLED)[1]
    other = engine.generate([ids], replace(SAMPLED, seed=6))[0]
    assert answer(alone) == answer(again)
    assert tokens_of(other) != tokens_of(alone)


def test_tokens_come_one_a_step_and_the_last_output_has_the_counts(engine):
    outputs = engine.generate([prompt(30)], replace(GREEDY, max_tokens=5))[0]
    assert [len(output.token_ids) for output in outputs] == [1] * 5
    assert [output.finish_reason for output in outputs] == [None] * 4 + ["length"]
    last = outputs[-1]
    assert (last.prompt_tokens, last.completion_tokens, last.cached_tokens) == (30, 5, 0)
    assert last.weights_version == "0"


def test_cached_tokens_are_told(engine):
    """P71: users see how much of a prompt was reused: whole pages, and never all of it."""
    ids = prompt(32)
    counts = [engine.generate([ids], GREEDY)[0][-1].cached_tokens for _ in range(2)]
    longer = engine.generate([ids + prompt(5, 1)], GREEDY)[0][-1].cached_tokens
    other = engine.generate([[*ids[:9], (ids[9] + 1) % 97, *ids[10:]]], GREEDY)[0][-1].cached_tokens
    assert (counts, longer, other) == ([0, 28], 32, 8)
    stats = engine.stats()
    assert stats.prefix_hits_total == 28 + 32 + 8
    assert stats.prefix_queries_total == 3 * 32 + 37
    assert stats.prompt_tokens_total == 3 * 32 + 37 - (28 + 32 + 8)


def test_an_answer_is_reused_as_a_prefix(model, engine):
    """A conversation's next turn finds the rows of the answer as well."""
    ids = prompt(16)
    tokens, _ = answer(engine.generate([ids], replace(GREEDY, max_tokens=9))[0])
    turn = [*ids, *tokens, 5, 6]
    outputs = engine.generate([turn], GREEDY)[0]
    assert outputs[-1].cached_tokens == 24
    assert_solo(model, turn, GREEDY, outputs)


def test_without_prefix_cache_nothing_is_kept(model):
    engine = make_engine(model, prefix_cache=False)
    for _ in range(2):
        outputs = engine.generate([prompt(30)], GREEDY)[0]
        assert outputs[-1].cached_tokens == 0
        assert_solo(model, prompt(30), GREEDY, outputs)
    assert engine.memory.pools.free_pages == engine.memory.pools.total_pages
    engine.close()


def test_weights_versions_do_not_share_prefixes(engine):
    ids = prompt(30)
    engine.generate([ids], GREEDY)
    engine.set_weights_version("1")
    renewed = engine.generate([ids], GREEDY)[0][-1]
    assert (renewed.cached_tokens, renewed.weights_version) == (0, "1")
    assert engine.generate([ids], GREEDY)[0][-1].cached_tokens == 28
    engine.set_weights_version("0")
    assert engine.generate([ids], GREEDY)[0][-1].cached_tokens == 28


def test_flush_forgets_what_nobody_uses(engine):
    engine.generate([prompt(30)], GREEDY)
    engine.submit(prompt(20, 1), GREEDY)
    engine.step()
    assert engine.flush_cache() == 8  # 35 rows of the ended request
    assert engine.stats().pages_locked >= 5
    drain(engine)
    assert engine.generate([prompt(30)], GREEDY)[0][-1].cached_tokens == 0


def test_log_probabilities_and_alternatives(engine):
    """Natural logarithms under the model's own distribution, best first, whatever the temperature."""
    outputs = engine.generate([prompt(20), prompt(9)], [replace(SAMPLED, logprobs=20), SAMPLED])
    for output in outputs[0]:
        assert output.top_logprobs is not None
        (top,) = output.top_logprobs
        values = [value for _, value in top]
        assert len(top) == 20
        assert values == sorted(values, reverse=True)
        assert sum(map(math.exp, values)) <= 1 + 1e-5
        assert dict(top).get(output.token_ids[0], output.logprobs[0]) == pytest.approx(output.logprobs[0])
    assert all(output.top_logprobs is None for output in outputs[1])
    none = engine.generate([prompt(20)], replace(SAMPLED, logprobs=0))[0]
    assert all(output.top_logprobs == ((),) for output in none)


def test_duplicate_ids_are_refused_until_the_first_has_ended(engine):
    engine.submit(prompt(9), GREEDY, "one")
    with pytest.raises(UserError, match="running already"):
        engine.submit(prompt(9), GREEDY, "one")
    drain(engine)
    assert engine.submit(prompt(9), GREEDY, "one") == "one"
    drain(engine)


def test_too_many_requests_are_refused(model):
    engine = make_engine(model, max_running=2, max_waiting=1)
    for number in range(3):
        engine.submit(prompt(9, number), GREEDY)
    with pytest.raises(Overloaded, match="later"):
        engine.submit(prompt(9), GREEDY)
    assert len(drain(engine)) == 3
    engine.submit(prompt(9), GREEDY)
    drain(engine)
    engine.close()


@pytest.mark.parametrize(
    ("options", "length"), [({"pages": 8}, 32), ({"max_context": 30}, 30), ({"pages": 300}, 1024)]
)
def test_a_prompt_over_the_limit_is_refused_at_once(model, options, length):
    """P27: over the pool, the context asked for, or the model's; the next is served, up to the limit."""
    engine = make_engine(model, **options)
    with pytest.raises(UserError, match=f"{length} tokens, the completion included"):
        engine.submit(prompt(length), GREEDY)
    ids = prompt(length - 3)
    outputs = engine.generate([ids], replace(GREEDY, max_tokens=None))[0]
    assert len(tokens_of(outputs)) == 3
    assert outputs[-1].finish_reason == "length"
    assert_solo(model, ids, GREEDY, outputs)
    assert_idle(engine)
    engine.close()


@pytest.mark.parametrize("ids", [[], [97], [-1], [2**40]])
def test_ids_that_are_no_tokens_are_refused(engine, ids):
    with pytest.raises(UserError):
        engine.submit(ids, GREEDY)
    assert not engine.has_work
