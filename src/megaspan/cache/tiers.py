"""The tiers below the device pools: what is saved, when, and what is brought back.

Write-through saves a page as soon as it is published; write-back when its device page is wanted, which
then comes free at the end of the transfer. A page whose transfer has not been acknowledged is `pending` and
stays where it is.
"""

import time

import numpy as np

from megaspan.cache.disk import DiskTier
from megaspan.cache.host import HostTier
from megaspan.cache.jobs import Backup, Restore, Source
from megaspan.cache.pool import PagePools
from megaspan.cache.prefix import Node, PrefixTree
from megaspan.cache.restore_policy import RestorePolicy
from megaspan.cache.transfer import Transfers


class Tiers:
    """The host tier, and the disk below it, of one tree's pages."""

    def __init__(
        self,
        pools: PagePools,
        tree: PrefixTree,
        host: HostTier,
        transfers: Transfers,
        disk: DiskTier | None = None,
        write_back: bool = False,
    ):
        self.pools, self.tree, self.host, self.transfers, self.disk = pools, tree, host, transfers, disk
        self.write_back = write_back
        self.policy = RestorePolicy()
        self._published: list[Node] = []  # not yet saved
        self._backups: dict[Backup, list[Node]] = {}
        self._restores: dict[Restore, list[Node]] = {}  # the nodes whose slots are read
        self._leaving: dict[Backup, list[Node]] = {}  # nodes to evict when it ends, in this order
        self._flushed: set[Backup] = set()  # those under way when all was forgotten

    # ---- down

    def published(self, node: Node) -> None:
        """A page has become full and entered the tree."""
        if not self.write_back:
            self._published.append(node)

    def evict(self, nodes: list[Node]) -> None:
        """Free the device pages of these nodes, children before parents: now, or once they are saved."""
        unsaved = [node for node in nodes if node.host < 0] if self.write_back else []
        job = self._save(unsaved[::-1])  # where room is short, those that others stand on
        leaving: list[Node] = []
        for node in nodes:
            if self.tree.is_evictable(node):
                self.pools.give([self.tree.drop_device(node)])
            else:
                leaving.append(node)  # it is being saved, or stands below what is
        if job is not None:
            self._leaving[job] = leaving

    @property
    def leaving_pages(self) -> int:
        """Pages that come free when the backups under way end."""
        return 0 if self.transfers.backups_stalled else sum(map(len, self._leaving.values()))

    @property
    def is_saving(self) -> bool:
        """Whether backups are under way, and getting on: pages can be evicted when they end."""
        return bool(self._backups) and not self.transfers.backups_stalled

    def _save(self, nodes: list[Node]) -> Backup | None:
        """Copy the nodes' pages to the host tier, as many as find room there; none while backups hang."""
        slots = [] if self.transfers.backups_stalled else self._take_slots(len(nodes))
        nodes = nodes[: len(slots)]
        if not nodes:
            return None
        for node in nodes:
            node.pending += 1
        entries = [(node.hash, node.tokens) for node in nodes]
        job = self.transfers.backup([node.page for node in nodes], slots, entries)
        self._backups[job] = nodes
        return job

    def _take_slots(self, count: int) -> list[int]:
        """Up to `count` slots, the least recently used ones given up for them."""
        missing = count - self.host.free
        if missing > 0:
            self.host.give([self.tree.drop_host(node) for node in self.tree.host_candidates(missing)])
        return self.host.take(min(count, self.host.free)) or []

    def save_all(self, seconds: float) -> bool:
        """Give the disk what it lacks of all prefixes, for the next process; whether that came to an end.

        The most recently used come first, and no more than it has room for, so that what a bound cuts off
        is what will be missed least.
        """
        if self.disk is None:
            return True
        deadline = time.monotonic() + seconds
        self.poll()  # what was published last
        wanted = self.tree.by_use()[: self.disk.capacity(4 * self.tree.page_size)]
        self.disk.touch(node.hash for node in reversed(wanted))
        lacking: list[Node] | None = None
        while self.transfers.flush_saves(deadline - time.monotonic()):
            self.poll()
            before, lacking = lacking, [node for node in wanted if self._is_only_above(node)]
            if not lacking or lacking == before:  # the disk takes no more
                return not lacking
            self._send_to_disk(lacking[: self.transfers.staged_pages])
        return False

    def _is_only_above(self, node: Node) -> bool:
        """Whether a page is on the device or the host, and not on the disk."""
        assert self.disk is not None
        return (node.page >= 0 or node.host >= 0) and not self.disk.has(node.hash)

    def _send_to_disk(self, nodes: list[Node]) -> None:
        assert self.disk is not None
        for node in nodes:
            if node.host >= 0:
                self.transfers.save(node.host, node.hash, node.tokens, self.disk.generation)
        self._save([node for node in nodes if node.host < 0 and not node.pending])

    def _backed_up(self, job: Backup) -> None:
        for node, slot in zip(self._backups.pop(job), job.slots, strict=True):
            node.pending -= 1
            if job.error is None:
                self.tree.set_host(node, slot)
            else:
                self.host.give([slot])
        for node in self._leaving.pop(job, []):
            if self.tree.is_evictable(node):
                self.pools.give([self.tree.drop_device(node)])
        if job in self._flushed:
            self._flushed.remove(job)
            pages, slots = self.tree.sweep()
            self.pools.give(pages)
            self.host.give(slots)

    # ---- up

    def on_disk(self, node: Node, token_ids: np.ndarray, index: int, limit: int) -> list[Source]:
        """Disk pages of token_ids [T] from page `index` to `limit`, where the tree ends at `node`."""
        found: list[Source] = []
        size, chain = self.tree.page_size, node.hash
        while self.disk is not None and index < limit:
            tokens = token_ids[index * size : (index + 1) * size].tobytes()
            chain = self.tree.chain(chain, tokens)
            if not self.disk.has(chain):
                break
            found.append(Source(key=chain, tokens=tokens))
            index += 1
        return found

    def worth_restoring(self, pages: int, recompute_seconds: float) -> bool:
        return not self.transfers.stalled and self.policy.worth(
            pages * self.host.page_bytes, recompute_seconds
        )

    def restore(self, sources: list[Source], pages: list[int], nodes: list[Node]) -> Restore:
        """Fill device pages from lower tiers; `nodes`: those whose host slots are read."""
        for node in nodes:
            node.pending += 1
        job = self.transfers.restore(sources, pages)
        self._restores[job] = list(nodes)
        return job

    def withdraw(self, job: Restore) -> None:
        """Nobody waits for this any more, nor is anybody to wait because of it.

        Its thread may read on, from slots that are another's by then: all that it fills are pages that stay
        its own until it lets go, and memory that nobody else knows of.
        """
        job.abort()
        self._let_go(job)

    def forget(self, job: Restore, nodes: list[Node]) -> None:
        """What a failed restore read is not offered again."""
        self.withdraw(job)
        for node in reversed(nodes):
            if node.host >= 0 and not (node.pending or node.holds):
                self.host.give([self.tree.drop_host(node)])

    def _restored(self, job: Restore) -> None:
        self._let_go(job)
        if job.error is None:
            self.policy.measured(job.usable * self.host.page_bytes, job.seconds)

    def _let_go(self, job: Restore) -> None:
        for node in self._restores.pop(job, []):
            node.pending -= 1

    # ---- bookkeeping

    def flush(self, slots: list[int]) -> None:
        """Forget all that is here: `slots`, which the tree has given up, what is on its way, and the disk."""
        self.host.give(slots)
        self._published = []
        self._flushed.update(self._backups)
        self.transfers.clear_disk()

    def poll(self) -> None:
        """Take note of ended transfers, then save what was published since. Never blocks."""
        for job in self.transfers.finished():
            if isinstance(job, Backup):
                self._backed_up(job)
            else:
                self._restored(job)
        fresh = [node for node in self._published if node.page >= 0 and node.host < 0 and not node.pending]
        self._published = []
        self._save(fresh)

    def check(self) -> None:
        """AssertionError unless every host slot is accounted for exactly once."""
        moving = sum(len(job.slots) for job in self._backups)
        total = self.host.free + self.tree.host_pages + moving
        assert total == self.host.total, f"{total} host slots accounted for of {self.host.total}"
