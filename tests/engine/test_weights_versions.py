"""Weights that change while requests wait and run: no prefix ever mixes two versions."""

from dataclasses import replace

import pytest

from tests.engine.engines import GREEDY, assert_solo, debug_model, drain, make_engine, prompt

LONG = replace(GREEDY, max_tokens=40)


@pytest.fixture
def model():
    return debug_model()


@pytest.fixture
def engine(model):
    engine = make_engine(model, max_running=1)
    yield engine
    engine.close()


def change(engine, model, version):
    """New weights in place, as a trainer's update leaves them."""
    model.load_state_dict(debug_model(seed=int(version)).state_dict())
    engine.set_weights_version(version)


def decode_a_few(engine, name):
    while engine.requests[name].generated < 5:
        engine.step()


def test_who_waited_while_the_weights_changed_reads_by_the_new_ones(engine, model):
    """the version is that of the weights that read the prompt, not of those at the time of arrival."""
    engine.submit(prompt(33), LONG, "running")
    engine.submit(prompt(33), GREEDY, "waiting")
    decode_a_few(engine, "running")
    change(engine, model, "1")
    outputs = drain(engine)["waiting"]
    assert (outputs[-1].weights_version, outputs[-1].cached_tokens) == ("1", 0)
    assert_solo(model, prompt(33), GREEDY, outputs)


@pytest.mark.parametrize("back_to", ["0", "1"])
def test_who_runs_while_the_weights_change_shares_no_more_rows(engine, model, back_to):
    """rows that new weights wrote behind an old version's prefix are offered to neither version."""
    engine.submit(prompt(20), LONG, "running")
    decode_a_few(engine, "running")
    cached = engine.memory.prefixes.tree.device_pages
    change(engine, model, "1")
    outputs = drain(engine)["running"]
    assert outputs[-1].weights_version == "0"
    assert engine.memory.prefixes.tree.device_pages == cached
    everything = prompt(20) + [token for output in outputs for token in output.token_ids]
    if back_to != "1":
        change(engine, model, back_to)
    engine.submit(everything, GREEDY, "again")
    assert_solo(model, everything, GREEDY, drain(engine)["again"])


def test_who_is_preempted_goes_on_by_the_new_weights_alone(engine, model):
    """nothing that it read before its preemption is reused under the new version."""
    engine.submit(prompt(20), LONG, "one")
    decode_a_few(engine, "one")
    request = engine.requests["one"]
    engine.scheduler.preempt(request)
    change(engine, model, "1")
    while not request.computed:
        engine.step()
    before = request.tokens[:]
    outputs = drain(engine)["one"]
    assert outputs[-1].weights_version == "1"
    rest = replace(LONG, max_tokens=60 - len(before))
    assert_solo(model, list(before), rest, outputs)
