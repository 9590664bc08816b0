"""The prefix tree: against a plain model under random operations, its order of eviction, its costs."""

import time
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from megaspan.cache.pool import PagePools
from megaspan.cache.prefix import Node, PrefixTree
from megaspan.config import ModelConfig

DEBUG = ModelConfig.preset("debug")
PAGE = 2
VERSIONS = st.sampled_from(["a", "b"])
PATHS = st.lists(st.integers(0, 2), max_size=5).map(tuple)  # which of three token pages comes next


def ids(path) -> np.ndarray:
    """The tokens of a path, PAGE for each of its pages."""
    return np.array([[10 * page, page] for page in path], dtype=np.int32).reshape(-1)


def key(page: int) -> bytes:
    return ids([page]).tobytes()


def grow(tree, path, pages, version="v") -> list[Node]:
    """Insert a path with the given device pages."""
    node, nodes = tree.root(version), []
    for step, page in zip(path, pages, strict=True):
        node, _ = tree.insert(node, key(step), page)
        nodes.append(node)
    return nodes


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
        self.tree = PrefixTree(PAGE, b"machine")
        self.pools = PagePools(DEBUG, 9, PAGE, mtp=False)
        self.slots = list(range(6))
        self.entries: dict[tuple, Entry] = {}  # (version, *path) of every node with a page or a slot
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
        node = self.tree.roots[place[0]]
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

    @rule(version=st.none() | VERSIONS)
    def clear(self, version):
        pages, slots = self.tree.clear(version)
        self.pools.give(pages)
        self.slots += slots
        for place, entry in list(self.entries.items()):
            entry.page = -1 if entry.page in pages else entry.page
            entry.host = -1 if entry.host in slots else entry.host
            used = entry.pending or any(lower.holds for lower in self.below(place))
            assert used or entry.host < 0 or version not in (None, place[0])
            if entry.page < 0 and entry.host < 0:
                del self.entries[place]
        if version is None and not any(entry.holds or entry.pending for entry in self.entries.values()):
            assert not self.tree.roots
            assert self.tree.device_pages == self.tree.host_pages == 0

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


TreeMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestTree = TreeMachine.TestCase


def test_the_same_tokens_under_other_weights_are_not_found():
    tree = PrefixTree(PAGE)
    grow(tree, [1, 2], [0, 1], version="old")
    assert tree.walk("new", ids([1, 2]), 9) == []
    assert len(tree.walk("old", ids([1, 2]), 9)) == 2


def test_only_whole_pages_are_found():
    tree = PrefixTree(PAGE)
    nodes = grow(tree, [1, 2], [0, 1])
    assert tree.walk("v", ids([1, 2])[:3], 9) == nodes[:1]
    assert tree.walk("v", ids([1, 2, 0]), 9) == nodes
    assert tree.walk("v", ids([1, 2]), 1) == nodes[:1]
    assert tree.walk("v", ids([1, 2]).astype(np.int64), 9) == nodes


def test_the_hash_names_all_tokens_the_version_and_the_fingerprint():
    """Two processes with the same model name the same page alike, and nothing else alike."""
    paths = [[1], [2], [1, 2], [2, 1], [1, 1]]
    hashes = []
    for fingerprint in (b"fp8", b"bf16"):
        for version in ("1", "2"):
            tree = PrefixTree(PAGE, fingerprint)
            hashes += [grow(tree, path, range(len(path)), version)[-1].hash for path in paths]
    assert len(set(hashes)) == len(hashes) == 20
    assert all(len(chain) == 16 for chain in hashes)
    again = grow(PrefixTree(PAGE, b"fp8"), [1, 2], [7, 8], "1")
    assert again[1].hash == hashes[2] == PrefixTree.chain(again[0].hash, key(2))


