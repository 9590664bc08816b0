"""The forward thread: errors come where they are waited for, and nothing stale after an interrupt."""

import pytest

from megaspan.engine.runner import Runner


@pytest.fixture
def runner(engine):
    return engine.runner


def test_what_a_step_raises_is_raised_where_it_is_waited_for(runner: Runner):
    def broken():
        raise ZeroDivisionError("inside")

    runner._begin(broken)
    with pytest.raises(ZeroDivisionError, match="inside"):
        runner.finish()
    runner.warm_up()  # the thread goes on


def test_a_step_that_nobody_waited_for_is_not_taken_for_the_next_ones(runner: Runner):
    """As after Ctrl-C between start and finish."""
    runner._begin(lambda: "first")  # pyright: ignore[reportArgumentType]
    runner._begin(lambda: "second")  # pyright: ignore[reportArgumentType]
    assert runner.finish()[0] == "second"
    runner._begin(lambda: "third")  # pyright: ignore[reportArgumentType]
    assert runner.finish()[0] == "third"
