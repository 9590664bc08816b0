"""The prefix tree against a plain model, a dictionary of paths, under random operations."""

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from megaspan.cache.pool import PagePools
from megaspan.cache.prefix import Node, PrefixTree
from megaspan.config import ModelConfig
from tests.cache.prefix_paths import PAGE, ids, key

DEBUG = ModelConfig.preset("debug")
VERSIONS = st.sampled_from(["a", "b"])
PATHS = st.lists(st.integers(0, 2), max_size=5).map(tuple)  # which of three token pages comes next


@dataclass
class Entry:
    page: int = -1
    host: int = -1
    used: int = 0
    holds: int = 0
    pending: int = 0


class TreeMachine(RuleBasedStateMachine):
    """The tree over real pools and host slots, against a dictionary of paths that is searched plainly."""

    @initialize(write_back=st.booleans())
    def start(self, write_back):
        self.write_back = write_back
        self.tree = PrefixTree(PAGE, lambda: b"machine")
        self.pools = PagePools(DEBUG, 9, PAGE, mtp=False)
        self.slots = list(range(6))
        self.entries: dict[tuple, Entry] = {}  # (version, *path) of every node with a page or a slot
        self.cleared: dict[str, Node] = {}  # roots by the names that the model gives them then
        self.clock = 0

    # the plain model

    def below(self, place):
        return [entry for other, entry in self.entries.items() if other[: len(place)] == place]

    def touch(self, place):
        self.clock += 1
        for length in range(2, len(place) + 1):
            if place[:length] in self.entries:
                self.entries[place[:length]].used = self.clock

    def known(self, place) -> list[tuple]:
        """The places of the longest prefix that has a page or a slot everywhere."""
        found = []
        for length in range(2, len(place) + 1):
            if place[:length] not in self.entries:
                break
            found.append(place[:length])
        return found

    def coldest(self, count) -> list[tuple]:
        present = {place: entry for place, entry in self.entries.items() if entry.page >= 0}
        order = []
        while len(order) < count:
            leaves = [
                (entry.used, place)
                for place, entry in present.items()
                if not any(other != place and other[: len(place)] == place for other in present)
                and not any(lower.holds for lower in self.below(place))
                and not entry.pending
            ]
            if not leaves:
                break
            order.append(min(leaves)[1])
            del present[order[-1]]
        return order

    def node(self, place) -> Node:
        node = self.cleared.get(place[0]) or self.tree.roots[place[0]]
        for page in place[1:]:
            node = node.children[key(page)]
        return node

    def drop(self, place, tier):
        entry = self.entries[place]
        if tier == "page":
            self.pools.give([self.tree.drop_device(self.node(place))])
            entry.page = -1
        else:
            self.slots.append(self.tree.drop_host(self.node(place)))
            entry.host = -1
        if entry.page < 0 and entry.host < 0:
            del self.entries[place]

    def save(self, place) -> None:
        if self.slots and self.entries[place].host < 0:
            self.entries[place].host = self.slots.pop()
            self.tree.set_host(self.node(place), self.entries[place].host)

    # what may happen

    @rule(version=VERSIONS, path=PATHS, limit=st.integers(0, 6))
    def walk(self, version, path, limit):
        found = self.tree.walk(version, ids(path), limit)
        expected = self.known((version, *path[:limit]))
        assert found == [self.node(place) for place in expected]
        if expected:
            self.touch(expected[-1])

    @rule(version=VERSIONS, path=PATHS)
    def publish(self, version, path):
        """Insert a prompt page by page, as far as there are pages; those on the host are filled again."""
        node = self.tree.root(version)
        for length in range(1, len(path) + 1):
            place = (version, *path[:length])
            taken = self.pools.take(1)
            if taken is None:
                return
            old = self.entries.get(place, Entry())
            node, mine = self.tree.insert(node, key(place[-1]), taken[0])
            assert mine == (old.page < 0)
            if mine:
                self.entries[place] = old
                old.page = taken[0]
                if not self.write_back:
                    self.save(place)
            else:
                assert node.page == old.page
                self.pools.give(taken)
            self.touch(place)

    @rule(count=st.integers(0, 4))
    def evict(self, count):
        """P48: candidates one after the other, saved first under write-back."""
        expected = self.coldest(count)
        chosen = self.tree.evict_candidates(count)
        assert chosen == [self.node(place) for place in expected]
        assert self.tree.evict_candidates(count) == chosen  # asking changes nothing
        for place in expected:
            if self.write_back:
                self.save(place)
            self.drop(place, "page")

    @rule(count=st.integers(0, 3))
    def evict_host(self, count):
        chosen = self.tree.host_candidates(count)
        places = {self.node(place): place for place in self.entries}
        for node in chosen:
            assert not node.host_children
            self.drop(places[node], "host")
        free = [
            place
            for place, entry in self.entries.items()
            if entry.host >= 0 and not entry.pending and not any(lower.holds for lower in self.below(place))
        ]
        lowest = [place for place in free if not self.node(place).host_children]
        assert len(chosen) == count or not lowest

    @precondition(lambda self: any(entry.page >= 0 for entry in self.entries.values()))
    @rule(data=st.data())
    def hold(self, data):
        place = data.draw(st.sampled_from([p for p, entry in self.entries.items() if entry.page >= 0]))
        self.tree.hold(self.node(place))
        self.entries[place].holds += 1

    @precondition(lambda self: any(entry.holds for entry in self.entries.values()))
    @rule(data=st.data())
    def release(self, data):
        place = data.draw(st.sampled_from([p for p, entry in self.entries.items() if entry.holds]))
        self.tree.release(self.node(place))
        self.entries[place].holds -= 1
        self.touch(place)

    @precondition(lambda self: self.entries)
    @rule(data=st.data())
    def begin_or_end_a_transfer(self, data):
        place = data.draw(st.sampled_from(list(self.entries)))
        entry, node = self.entries[place], self.node(place)
        entry.pending = node.pending = 1 - entry.pending
        if entry.pending:
            for tier in ("drop_device", "drop_host"):
                with pytest.raises(ValueError, match="can go"):
                    getattr(self.tree, tier)(node)

    @rule()
    def clear(self):
        """What is in use stays where it is, under a name that nobody asks for."""
        before = len(self.cleared)
        for version, root in self.tree.roots.items():
            self.cleared[f"{version} cleared {before}"] = root
        self.entries = {
            (f"{place[0]} cleared {before}", *place[1:]) if place[0] in self.tree.roots else place: entry
            for place, entry in self.entries.items()
        }
        self.drop_unused(*self.tree.clear())
        assert not self.tree.roots

    @rule()
    def sweep(self):
        self.drop_unused(*self.tree.sweep())

    def drop_unused(self, pages, slots):
        self.pools.give(pages)
        self.slots += slots
        for place, entry in list(self.entries.items()):
            if place[0] not in self.cleared:
                continue
            entry.page = -1 if entry.page in pages else entry.page
            entry.host = -1 if entry.host in slots else entry.host
            in_use = any(lower.holds or lower.pending for lower in self.below(place))
            assert in_use or (entry.page, entry.host) == (-1, -1)
            if (entry.page, entry.host) == (-1, -1):
                assert (entry.holds, entry.pending) == (0, 0)
                del self.entries[place]

    # what always holds

    @invariant()
    def counters_are_a_full_recount(self):
        self.tree.check()
        pages = {place for place, entry in self.entries.items() if entry.page >= 0}
        held = {place for place in pages if any(lower.holds for lower in self.below(place))}
        assert (self.tree.device_pages, self.tree.held_pages) == (len(pages), len(held))
        assert self.tree.evictable_device() == len(pages) - len(held)
        for place, entry in self.entries.items():
            node = self.node(place)
            assert (node.page, node.host) == (entry.page, entry.host)

    @invariant()
    def the_ledger_closes(self):
        """O8, P48: no page is counted twice, in either tier."""
        assert self.pools.free_pages + self.tree.device_pages == self.pools.total_pages
        assert len(set(self.slots)) + self.tree.host_pages == 6


TreeMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestTree = TreeMachine.TestCase
