"""Aborts, in every state, leak nothing."""

import itertools
import random

import pytest

from megaspan.cache.jobs import Restore
from megaspan.engine.request import State
from tests.engine.engines import GREEDY, assert_idle, assert_solo, drain, evict_device, prompt, settle

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture
def engine(make):
    return make(pages=32, host_pages=48, max_chunk=16)


def reasons(outputs):
    return [output.finish_reason for output in outputs if output.finish_reason]


def step_until(engine, name, state):
    for _ in range(1000):
        if engine.requests[name].state is state:
            return
        engine.step()
    raise AssertionError(f"{name} never was {state}")


@pytest.mark.parametrize("state", [State.waiting, State.loading, State.reading, State.decoding])
def test_an_abort_frees_everything(model, engine, state):
    """P63, P61: once in each state; the same prompt is served afterwards, from what is right of its pages."""
    ids = prompt(50)
    if state is State.loading:
        engine.generate([ids], GREEDY)
        evict_device(engine)
        held = [True]

        def hold(job, segment):
            while held and isinstance(job, Restore):
                pass

        engine.memory.tiers.transfers.before_segment = hold
    if state is State.waiting:
        for seed in range(8):
            engine.submit(prompt(10, seed), GREEDY)
    engine.submit(ids, GREEDY, "one")
    if state is State.waiting:
        engine.step()
    step_until(engine, "one", state)
    assert engine.abort("one")
    outputs = engine.step()
    aborted = [output for output in outputs if output.request_id == "one"]
    assert reasons(aborted) == ["abort"]
    assert not engine.abort("one")
    if state is State.loading:
        held.clear()
    drain(engine)
    assert_idle(engine)
    assert_solo(model, ids, GREEDY, engine.generate([ids], GREEDY)[0])


def test_an_abort_before_the_first_step(engine):
    engine.submit(prompt(9), GREEDY, "one")
    assert engine.abort("one")
    assert reasons(engine.step()) == ["abort"]


def test_an_abort_that_overtakes_the_arrival(engine):
    """Another thread may submit and abort while the engine is between the two queues."""
    engine.submit(prompt(9), GREEDY, "one")
    engine.abort("one")
    engine._obey_aborts()
    assert reasons(engine.step()) == ["abort"]
    assert reasons(drain(engine)) == []
    assert engine.scheduler.is_empty


def test_aborting_twice_or_nobody(engine):
    engine.submit(prompt(9), GREEDY, "one")
    engine.step()
    assert engine.abort("one")
    assert engine.abort("one")
    assert reasons(engine.step()) == ["abort"]
    assert not engine.abort("nobody")
    assert engine.stats().requests_total["abort"] == 1


def test_an_abort_in_the_step_that_ends_the_request_comes_too_late(engine, monkeypatch):
    """It ends once, and who takes its id next is not meant."""
    engine.submit(prompt(9), GREEDY, "one")
    prepare = engine._prepare

    def aborting():
        prepare()
        request = engine.requests["one"]
        if request.generated == 5:
            engine.abort("one")

    monkeypatch.setattr(engine, "_prepare", aborting)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert reasons(outputs) == ["length"]
    monkeypatch.undo()
    engine.submit(prompt(9), GREEDY, "one")
    assert reasons(drain(engine)["one"]) == ["length"]


def test_aborts_at_any_time_close_the_ledger(model, engine):
    """P63: 200 requests that share prefixes, each aborted at a moment of its own."""
    seed = 11
    print(f"seed {seed}")
    chance = random.Random(seed)
    stems = [prompt(60, seed) for seed in range(3)]
    due: dict[str, int] = {}
    numbers = itertools.count()
    outputs = []
    for step in range(3000):
        while len(due) < 200 and len(engine.requests) < 12:
            stem = chance.choice(stems)[: chance.randint(1, 60)]
            name = engine.submit([*stem, chance.randrange(97)], GREEDY, str(next(numbers)))
            due[name] = step + chance.randint(0, 12)
        for name, when in due.items():
            if when == step:
                engine.abort(name)
        outputs += engine.step()
        if len(due) == 200 and not engine.has_work:
            break
        if step % 50 == 0:
            engine.memory.prefixes.check()
    ended = reasons(outputs)
    assert len(ended) == 200
    assert ended.count("abort") > 60
    assert ended.count("error") == 0
    settle(engine)
    assert_solo(model, stems[0], GREEDY, engine.generate([stems[0]], GREEDY)[0])
