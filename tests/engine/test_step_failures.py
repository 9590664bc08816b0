"""What goes wrong within a step ends its own requests, and nothing else."""

import threading

import pytest
import torch

from megaspan.errors import UserError
from tests.engine.engines import GREEDY, assert_idle, assert_solo, debug_model, drain, make_engine, prompt

STAGES = {
    "building": ("runner", "build"),
    "page tables": ("memory.paged", "depend_on"),
    "preparing the next": ("memory.prefixes", "poll"),
    "forward": ("runner.model", "forward"),
    "noting": ("results", "record"),
}


@pytest.fixture
def engine():
    engine = make_engine(debug_model())
    yield engine
    engine.close()


def owner_of(engine, path):
    for name in path.split("."):
        engine = getattr(engine, name)
    return engine


@pytest.mark.parametrize("stage", STAGES)
def test_a_failure_in_any_part_of_a_step_leaves_the_engine_serving(engine, monkeypatch, stage):
    engine.submit(prompt(30), GREEDY, "unlucky")
    engine.step()
    path, name = STAGES[stage]
    calls, failing = [], threading.Event()
    right = getattr(owner_of(engine, path), name)

    def wrong(*arguments, **options):
        calls.append(name)
        # The poll at the beginning of a step is not of the step: the one while it computes is.
        if not failing.is_set() and len(calls) == (2 if name == "poll" else 1):
            failing.set()
            raise RuntimeError("cosmic ray")
        return right(*arguments, **options)

    monkeypatch.setattr(owner_of(engine, path), name, wrong)
    outputs = drain(engine)["unlucky"]
    assert (outputs[-1].finish_reason, outputs[-1].error_kind) == ("error", "internal")
    assert outputs[-1].error == "the step failed: cosmic ray"
    engine.submit(prompt(25, 1), GREEDY, "next")
    assert_solo(engine.model, prompt(25, 1), GREEDY, drain(engine)["next"])
    assert_idle(engine)


def test_pages_stay_taken_until_a_step_that_failed_half_way_has_ended(engine, monkeypatch):
    """The forward thread goes on writing to them while the engine's thread already knows of the failure."""
    going_on, ended = threading.Event(), []
    forward, poll = engine.runner.model.forward, engine.memory.prefixes.poll

    def slow(*arguments):
        going_on.set()
        threading.Event().wait(0.1)
        result = forward(*arguments)
        ended.append(engine.memory.pools.free_pages)
        return result

    def failing():
        if going_on.is_set() and not ended:
            raise RuntimeError("cosmic ray")
        poll()

    engine.submit(prompt(30), GREEDY, "unlucky")
    monkeypatch.setattr(engine.runner.model, "forward", slow)
    begin = engine.runner.start
    monkeypatch.setattr(engine.runner, "start", lambda step: (begin(step), going_on.wait()))
    monkeypatch.setattr(engine.memory.prefixes, "poll", failing)
    drain(engine)
    assert ended[0] < engine.memory.pools.total_pages
    assert engine.memory.pools.free_pages == engine.memory.pools.total_pages


def test_logits_that_are_not_finite_are_the_engines_fault(engine):
    engine.submit(prompt(10), GREEDY, "one")
    with torch.no_grad():
        engine.model.lm_head.weight.fill_(float("nan"))
    (last,) = drain(engine)["one"]
    assert (last.error, last.error_kind) == ("the model's logits are not finite", "internal")
    assert (last.token_ids, last.completion_tokens) == ((), 0)


def test_a_prepared_request_is_queued_once(engine):
    request = engine.prepare(prompt(10), GREEDY, "one")
    engine.enqueue(request)
    with pytest.raises(UserError, match="running already"):
        engine.enqueue(request)
    assert len(drain(engine)["one"]) == GREEDY.max_tokens
    with pytest.raises(UserError):
        engine.enqueue(request)
    assert not engine.has_work


def test_closing_waits_for_the_forward_thread():
    engine = make_engine(debug_model())
    engine.close()
    assert not engine.runner._thread.is_alive()