def test_the_least_recently_used_branch_goes_first_leaf_by_leaf():
    tree = PrefixTree(PAGE)
    first = grow(tree, [0, 0, 0], [0, 1, 2])
    second = grow(tree, [1, 1], [3, 4])
    tree.walk("v", ids([0, 0]), 9)  # the third page of the first branch is the oldest now
    expected = [first[2], second[1], second[0], first[1], first[0]]
    assert tree.evict_candidates(9) == expected
    assert [tree.drop_device(node) for node in tree.evict_candidates(3)] == [2, 4, 3]
    grow(tree, [0, 2], [0, 9])
    tree.walk("v", ids([0, 0]), 9)
    assert [node.page for node in tree.evict_candidates(9)] == [9, 1, 0]
    tree.check()


def test_an_evicted_leaf_hands_its_age_on():
    """The first page was found on the way to its child only, and is as recent as that."""
    tree = PrefixTree(PAGE)
    first = grow(tree, [0, 0], [0, 1])
    second = grow(tree, [1], [2])
    tree.walk("v", ids([0, 0]), 9)
    second[0].pending += 1
    assert [tree.drop_device(node) for node in tree.evict_candidates(1)] == [1]
    second[0].pending -= 1
    assert tree.evict_candidates(9) == [second[0], first[0]]


def test_a_walk_that_ends_on_the_host_counts_for_the_device_page_before_it():
    tree = PrefixTree(PAGE)
    first = grow(tree, [0, 0], [0, 1])
    tree.set_host(first[1], 0)
    tree.drop_device(first[1])
    second = grow(tree, [1], [2])
    assert len(tree.walk("v", ids([0, 0]), 9)) == 2
    assert tree.evict_candidates(9) == [second[0], first[0]]


def test_a_restored_page_is_held_as_its_node_was():
    """A lease holds what is on its way up from the host: the page is not evictable when it comes."""
    tree = PrefixTree(PAGE)
    nodes = grow(tree, [0, 1], [0, 1])
    tree.set_host(nodes[1], 0)
    tree.drop_device(nodes[1])
    tree.hold(nodes[1])
    with pytest.raises(ValueError, match="can go"):
        tree.drop_host(nodes[1])  # the only copy
    assert (tree.evictable_device(), tree.held_pages) == (0, 1)
    tree.insert(nodes[0], key(1), 5)
    assert (tree.evictable_device(), tree.held_pages) == (0, 2)
    tree.check()
    assert tree.drop_host(nodes[1]) == 0


def test_a_held_node_protects_what_it_stands_on_and_nothing_else():
    tree = PrefixTree(PAGE)
    nodes = grow(tree, [0, 1, 2], [0, 1, 2])
    tree.hold(nodes[1])
    assert tree.evictable_device() == 1
    assert tree.evict_candidates(9) == [nodes[2]]
    with pytest.raises(ValueError, match="can go"):
        tree.drop_device(nodes[1])
    tree.release(nodes[1])
    assert tree.evictable_device() == 3
    with pytest.raises(ValueError, match="not held"):
        tree.release(nodes[1])
    with pytest.raises(ValueError, match="can go"):
        tree.drop_device(nodes[1])  # one stands on it


def test_a_page_that_is_moving_stays_and_comes_up_again_afterwards():
    """P52: neither it nor what it stands on is a candidate before the transfer has let go."""
    tree = PrefixTree(PAGE)
    nodes = grow(tree, [0, 1], [0, 1])
    nodes[1].pending += 1
    assert tree.evict_candidates(9) == []
    nodes[1].pending -= 1
    assert tree.evict_candidates(9) == [nodes[1], nodes[0]]


