"""The host tier: slots are handed out once, and a slot is a whole page."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megaspan.cache.host import HostTier
from megaspan.cache.pool import PagePools
from megaspan.config import ModelConfig

DEBUG = ModelConfig.preset("debug")


def tier(slots: int, **formats) -> HostTier:
    return HostTier(PagePools(DEBUG, pages=2, page_size=4, **formats).segments, slots)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=30))
def test_the_ledger_closes(steps):
    """O8: whatever is taken and given, no slot is out twice and free + taken = total."""
    host, taken = tier(8), []
    for takes, count in steps:
        if takes:
            slots = host.take(count)
            assert (slots is None) == (count > 8 - len(taken))
            taken += slots or []
        else:
            host.give(taken[:count])
            del taken[:count]
        assert len(set(taken)) == len(taken)
        assert host.free + len(taken) == host.total == 8


@pytest.mark.parametrize("slots", [[1, 1], [0], [1, 0]])
def test_a_slot_is_given_back_once(slots):
    """P48: a slot counted as free twice would be handed to two pages; a refused call changes nothing."""
    host = tier(2)
    assert sorted(host.take(2) or []) == [0, 1]
    host.give([0])
    with pytest.raises(ValueError, match="not all taken"):
        host.give(slots)
    assert host.free == 1


@pytest.mark.parametrize("form", ["float32", "bfloat16", "fp8"])
def test_a_slot_holds_the_rows_of_every_pool(form):
    """P40, P50: latent and index rows, draft layers included, lie side by side, and nothing else does."""
    pools = PagePools(DEBUG, pages=2, page_size=4, latent_format=form)
    host = HostTier(pools.segments, 3)
    assert host.page_bytes == pools.nbytes / 2
    assert host.memory.nbytes == 3 * host.page_bytes
    host.memory.zero_()
    for number, columns in enumerate(host.columns(host.memory)):
        assert columns.shape[1] == host.words(pools.segments[number].pages).shape[1]
        columns[1] = number + 1
    assert (host.memory[1].view(torch.int64) > 0).all()
    assert not host.memory[0].any()
    assert not host.memory[2].any()


def test_a_tier_may_have_no_slots():
    assert tier(0).take(1) is None
    with pytest.raises(ValueError, match="-1 slots"):
        tier(-1)
