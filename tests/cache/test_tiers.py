"""Leases and tiers under any order of events: nothing is lost, given out twice, or read as what it is not."""

from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from megaspan.cache.host import HostTier
from megaspan.cache.jobs import Backup
from megaspan.cache.pool import PagePools
from megaspan.cache.prefix import PrefixTree
from megaspan.cache.prefix_cache import Lease, PrefixCache
from megaspan.cache.tiers import Tiers
from megaspan.config import ModelConfig
from tests.cache.paper_transfers import PaperDisk, PaperTransfers

DEBUG = ModelConfig.preset("debug")
PAGE, PAGES, SLOTS = 2, 10, 8
# Three prompts that may turn into one another after any page, at most 7 pages long.
PROMPTS = st.builds(
    lambda first, then, turn, length: np.array(([first] * turn * PAGE + [then] * 99)[:length], np.int32),
    st.integers(0, 2),
    st.integers(0, 2),
    st.integers(0, 6),
    st.integers(1, 7 * PAGE),
)


class User:
    """A request: its tokens, how many of its pages hold their rows, and whether it waits for a restore.

    weights: what its rows are computed with.
    """

    def __init__(self, lease: Lease, weights: bytes, tokens: np.ndarray):
        self.lease, self.weights, self.tokens = lease, weights, tokens
        self.written = len(lease.pages)
        self.loading = False

    @property
    def on_the_way(self) -> bool:
        restore = self.lease.restore
        return restore is not None and (not restore.done or restore.error is not None)

    def content(self, pages: int) -> bytes:
        return self.weights + self.tokens[: pages * PAGE].tobytes()


