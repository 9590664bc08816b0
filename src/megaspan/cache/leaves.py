"""The leaves of one tier of the prefix tree, least recently used first."""

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megaspan.cache.prefix import Node


class Leaves:
    """A heap of the nodes that may leave a tier: they have a place in it, no child there, and are not held.

    Entries are corrected when they come up, not when a node changes: stamps only grow, so an old one
    comes up too early, is seen to be old, and goes back. Each node is in the heap at most once.

    place: a node's page or slot in the tier, negative for none. children: its children that have one.
    """

    def __init__(self, place: Callable[["Node"], int], children: Callable[["Node"], int]):
        self._place, self._children = place, children
        self._heap: list[tuple[int, int, Node]] = []
        self._queued: set[Node] = set()
        self._order = itertools.count()  # breaks ties, since nodes have no order

    def add(self, node: "Node") -> None:
        """Take a node in if it is such a leaf. To be called whenever it may have become one."""
        if not self._children(node) and self._may_leave(node):
            self._push(node)

    def coldest(self, count: int) -> list["Node"]:
        """Up to `count` nodes that can be dropped one after the other in this order; none is dropped yet."""
        chosen: list[Node] = []
        moving: list[Node] = []  # a transfer reads or writes them
        leaving: Counter[Node] = Counter()  # children of a node that are among the chosen
        while self._heap and len(chosen) < count:
            stamp, _, node = heapq.heappop(self._heap)
            self._queued.discard(node)
            if self._children(node) != leaving[node] or not self._may_leave(node):
                continue
            if stamp < node.used:
                self._push(node)
                continue
            if node.pending:
                moving.append(node)
                continue
            chosen.append(node)
            parent = node.parent
            assert parent is not None
            leaving[parent] += 1
            if self._children(parent) == leaving[parent] and self._may_leave(parent):
                self._push(parent)
        for node in (*chosen, *moving):  # until they are dropped they are leaves like any other
            self._push(node)
        return chosen

    def check(self, nodes: Iterable["Node"]) -> None:
        """AssertionError where a leaf among the nodes would never come up."""
        for node in nodes:
            leaf = not self._children(node) and self._may_leave(node)
            assert not leaf or node in self._queued, "a leaf that is not queued"
        assert len(self._heap) == len(self._queued), "the heap and its members"

    def _may_leave(self, node: "Node") -> bool:
        return self._place(node) >= 0 and node.holds == 0

    def _push(self, node: "Node") -> None:
        if node not in self._queued:
            self._queued.add(node)
            heapq.heappush(self._heap, (node.used, next(self._order), node))
