"""A prefix cache with all its tiers, over real transfers."""

from typing import Any

import numpy as np

from megaspan.cache.prefix import PrefixTree
from megaspan.cache.prefix_cache import PrefixCache
from megaspan.cache.tiers import Tiers
from tests.cache.transfer_rig import BOUND, PAGE, Rig


class Tiered:
    """Over a rig whose pages hold random rows, so that a page can be told from every other."""

    def __init__(self, rig: Rig, write_back: bool = False):
        self.rig, self.transfers = rig, rig.transfers
        self.disk: Any = rig.disk
        self.tree = PrefixTree(PAGE)
        self.tiers = Tiers(rig.pools, self.tree, rig.host, rig.transfers, rig.disk, write_back)
        self.prefixes = PrefixCache(rig.pools, self.tree, self.tiers)

    def settle(self) -> None:
        """Let transfers end, take note of them, and start what follows from them."""
        for _ in range(3):
            assert self.transfers.flush(BOUND)
            self.prefixes.poll()

    def serve(self, tokens: np.ndarray) -> list[bytes]:
        """As a request that reads the tokens and ends; returns the rows of its full pages."""
        lease = self.prefixes.open(tokens, "0")
        assert self.prefixes.grow(lease, len(tokens)) is not None
        full = len(tokens) // PAGE
        self.prefixes.publish(lease, tokens[lease.published * PAGE : full * PAGE])
        rows = [self.rows(page) for page in lease.pages[:full]]
        self.prefixes.close(lease)
        return rows

    def evict(self) -> None:
        """All that is cached leaves the device."""
        pages = None
        while pages is None:
            self.settle()
            pages = self.prefixes.take(self.rig.pools.total_pages)
        self.rig.poison()
        self.rig.pools.give(pages)

    def restoring(self, tokens: np.ndarray) -> Any:
        """A lease whose restore has begun."""
        lease = self.prefixes.open(tokens, "0")
        assert self.prefixes.begin_restore(lease) is True
        return lease

    def rows(self, page: int) -> bytes:
        """All rows of a page, as bytes."""
        return b"".join(segment.pages[page].numpy().tobytes() for segment in self.rig.pools.segments)

    def check_empty(self) -> None:
        """AssertionError unless every page and slot is free."""
        self.prefixes.check()
        assert self.rig.pools.free_pages == self.rig.pools.total_pages
        assert self.rig.host.free == self.rig.host.total


def counted(pages: int, first: int = 0) -> np.ndarray:
    """`pages` pages of tokens and one token more, counted from `first` on."""
    return np.arange(first, first + pages * PAGE + 1, dtype=np.int32)