class Machine(RuleBasedStateMachine):
    @initialize(write_back=st.booleans(), disk=st.booleans())
    def start(self, write_back, disk):
        self.pools = PagePools(DEBUG, PAGES, PAGE, "bfloat16")
        self.tree = PrefixTree(PAGE)
        self.files = PaperDisk()
        self.transfers = PaperTransfers(self.pools, self.files)
        host = HostTier(self.pools.segments, SLOTS)
        transfers: Any = self.transfers
        files: Any = self.files if disk else None
        self.tiers = Tiers(self.pools, self.tree, host, transfers, files, write_back)
        self.prefixes = PrefixCache(self.pools, self.tree, self.tiers)
        self.users: list[User] = []
        self.flushes = 0

    def weights(self, version: str) -> bytes:
        """They may change without a name of their own, if all is flushed then."""
        return f"{version}.{self.flushes} ".encode()

    # ---- requests

    @rule(prompt=PROMPTS, version=st.sampled_from("0001"))
    def come_and_go(self, prompt, version):
        count = len(self.users)
        self.open(prompt, version, served=True)
        if len(self.users) > count and not self.users[-1].loading:
            self.prefixes.close(self.users.pop().lease)

    @rule(prompt=PROMPTS, version=st.sampled_from("0001"), served=st.booleans())
    def open(self, prompt, version, served):
        user = User(self.prefixes.open(prompt, version), self.weights(version), prompt)
        assert len(user.lease.pages) + len(user.lease.sources) <= (len(prompt) - 1) // PAGE
        started = self.prefixes.begin_restore(user.lease)
        if started is None:
            assert self.prefixes.is_moving
            return self.prefixes.close(user.lease)
        self.users.append(user)
        user.loading = started
        if served and not started:
            self.write(user, len(prompt))
            self.publish_full(user)

    @precondition(lambda self: self.users)
    @rule(data=st.data(), tokens=st.integers(1, 8))
    def read_on(self, data, tokens):
        user = data.draw(st.sampled_from(self.users))
        if not user.loading:
            self.write(user, min(len(user.tokens), user.written * PAGE + tokens))

    def write(self, user, count):
        """Compute the rows of the first `count` tokens, if there is room, after those that are on the way."""
        if user.lease.restore is not None and user.lease.restore.error:
            return self.do_without(user)
        if user.on_the_way or self.prefixes.grow(user.lease, count) is None:
            return
        for index in range(user.written, count // PAGE):
            self.transfers.device[user.lease.pages[index]] = user.content(index + 1)
        user.written = max(user.written, count // PAGE)

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def publish(self, data):
        user = data.draw(st.sampled_from(self.users))
        if not user.loading:
            self.publish_full(user)

    def publish_full(self, user):
        lease, before = user.lease, list(user.lease.pages)
        swaps = self.prefixes.publish(lease, user.tokens[lease.published * PAGE : user.written * PAGE])
        assert [page for _, page in swaps] == [lease.pages[index] for index, _ in swaps]
        assert all(before[index] != page for index, page in swaps)

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def close(self, data):
        user = self.users.pop(data.draw(st.integers(0, len(self.users) - 1)))
        self.prefixes.close(user.lease)
        self.prefixes.close(user.lease)  # an abort may come twice

    @precondition(lambda self: any(user.loading for user in self.users))
    @rule(data=st.data())
    def settle(self, data):
        """As the scheduler does: give up what failed, begin to read what is there."""
        user = data.draw(st.sampled_from([user for user in self.users if user.loading]))
        restore = user.lease.restore
        if restore.error is not None:
            self.do_without(user)
        elif restore.staged:  # its rows may still be on the way
            self.prefixes.settle_restore(user.lease)
            user.loading, user.written = False, len(user.lease.pages)

    @precondition(lambda self: any(user.loading for user in self.users))
    @rule(data=st.data())
    def give_up(self, data):
        """A restore that takes too long is done without, whatever its thread does later."""
        self.do_without(data.draw(st.sampled_from([user for user in self.users if user.loading])))

    def do_without(self, user):
        self.prefixes.abandon_restore(user.lease)
        user.loading, user.written = False, len(user.lease.pages)

    @precondition(lambda self: any(user.lease.restore for user in self.users))
    @rule(data=st.data())
    def abort(self, data):
        """Who has asked for a restore goes, whatever has become of it."""
        user = data.draw(st.sampled_from([user for user in self.users if user.lease.restore]))
        if not user.loading:
            self.publish_full(user)
        self.users.remove(user)
        self.prefixes.close(user.lease)

    # ---- transfers

    @precondition(lambda self: self.transfers.open)
    @rule(data=st.data(), works=st.booleans())
    def finish(self, data, works):
        self.transfers.finish(data.draw(st.integers(0, len(self.transfers.open) - 1)), works)

    @rule()
    def poll(self):
        self.prefixes.poll()

    @rule()
    def finish_all(self):
        self.prefixes.poll()
        while self.transfers.open:
            self.transfers.finish(0)
        self.prefixes.poll()

    @rule(seldom=st.integers(0, 9))
    def stall(self, seldom):
        self.transfers.stalled, self.transfers.backups_stalled = seldom == 8, seldom == 9

    @precondition(lambda self: self.files.files)
    @rule(data=st.data())
    def lose_a_file(self, data):
        del self.files.files[data.draw(st.sampled_from(sorted(self.files.files)))]

    # ---- memory

    @rule(count=st.integers(1, PAGES))
    def take_and_give(self, count):
        available = self.prefixes.available()
        pages = self.prefixes.take(count)
        if pages is None:
            assert count > available or self.tiers._backups or self.tiers._restores
        else:
            self.pools.give(pages)

    @rule()
    def evict_all(self):
        """Whatever is cached on the device goes down."""
        self.finish_all()
        for _ in range(2):
            pages = self.prefixes.take(self.prefixes.available())
            self.pools.give(pages or [])
            self.finish_all()

    @rule(seldom=st.integers(0, 9))
    def flush(self, seldom):
        if seldom == 9:
            self.prefixes.flush()
            self.flushes += 1
            assert not self.tree.evict_candidates(1)
            assert not self.tree.host_candidates(1)

    @rule()
    def save_all(self):
        """At the end of a process: all of the device gets to the disk, of the host what keeps its slot."""
        if self.tiers.disk is None:
            return
        self.prefixes.poll()
        wanted = self.tree.by_use()[: self.files.capacity(0)]
        saved = self.tiers.save_all(1.0)
        idle = not (self.users or self.transfers.open or self.transfers.backups_stalled)
        left = [node for node in wanted if node.page >= 0 or (saved and node.host >= 0)]
        assert not (saved or idle) or all(self.files.has(node.hash) for node in left)

    # ---- what must always hold

    @invariant()
    def every_page_is_accounted_for(self):
        """O8, P48: once, in whatever state it is."""
        if hasattr(self, "prefixes"):
            self.prefixes.check()

    @invariant()
    def every_page_holds_what_it_is_said_to(self):
        """P39, P40, P52: the tree's pages and slots, and those that requests have written or been given."""
        if not hasattr(self, "prefixes"):
            return
        for version, root in self.tree.roots.items():
            waiting = [(root, self.weights(version))]
            while waiting:
                node, content = waiting.pop()
                waiting += [(child, content + tokens) for tokens, child in node.children.items()]
                assert node.page < 0 or self.transfers.device[node.page] == content
                assert node.host < 0 or self.transfers.host[node.host] == content
                assert self.files.files.get(node.hash, content) == content
        for user in self.users:
            for index, page in enumerate(user.lease.pages[: 0 if user.on_the_way else user.written]):
                assert self.transfers.device[page] == user.content(index + 1)

    @invariant()
    def what_moves_is_not_given_away(self):
        """P52: pages and slots of open jobs are nobody's to reuse, whoever has lost interest."""
        if hasattr(self, "prefixes"):
            for job in self.transfers.open:
                assert all(self.pools._taken[page] for page in job.pages)
                slots = job.slots if isinstance(job, Backup) else []
                assert not any(self.tiers.host._is_free[slot] for slot in slots)

    def teardown(self):
        """P63: whatever happened, when all have gone nothing is kept that cannot be given up."""
        if not hasattr(self, "prefixes"):
            return
        for user in self.users:
            self.prefixes.close(user.lease)
        while self.transfers.open:
            self.transfers.finish(0)
        self.prefixes.poll()
        while self.transfers.open:
            self.transfers.finish(0)
        self.prefixes.poll()
        self.prefixes.check()
        assert self.prefixes.locked_pages == 0
        self.prefixes.flush()
        assert self.pools.free_pages == PAGES
        assert self.tiers.host.free == SLOTS
        assert not self.tiers._restores
        assert not self.tiers._leaving


TestTiers = Machine.TestCase
TestTiers.settings = settings(
    max_examples=150,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
