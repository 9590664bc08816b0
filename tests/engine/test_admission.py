"""Who may begin while others wait for a prefix or for room."""

from dataclasses import replace

import pytest

from megaspan.engine.request import State
from megaspan.engine.scheduler import LOOK_AHEAD
from tests.engine.engines import GREEDY, assert_solo, drain, fix_costs, prompt, tokens_of

SLOW = 100.0  # seconds a token: a chunk is the smallest there is


def test_many_who_wait_for_one_prefix_do_not_hide_the_next(make):
    """P59: requests that wait for a reader are not counted among those that are looked at in a step."""
    engine = make(pages=256)
    fix_costs(engine, SLOW)
    engine.submit(prompt(400), GREEDY, "reader")
    engine.step()
    for number in range(LOOK_AHEAD + 8):
        engine.submit(prompt(400), GREEDY, f"follower-{number}")
    engine.submit(prompt(9, 1), GREEDY, "other")
    for _ in range(4):
        engine.step()
    assert engine.requests["follower-0"].state is State.waiting
    assert engine.requests["other"].state is not State.waiting
    for number in range(LOOK_AHEAD + 8):
        engine.abort(f"follower-{number}")
    drain(engine)


def test_who_lacked_room_is_tried_again_when_others_have_computed_its_prefix(model, make):
    """What it lacks shrinks as its prefix is published: it must not wait for what it no longer needs."""
    alone = make()
    alone.submit(prompt(8), replace(GREEDY, max_tokens=48), "first")
    conversation = prompt(8) + tokens_of(drain(alone)["first"])
    engine = make(pages=228)
    fix_costs(engine, SLOW)
    engine.submit(prompt(8), replace(GREEDY, max_tokens=48), "first")
    engine.submit(prompt(40, 3), replace(GREEDY, max_tokens=200), "another")
    engine.submit(prompt(800, 1), GREEDY, "large")  # 200 pages are promised to it, and it reads on
    while not all(engine.requests[name].generated for name in ("first", "another")):
        engine.step()
    engine.submit(conversation + prompt(9, 2), GREEDY, "second turn")
    engine.step()
    second = engine.requests["second turn"]
    assert (second.state, second.missing) == (State.waiting, 15)
    while engine.requests["first"].generated < 40:
        engine.step()
        assert second.state is State.waiting
    engine.abort("another")  # there is room now for the 6 pages that it lacks, not for 15
    engine.step()
    assert second.state is not State.waiting
    assert_solo(model, conversation + prompt(9, 2), GREEDY, drain(engine)["second turn"])


@pytest.mark.parametrize("change", ["flush", "weights"])
def test_nobody_waits_for_a_prefix_that_will_not_be_shared(make, change):
    """After a flush, or a change of weights, what a reader computes is its own."""
    engine = make(pages=600)
    fix_costs(engine, SLOW)
    engine.submit(prompt(800), GREEDY, "reader")
    engine.step()
    engine.submit(prompt(800), GREEDY, "behind")
    engine.step()
    behind = engine.requests["behind"]
    assert behind.state is State.waiting
    if change == "flush":
        engine.flush_cache()
    else:
        engine.set_weights_version("1")
    engine.submit(prompt(800), GREEDY, "after")
    engine.step()
    assert behind.state is State.reading
    assert engine.requests["after"].behind == (behind, 796)
    for name in ("reader", "behind", "after"):
        engine.abort(name)
    drain(engine)
