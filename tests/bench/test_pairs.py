"""Measuring in turns."""

import pytest

from megaspan.bench.pairs import in_turns


def test_neither_goes_first_every_time():
    calls, said = [], []
    seen = in_turns(lambda: calls.append("a") or 2.0, lambda: calls.append("b") or 3.0, said.append, pairs=4)
    assert "".join(calls) == "abbaabba"
    assert seen.first == (2.0,) * 4
    assert seen.second == (3.0,) * 4
    assert seen.ratio == 1.5
    assert len(said) == 4


def test_a_machine_that_slows_down_changes_no_ratio():
    """Two things that take as long, on a machine that takes 10 % longer for each one: measured one after
    the other they would differ by 46 %."""
    slowness = iter(range(100))

    def seconds() -> float:
        return 1.1 ** next(slowness)

    assert in_turns(seconds, seconds, lambda said: None, pairs=4).ratio == pytest.approx(1.0, abs=0.01)


def test_one_disturbed_pair_counts_as_one():
    second = iter([2.0, 2.0, 50.0, 2.0, 2.0])
    seen = in_turns(lambda: 1.0, lambda: next(second), lambda said: None)
    assert seen.ratio == 2.0
    assert seen.spread() == "median of 5 pairs, 2 to 50"
