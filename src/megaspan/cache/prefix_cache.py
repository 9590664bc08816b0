"""What the engine asks of its memory: pages for a request, and the prefix that is already there.

A device page is in exactly one place: the free list, the tree (full pages, which others may reuse), a
lease (a running request's own), or an abandoned restore that may still write to it. `check` counts them.
"""

from collections.abc import Callable

import numpy as np

from megaspan.cache.jobs import Restore, Source
from megaspan.cache.pool import PagePools
from megaspan.cache.prefix import Node, PrefixTree
from megaspan.cache.tiers import Tiers


class Lease:
    """One request's pages.

    pages: device pages in order; the first `published` of them belong to the tree. node: the deepest tree
    node it holds. sources: where the pages after them are in lower tiers; below: the tree nodes of these.
    restore: the transfer that fills the pages from `restored_from` on. uncounted: how many of its pages
    `restored_tokens` is still to count. private: its pages are for no other request, because all was
    forgotten meanwhile.
    """

    def __init__(self, node: Node):
        self.node = node
        self.pages: list[int] = []
        self.published = 0
        self.sources: list[Source] = []
        self.below: list[Node] = []
        self.restore: Restore | None = None
        self.restored_from = self.uncounted = 0
        self.private = False


class PrefixCache:
    """Pages of the pools, shared by prefix, with the tiers below them.

    recompute_seconds: (tokens, context) → how long reading that many tokens would take, to weigh a restore
    against. reuse: whether pages are kept for others at all.
    """

    def __init__(
        self,
        pools: PagePools,
        tree: PrefixTree,
        tiers: Tiers | None = None,
        recompute_seconds: Callable[[int, float], float] = lambda tokens, context: float("inf"),
        reuse: bool = True,
    ):
        self.pools, self.tree, self.tiers, self.reuse = pools, tree, tiers, reuse
        self.page_size = pools.page_size
        self.recompute_seconds = recompute_seconds
        self.leases: set[Lease] = set()
        self._abandoned: dict[Restore, list[int]] = {}  # pages that a transfer may still write to
        self.restored_tokens = 0  # that came in full
        self.failed_restores = 0

    def open(self, token_ids: np.ndarray, version: str) -> Lease:
        """Lease the longest cached prefix of token_ids [T] int32, at least one token short of all of it.

        The pages of `lease.pages` are on the device; those of `lease.sources` need `begin_restore`.
        """
        lease = Lease(self.tree.root(version))
        limit = (len(token_ids) - 1) // self.page_size if self.reuse else 0
        nodes = self.tree.walk(version, token_ids, limit) if limit > 0 else []
        on_device = [node for node in nodes if node.page >= 0]
        lease.pages = [node.page for node in on_device]
        lease.published = len(on_device)
        lease.node = on_device[-1] if on_device else lease.node
        self.tree.hold(lease.node)
        if self.tiers is not None:
            lease.below = nodes[len(on_device) :]
            if lease.below:
                self.tree.hold(lease.below[-1])
            on_disk = self.tiers.on_disk(nodes[-1] if nodes else lease.node, token_ids, len(nodes), limit)
            lease.sources = [*(Source(slot=node.host) for node in lease.below), *on_disk]
        self.leases.add(lease)
        return lease

    def begin_restore(self, lease: Lease) -> bool | None:
        """Start to bring the rest of the prefix up, if that is faster than computing it; False if not.

        None where it is, but pages for it come free only when transfers end that are under way.
        """
        count = len(lease.sources)
        if not count or self.tiers is None:
            return False
        seconds = self.recompute_seconds(count * self.page_size, len(lease.pages) * self.page_size)
        worth = self.tiers.worth_restoring(count, seconds)
        pages = self.take(count) if worth else None
        if pages is None:
            if worth and self.is_moving:
                return None
            self._forget_below(lease)
            return False
        lease.restored_from = len(lease.pages)
        lease.restore = self.tiers.restore(lease.sources, pages, lease.below)
        lease.pages = lease.pages + pages
        return True

    def settle_restore(self, lease: Lease) -> None:
        """The restore is staged: keep the pages that turned out good, up to the first that did not."""
        assert lease.restore is not None
        self._abandon(lease, lease.restored_from + lease.restore.usable)
        lease.uncounted = lease.restore.usable

    def abandon_restore(self, lease: Lease) -> None:
        """The restore failed: the lease ends where the device's pages did, and what it read is forgotten."""
        assert lease.restore is not None
        assert self.tiers is not None
        nodes = lease.below
        self._abandon(lease, lease.restored_from)
        self._forget_below(lease)
        self.tiers.forget(lease.restore, nodes)
        lease.restore, lease.uncounted = None, 0
        self.failed_restores += 1

    def grow(self, lease: Lease, tokens: int) -> list[int] | None:
        """The pages added so that the lease has room for `tokens`; None where they cannot be had."""
        missing = -(-tokens // self.page_size) - len(lease.pages)
        if missing <= 0:
            return []
        pages = self.take(missing)
        if pages is not None:
            lease.pages.extend(pages)
        return pages

    def publish(self, lease: Lease, token_ids: np.ndarray) -> list[tuple[int, int]]:
        """Hand full pages to the tree; token_ids [n · page_size] are those of the first unpublished ones.

        Returns (index, page) where another request had published the same tokens: its page replaces the
        lease's own. Nothing is handed over while a restore still writes to the pages, or where one failed.
        """
        restore = lease.restore
        if restore is not None and restore.all_copied:
            self.restored_tokens += lease.uncounted * self.page_size
            lease.uncounted = 0
        if not self.reuse or lease.private or (restore is not None and (restore.error or not restore.done)):
            return []
        swaps, node = [], lease.node
        for start in range(0, len(token_ids), self.page_size):
            index, tokens = lease.published, token_ids[start : start + self.page_size].tobytes()
            node, entered = self.tree.insert(node, tokens, lease.pages[index])
            if not entered:
                self.pools.give([lease.pages[index]])
                lease.pages[index] = node.page
                swaps.append((index, node.page))
            elif self.tiers is not None:
                self.tiers.published(node)
            lease.published += 1
        if node is not lease.node:
            self.tree.hold(node)
            self.tree.release(lease.node)
            lease.node = node
        return swaps

    def close(self, lease: Lease) -> None:
        """The request is done with its pages: published ones stay cached, its own come free."""
        if lease not in self.leases:
            return
        self.leases.remove(lease)
        if lease.restore is not None and self.tiers is not None:
            if not lease.restore.done:
                self._abandon(lease, lease.restored_from)
            self.tiers.withdraw(lease.restore)
        self._forget_below(lease)
        self.pools.give(lease.pages[lease.published :])
        self.tree.release(lease.node)
        lease.pages, lease.published, lease.restore = [], 0, None
        if lease.private:
            pages, slots = self.tree.sweep()
            self.pools.give(pages)
            if self.tiers is not None:
                self.tiers.host.give(slots)

    def available(self) -> int:
        """Pages that are free, or would be after eviction."""
        return self.pools.free_pages + self.tree.evictable_device()

    def take(self, count: int) -> list[int] | None:
        """Free pages, the least recently used cached ones evicted for them; None if there are too few now."""
        missing = count - self.pools.free_pages
        if missing > self.tree.evictable_device():
            return None
        if missing > 0 and self.tiers is None:
            self.pools.give([self.tree.drop_device(node) for node in self.tree.evict_candidates(missing)])
        elif missing > 0 and self.tiers is not None:
            self.tiers.evict(self.tree.evict_candidates(missing - self.tiers.leaving_pages))
        return self.pools.take(count)

    @property
    def is_moving(self) -> bool:
        """Whether more pages can be had when transfers end that are getting on."""
        if self.tiers is None:
            return False
        return self.tiers.is_saving or (bool(self._abandoned) and not self.tiers.transfers.stalled)

    def poll(self) -> None:
        """Take note of ended transfers and start to save what was published. Never blocks."""
        if self.tiers is None:
            return
        self.tiers.poll()
        for restore in [restore for restore in self._abandoned if restore.done]:
            self.pools.give(self._abandoned.pop(restore))

    def flush(self) -> int:
        """Forget all prefixes, in every tier: nothing that is there now is leased again. Returns how many
        device pages come free; those in use do so when their leases are closed."""
        pages, slots = self.tree.clear()
        for lease in self.leases:
            lease.private = True
        self.pools.give(pages)
        if self.tiers is not None:
            self.tiers.flush(slots)
        return len(pages)

    @property
    def locked_pages(self) -> int:
        """Pages that running requests and transfers keep."""
        own = sum(len(lease.pages) - lease.published for lease in self.leases)
        return self.tree.held_pages + own + sum(map(len, self._abandoned.values()))

    def check(self) -> None:
        """AssertionError unless every page of every pool is accounted for exactly once."""
        self.tree.check()
        cached = self.tree.evictable_device()
        total = self.pools.free_pages + cached + self.locked_pages
        assert total == self.pools.total_pages, f"{total} pages accounted for of {self.pools.total_pages}"
        if self.tiers is not None:
            self.tiers.check()
        if not self.leases:
            assert self.tree.held_pages == 0, "pages are held by nobody"

    def _abandon(self, lease: Lease, kept: int) -> None:
        """Cut the lease to `kept` pages; of the others, the transfer's stay with it until it lets go."""
        assert lease.restore is not None
        dropped, lease.pages = lease.pages[kept:], lease.pages[:kept]
        written = set(lease.restore.pages)
        self.pools.give([page for page in dropped if page not in written])
        if written.intersection(dropped):
            kept_back = self._abandoned.setdefault(lease.restore, [])
            kept_back.extend(page for page in dropped if page in written)

    def _forget_below(self, lease: Lease) -> None:
        if lease.below:
            self.tree.release(lease.below[-1])
        lease.below, lease.sources = [], []
