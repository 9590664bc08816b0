"""The soak in small: random requests, aborts and transfer faults in tiny pools (`soak.py`)."""

import pytest

from tests.engine.soak import soak

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize(("write_policy", "seed"), [("write_through", 1), ("write_back", 2)])
def test_every_answer_is_its_solo_runs_and_the_ledger_closes(write_policy, seed):
    """P48, P63: whatever was evicted, restored, preempted or aborted around it, with delays and failures."""
    happened = soak(
        requests=120,
        seed=seed,
        longest=250,
        pages=70,
        host_pages=90,
        write_policy=write_policy,
        fault_rate=0.2,
    )
    print(happened)
    # It was worth running.
    for name in ("abort", "preempted", "restored", "prefix hits", "delays", "failures"):
        assert happened[name] > 0, name  # pyright: ignore[reportOperatorIssue]
