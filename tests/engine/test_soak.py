"""The engine's soak, small; `python -m tests.engine.soak` runs a large one."""

import pytest

from tests.engine.soak import Soak, missing, run

pytestmark = pytest.mark.usefixtures("poisoned_memory")
SMALL = {"longest": 250, "answers": 100, "pages": 70, "host_pages": 80, "fault_rate": 0.3, "minutes": 5.0}
RARE = {"abort while loading", "abort while reading", "disk reads failed", "failed restores"}  # by so few


@pytest.mark.parametrize(("write_policy", "seed"), [("write_through", 1), ("write_back", 2)])
def test_every_answer_is_its_solo_runs_and_the_ledger_closes(write_policy, seed):
    """P48, P63: whatever was evicted, restored, preempted or aborted around it, with delays and failures."""
    happened = run(Soak(requests=60, seed=seed, write_policy=write_policy, **SMALL))
    print(happened)
    assert set(missing(happened)) <= RARE


def test_a_seed_happens_again():
    """Neither threads nor clocks decide anything."""
    soak = Soak(requests=20, seed=3, **SMALL)
    assert run(soak) == run(soak)