def test_a_page_on_the_host_is_found_behind_those_on_the_device():
    tree = PrefixTree(PAGE)
    nodes = grow(tree, [0, 1, 2], [0, 1, 2])
    for slot, node in enumerate(nodes):
        tree.set_host(node, slot)
    assert [tree.drop_device(node) for node in tree.evict_candidates(2)] == [2, 1]
    assert [(node.page, node.host) for node in tree.walk("v", ids([0, 1, 2]), 9)] == [
        (0, 0),
        (-1, 1),
        (-1, 2),
    ]
    with pytest.raises(ValueError, match="not on the device"):
        tree.insert(nodes[1], key(2), 5)
    assert tree.insert(nodes[0], key(1), 5) == (nodes[1], True)
    assert tree.insert(nodes[0], key(1), 6) == (nodes[1], False)
    assert nodes[1].page == 5
    assert [tree.drop_host(node) for node in tree.host_candidates(9)] == [2, 1, 0]
    assert tree.walk("v", ids([0, 1, 2]), 9) == nodes[:2]
    tree.check()


def test_a_gap_ends_the_walk_until_it_is_filled_again():
    """A middle page is in no tier; what lies below it on the host is found once it is computed anew."""
    tree = PrefixTree(PAGE)
    nodes = grow(tree, [0, 1, 2], [0, 1, 2])
    tree.set_host(nodes[2], 0)
    for node in tree.evict_candidates(2):
        tree.drop_device(node)
    assert tree.walk("v", ids([0, 1, 2]), 9) == nodes[:1]
    tree.insert(nodes[0], key(1), 7)
    assert tree.walk("v", ids([0, 1, 2]), 9) == nodes
    tree.check()


def test_clear_spares_what_is_in_use():
    tree = PrefixTree(PAGE)
    nodes = grow(tree, [0, 1, 2], [0, 1, 2])
    tree.set_host(nodes[2], 4)
    tree.set_host(nodes[0], 3)
    tree.hold(nodes[0])
    grow(tree, [5], [8], version="other")
    pages, slots = tree.clear("v")
    assert (sorted(pages), slots) == ([1, 2], [4])
    assert tree.walk("v", ids([0, 1]), 9) == nodes[:1]
    tree.release(nodes[0])
    pages, slots = tree.clear()
    assert (sorted(pages), slots) == ([0, 8], [3])
    assert not tree.roots


def test_wrong_page_sizes_are_refused():
    tree = PrefixTree(PAGE)
    with pytest.raises(ValueError, match="a page is 2 int32 ids, not 4 bytes"):
        tree.insert(tree.root("v"), key(1)[:4], 0)


def test_check_finds_what_is_wrong():
    for name, damage in {
        "device pages": lambda tree, node: setattr(tree, "device_pages", 3),
        "held device pages": lambda tree, node: setattr(node, "holds", 1),
        "device children": lambda tree, node: setattr(node.parent, "device_children", 2),
        "host children": lambda tree, node: setattr(node.parent, "host_children", 2),
        "hash": lambda tree, node: setattr(node, "hash", b""),
    }.items():
        tree = PrefixTree(PAGE)
        damage(tree, grow(tree, [0, 1], [0, 1])[1])
        with pytest.raises(AssertionError, match=name):
            tree.check()


def test_a_million_token_prompt_is_found_and_held_quickly():
    """16,384 pages of 64 tokens; and one more page costs the same as at the beginning."""
    tree, count = PrefixTree(64), 2**14
    tokens = np.random.default_rng(0).integers(0, 150_000, (count + 1) * 64).astype(np.int32)
    node = tree.root("v")
    for number in range(count):
        node, _ = tree.insert(node, tokens[64 * number : 64 * number + 64].tobytes(), number)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        assert len(tree.walk("v", tokens, count)) == count
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.04
    tree.hold(node)
    last, _ = tree.insert(node, tokens[64 * count :].tobytes(), count)
    tree.hold(last)
    assert node.parent is not None
    assert (last.holds, node.holds, node.parent.holds) == (1, 2, 1)  # it stopped where all is held already
    tree.release(node)
    assert tree.held_pages == count + 1
    tree.release(last)
    assert tree.evictable_device() == tree.device_pages == count + 1
