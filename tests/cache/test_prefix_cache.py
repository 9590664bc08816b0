"""Leases: what a request is given, what it hands on, and what is left when it goes."""

import numpy as np
import pytest

from megaspan.cache.pool import PagePools
from megaspan.cache.prefix import PrefixTree
from megaspan.cache.prefix_cache import PrefixCache
from megaspan.config import ModelConfig

DEBUG = ModelConfig.preset("debug")
PAGE = 4


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def counted(pages: int, first: int = 0) -> np.ndarray:
    """`pages` pages of tokens, counted from `first` on."""
    return np.arange(first, first + pages * PAGE, dtype=np.int32)


@pytest.fixture
def cache():
    cache = make()
    yield cache
    cache.check()


def make(pages: int = 8, **options) -> PrefixCache:
    pools = PagePools(DEBUG, pages, PAGE, "bfloat16")
    return PrefixCache(pools, PrefixTree(PAGE), **options)


def serve(cache: PrefixCache, tokens: np.ndarray, version: str = "0"):
    """A lease whose full pages are written and published."""
    lease = cache.open(tokens, version)
    assert cache.grow(lease, len(tokens)) is not None
    cache.publish(lease, tokens[lease.published * PAGE : len(tokens) // PAGE * PAGE])
    return lease


def test_a_prefix_is_whole_pages_and_never_all_of_the_prompt(cache):
    """One token must be left to compute: its hidden state gives the next."""
    cache.close(serve(cache, counted(3)))
    found = {length: cache.open(counted(4)[:length], "0") for length in (3, 4, 5, 11, 12, 13, 16)}
    assert {length: len(lease.pages) for length, lease in found.items()} == {
        3: 0, 4: 0, 5: 1, 11: 2, 12: 2, 13: 3, 16: 3,
    }  # fmt: skip
    for lease in found.values():
        cache.close(lease)


def test_pages_are_shared_by_all_who_have_the_prefix(cache):
    first = serve(cache, counted(3))
    second = cache.open(counted(4), "0")
    assert second.pages == first.pages
    cache.close(first)
    assert cache.locked_pages == 3
    cache.close(second)
    assert cache.locked_pages == 0
    assert cache.available() == 8


def test_what_a_request_uses_is_not_evicted(cache):
    lease = serve(cache, counted(3))
    assert cache.take(6) is None
    pages = cache.take(5)
    assert pages is not None
    assert not set(pages) & set(lease.pages)
    cache.pools.give(pages)
    cache.close(lease)
    pages = cache.take(8)
    assert pages is not None
    cache.pools.give(pages)


def test_taking_is_all_or_nothing_and_evicts_no_more_than_needed(cache):
    cache.close(serve(cache, counted(3)))
    cache.close(serve(cache, counted(3, first=50)))
    assert cache.take(9) is None
    assert cache.tree.device_pages == 6
    pages = cache.take(4)
    assert pages is not None
    assert len(set(pages)) == 4
    assert cache.tree.device_pages == 4
    cache.pools.give(pages)
    lease = cache.open(counted(4, first=50), "0")  # the more recently used one is whole
    assert len(lease.pages) == 3
    cache.close(lease)


def test_growth_adds_what_is_missing(cache):
    lease = cache.open(ids(1, 2, 3), "0")
    assert len(cache.grow(lease, 3) or []) == 1
    assert cache.grow(lease, 4) == []
    assert len(cache.grow(lease, 13) or []) == 3
    assert cache.grow(lease, 33) is None
    assert len(lease.pages) == 4
    cache.close(lease)


def test_who_publishes_second_takes_over_the_pages_of_the_first(cache):
    """Its own come free, and the later ones stay where they are."""
    one, two = (cache.open(counted(3), "0") for _ in range(2))
    for lease in (one, two):
        cache.grow(lease, 14)
    own = list(two.pages)
    assert cache.publish(one, counted(3)) == []
    assert cache.publish(two, counted(3)) == list(enumerate(one.pages[:3]))
    assert two.pages == [*one.pages[:3], own[3]]
    assert cache.pools.free_pages == 8 - 3 - 2
    cache.close(one)
    cache.close(two)


def test_unpublished_pages_come_free_with_the_lease(cache):
    lease = cache.open(counted(3), "0")
    cache.grow(lease, 12)
    cache.publish(lease, counted(1))
    cache.close(lease)
    cache.close(lease)
    assert cache.pools.free_pages == 7
    assert cache.tree.device_pages == 1


def test_versions_do_not_share(cache):
    cache.close(serve(cache, counted(3)))
    other = cache.open(counted(3), "1")
    assert other.pages == []
    cache.close(other)


def test_flush_forgets_everything(cache):
    """Also what a request uses: it keeps its pages to the end, shares none of them, and gives them back."""
    cache.close(serve(cache, counted(2, first=50)))
    lease = serve(cache, counted(3))
    assert cache.flush() == 2
    assert cache.locked_pages == 3
    other = cache.open(counted(4), "0")
    assert other.pages == []
    cache.grow(lease, 16)
    assert cache.publish(lease, counted(1, first=12)) == []
    assert len(lease.pages) == 4
    cache.close(lease)
    assert cache.pools.free_pages == 8
    cache.grow(other, 12)
    cache.publish(other, counted(3))
    cache.close(other)
    again = cache.open(counted(4), "0")
    assert len(again.pages) == 3
    cache.close(again)


def test_without_reuse_nothing_is_kept():
    cache = make(reuse=False)
    lease = serve(cache, counted(3))
    assert lease.published == 0
    cache.close(lease)
    assert cache.pools.free_pages == 8
    assert cache.open(counted(3), "0").pages == []


def test_the_check_finds_what_does_not_add_up(cache):
    """O8: a page that is nowhere, and one that is kept by nobody."""
    lease = serve(cache, counted(2))
    (lost,) = cache.pools.take(1) or []
    with pytest.raises(AssertionError, match="accounted for"):
        cache.check()
    cache.pools.give([lost])
    cache.leases.remove(lease)
    with pytest.raises(AssertionError, match="held by nobody"):
        cache.check()
    cache.leases.add(lease)
    cache.close(lease)


def test_a_cache_without_tiers_restores_nothing(cache):
    lease = cache.open(counted(3), "0")
    assert cache.begin_restore(lease) is False
    assert not cache.is_moving
    cache.poll()
    cache.close(lease)
