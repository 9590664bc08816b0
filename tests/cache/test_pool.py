"""The page pools: their bytes, the layers that they hold, and pages handed out and taken back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megaspan.cache.pool import PagePools
from megaspan.config import ModelConfig
from megaspan.costs.memory import cache_bytes_per_token
from megaspan.errors import UserError
from tests.strategies import configs

REAL = ModelConfig.preset("glm-5.2")
DEBUG = ModelConfig.preset("debug")


def test_bytes_per_token_at_real_size_are_the_plans_figure():
    """P25: 79 latent rows and 22 index rows in FP8."""
    pools = PagePools(REAL, 1, 64, "fp8", "fp8", "meta")
    assert pools.nbytes == 64 * 54_728


@settings(max_examples=30)
@given(
    configs(),
    st.sampled_from(["float32", "bfloat16", "fp8"]),
    st.sampled_from(["float32", "bfloat16", "fp8"]),
    st.booleans(),
)
def test_tensors_have_the_bytes_that_the_plan_counts(config, latent, index, mtp):
    """P25, P50: for any shape and formats, and the segments of both pools are all of them."""
    pools = PagePools(config, 3, 4, latent, index, mtp=mtp)
    expected = cache_bytes_per_token(config, latent, index, mtp)
    assert pools.nbytes == sum(segment.pages.nbytes for segment in pools.segments) == 3 * 4 * expected


def test_shared_layers_have_no_index_rows():
    """P25, P50: two pools of different depth, the draft layer at the end of both."""
    pools = PagePools(DEBUG, 2, 4)
    assert pools.layers == {"latent": tuple(range(10)), "index": (0, 1, 2, 6, 9)}
    assert {pool: len(tensors) for pool, tensors in pools.storage.items()} == {"latent": 10, "index": 5}
    assert pools.rows("index", 6) is pools.storage["index"][3]
    assert pools.rows("index", 9) is pools.storage["index"][4]
    with pytest.raises(ValueError, match="layer 7 keeps no index rows"):
        pools.rows("index", 7)
    assert PagePools(DEBUG, 2, 4, mtp=False).layers == {"latent": tuple(range(9)), "index": (0, 1, 2, 6)}


@pytest.mark.parametrize("name", ["float32", "bfloat16", "fp8"])
def test_segments_are_the_same_memory_in_the_order_of_a_pass(name):
    pools = PagePools(DEBUG, 5, 4, name)
    order = [(segment.layer, segment.pool) for segment in pools.segments]
    assert order[:5] == [(0, "latent"), (0, "index"), (1, "latent"), (1, "index"), (2, "latent")]
    assert order[6:9] == [(3, "latent"), (4, "latent"), (5, "latent")]
    assert order[-2:] == [(9, "latent"), (9, "index")]
    assert len(set(order)) == len(order) == 15
    for segment in pools.segments:
        rows = pools.rows(segment.pool, segment.layer)
        assert segment.pages.shape == (5, 4 * pools.formats[segment.pool].nbytes)
        rows.view(torch.uint8).fill_(0)
        rows[3 * 4 + 1] = 1
        touched = segment.pages.any(1).tolist()
        assert touched == [False, False, False, True, False]


def test_pages_are_handed_out_all_or_none():
    pools = PagePools(DEBUG, 5, 4)
    first = pools.take(3)
    assert first is not None
    assert pools.take(3) is None
    assert pools.free_pages == 2
    rest = pools.take(2)
    assert rest is not None
    assert sorted(first + rest) == list(range(5))
    assert pools.take(0) == []
    assert pools.take(1) is None
    pools.give(first)
    assert (pools.free_pages, pools.total_pages) == (3, 5)


@pytest.mark.parametrize("wrong", [0, 2, 5, -1, 99], ids=["twice", "free", "end", "negative", "far"])
def test_a_page_that_is_not_out_is_not_taken_back(wrong):
    """A double free changes nothing, not even for the pages named before it."""
    pools = PagePools(DEBUG, 5, 4)
    assert pools.take(2) == [0, 1]
    with pytest.raises(ValueError, match=f"page {wrong} is given back, but it is not handed out"):
        pools.give([0, 1, wrong])
    assert pools.free_pages == 3
    pools.give([1, 0])
    assert pools.free_pages == 5


@settings(max_examples=60)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=30))
def test_no_page_is_in_two_hands(steps):
    """O8: every page is free or with exactly one owner, whatever is taken and given."""
    pools, out = PagePools(DEBUG, 10, 1), []
    for taking, count in steps:
        if taking:
            pages = pools.take(count)
            assert (pages is None) == (count > 10 - len(out))
            out += pages or []
        else:
            pools.give(out[:count])
            del out[:count]
        assert len(set(out)) == len(out)
        assert pools.free_pages + len(out) == pools.total_pages


@pytest.mark.parametrize(("pages", "page_size", "name"), [(0, 4, "pages"), (3, 0, "page_size")])
def test_a_pool_without_room_is_refused(pages, page_size, name):
    with pytest.raises(UserError, match=f"{name} is 0: a pool needs at least 1"):
        PagePools(DEBUG, pages, page_size)


def test_the_scratch_page_is_behind_all_others_and_never_handed_out():
    pools = PagePools(DEBUG, 3, 4, scratch=True)
    assert pools.scratch_page == 3
    assert len(pools.rows("latent", 0)) == 16
    assert pools.total_pages == pools.free_pages == 3
    assert pools.take(3) == [0, 1, 2]
    assert pools.take(1) is None
    with pytest.raises(ValueError, match="page 3 is given back, but it is not handed out"):
        pools.give([3])
    for segment in pools.segments:  # no transfer moves it
        assert segment.pages.shape == (3, 4 * pools.formats[segment.pool].nbytes)
        assert segment.pages.data_ptr() == pools.rows(segment.pool, segment.layer).data_ptr()
    assert PagePools(DEBUG, 3, 4).scratch_page is None
