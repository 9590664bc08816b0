"""The prefix tree: which token pages are cached, on the device or on the host, and which to evict next."""

from collections.abc import Callable, Iterator
from hashlib import blake2b

import numpy as np

from megaspan.cache.leaves import Leaves

NOWHERE = -1


class Node:
    """One page of tokens below its parent.

    tokens: the page's int32 ids as bytes, its key in `parent.children`. page: the device page with its
    rows, or -1. host: the host slot, or -1. holds: how often it is held itself, plus its held children.
    pending: transfers that read or write its page or slot, counted by whoever starts them; neither leaves
    the tree meanwhile. used: when it was last found. hash: of all the tokens up to here, the weights
    version and the tree's fingerprint (16 bytes).
    """

    __slots__ = (
        "children",
        "device_children",
        "hash",
        "holds",
        "host",
        "host_children",
        "page",
        "parent",
        "pending",
        "tokens",
        "used",
    )

    def __init__(self, parent: "Node | None", tokens: bytes, chain: bytes):
        self.parent, self.tokens, self.hash = parent, tokens, chain
        self.children: dict[bytes, Node] = {}
        self.page = self.host = NOWHERE
        self.device_children = self.host_children = 0  # children with a device page, with a host slot
        self.holds = self.pending = self.used = 0


class PrefixTree:
    """A radix tree whose edge is one page of token ids, with a root for each weights version.

    A node with a device page has only ancestors with device pages, so a walk finds device pages first,
    then those that are on the host alone. A held node and its ancestors are never evicted.

    Only the deepest node of a walk is stamped as used. A leaf that is evicted hands its stamp on to its
    parent, which is therefore never older than what stood on it, at a cost that no length adds to.

    fingerprint: gives a name for all else that the rows depend on (model, formats), which goes into every
    hash. It is asked for each root, and so after every change of weights that is told.
    """

    def __init__(self, page_size: int, fingerprint: Callable[[], bytes] = bytes):
        self.page_size, self.fingerprint = page_size, fingerprint
        self.roots: dict[str, Node] = {}
        self._cleared: list[Node] = []  # roots of what was in use when it was forgotten
        self.device_pages = self.host_pages = 0
        self.held_pages = 0  # device pages of held nodes
        self._clock = 0
        self._device_leaves = Leaves(lambda node: node.page, lambda node: node.device_children)
        self._host_leaves = Leaves(lambda node: node.host, lambda node: node.host_children)

    def root(self, version: str) -> Node:
        """The empty prefix under a weights version."""
        root = self.roots.get(version)
        if root is None:
            seed = blake2b(self.fingerprint(), digest_size=16).digest()
            root = self.roots[version] = Node(None, b"", self.chain(seed, version.encode()))
        return root

    @staticmethod
    def chain(parent: bytes, tokens: bytes) -> bytes:
        """The hash of a page of tokens that follows the page with hash `parent`."""
        return blake2b(parent + tokens, digest_size=16).digest()

    def walk(self, version: str, token_ids: np.ndarray, limit_pages: int) -> list[Node]:
        """The longest cached prefix of token_ids [L] int32, at most `limit_pages` nodes, in order."""
        root = self.roots.get(version)
        if root is None:
            return []
        data = np.ascontiguousarray(token_ids, dtype=np.int32).tobytes()
        width = 4 * self.page_size
        found: list[Node] = []
        on_device, children = None, root.children
        for start in range(0, width * min(limit_pages, len(token_ids) // self.page_size), width):
            node = children.get(data[start : start + width])
            if node is None or (node.page < 0 and node.host < 0):
                break
            if node.page >= 0:
                on_device = node
            found.append(node)
            children = node.children
        for node in (on_device, *found[-1:]):
            if node is not None:
                self._touch(node)
        return found

    def insert(self, parent: Node, tokens: bytes, page: int) -> tuple[Node, bool]:
        """Enter a page of tokens below `parent`; False where the tree has another page for them already.

        The tree then keeps its own, and `page` stays the caller's. ValueError where the parent has no page.
        """
        if len(tokens) != 4 * self.page_size:
            raise ValueError(f"a page is {self.page_size} int32 ids, not {len(tokens)} bytes")
        if parent.parent is not None and parent.page < 0:
            raise ValueError("a page is entered below one that is not on the device")
        node = parent.children.get(tokens)
        if node is None:
            node = parent.children[tokens] = Node(parent, tokens, self.chain(parent.hash, tokens))
        if node.page < 0:
            node.page = page
            self.device_pages += 1
            self.held_pages += node.holds > 0
            parent.device_children += 1
            self._queue(node)
        self._touch(node)
        return node, node.page == page

    def hold(self, node: Node) -> None:
        """Keep the node and its ancestors from eviction. Costs as many steps as nodes become held."""
        held: Node | None = node
        while held is not None:
            held.holds += 1
            if held.holds > 1:
                return
            self.held_pages += held.page >= 0
            held = held.parent

    def release(self, node: Node) -> None:
        """Undo one `hold`. Costs as many steps as nodes are free afterwards."""
        if node.holds < 1:
            raise ValueError("a node is released that is not held")
        self._touch(node)
        released: Node | None = node
        while released is not None:
            released.holds -= 1
            if released.holds:
                return
            self.held_pages -= released.page >= 0
            self._queue(released)
            parent = released.parent
            self._prune(released)
            released = parent

    def evictable_device(self) -> int:
        """Device pages that are not held, those of pending transfers and what they stand on included."""
        return self.device_pages - self.held_pages

    def is_evictable(self, node: Node) -> bool:
        """Whether `drop_device` would take the node's page now."""
        return node.page >= 0 and not (node.holds or node.pending or node.device_children)

    def evict_candidates(self, count: int) -> list[Node]:
        """Up to `count` nodes to drop from the device in this order, least recently used first."""
        return self._device_leaves.coldest(count)

    def host_candidates(self, count: int) -> list[Node]:
        """Up to `count` nodes to drop from the host in this order, least recently used first."""
        return self._host_leaves.coldest(count)

    def drop_device(self, node: Node) -> int:
        """Take the device page out of the tree and return it. A node that has no host slot either goes."""
        if not self.is_evictable(node):
            raise ValueError("only a device page that is neither held nor moving, with none below, can go")
        page, parent = node.page, node.parent
        assert parent is not None
        node.page = NOWHERE
        self.device_pages -= 1
        parent.device_children -= 1
        self._left(node, parent)
        return page

    def set_host(self, node: Node, slot: int) -> None:
        """The node's rows are in a host slot as well."""
        if node.host >= 0 or node.parent is None:
            raise ValueError("a node has one host slot, and the root none")
        node.host = slot
        node.parent.host_children += 1
        self.host_pages += 1
        self._queue(node)

    def drop_host(self, node: Node) -> int:
        """Take the host slot out of the tree and return it. A node that has no device page either goes."""
        if node.host < 0 or node.pending or (node.holds and node.page < 0):
            raise ValueError("only a host slot that no lease and no transfer needs can go")
        slot, parent = node.host, node.parent
        assert parent is not None
        node.host = NOWHERE
        self.host_pages -= 1
        parent.host_children -= 1
        self._left(node, parent)
        return slot

    def by_use(self) -> list[Node]:
        """All nodes that a walk may find: the branch used last first, parents before their children."""
        nodes = [node for root in self.roots.values() for node in self._below(root)]
        used: dict[Node | None, int] = {}  # by a node or one below it
        for node in reversed(nodes):
            used[node] = max(node.used, used.get(node, 0))
            used[node.parent] = max(used[node], used.get(node.parent, 0))
        return sorted(nodes, key=lambda node: -used[node])

    def clear(self) -> tuple[list[int], list[int]]:
        """Forget everything: no walk finds it again. Returns the device pages and host slots of what nobody
        uses; the others follow from `sweep`, once they are neither held nor moving."""
        self._cleared += self.roots.values()
        self.roots = {}
        return self.sweep()

    def sweep(self) -> tuple[list[int], list[int]]:
        """Drop what nobody uses any more of what was forgotten; returns its device pages and host slots."""
        pages, slots = [], []
        for root in self._cleared:
            for node in reversed(list(self._below(root))):  # children before their parents
                if node.holds or node.pending:
                    continue
                if node.host >= 0:
                    slots.append(self.drop_host(node))
                if self.is_evictable(node):
                    pages.append(self.drop_device(node))
        self._cleared = [root for root in self._cleared if root.children or root.holds]
        return pages, slots

    def check(self) -> None:
        """Recount everything; AssertionError names what does not agree. For tests and idle moments."""
        roots = [*self.roots.values(), *self._cleared]
        nodes = [node for root in roots for node in self._below(root)]
        pages = [node.page for node in nodes if node.page >= 0]
        slots = [node.host for node in nodes if node.host >= 0]
        assert len(set(pages)) == len(pages) == self.device_pages, "device pages"
        assert len(set(slots)) == len(slots) == self.host_pages, "host slots"
        held = sum(node.page >= 0 and node.holds > 0 for node in nodes)
        assert held == self.held_pages, "held device pages"
        for node in (*roots, *nodes):
            children = node.children.values()
            assert node.device_children == sum(child.page >= 0 for child in children), "device children"
            assert node.host_children == sum(child.host >= 0 for child in children), "host children"
            held_children = sum(child.holds > 0 for child in children)
            assert node.holds >= held_children, "holds"
            assert node.pending >= 0, "pending transfers"
        for node in nodes:
            assert node.parent is not None
            assert node.parent.children[node.tokens] is node, "parent"
            assert node.hash == self.chain(node.parent.hash, node.tokens), "hash"
            on_device = node.parent.parent is None or node.parent.page >= 0
            assert node.page < 0 or on_device, "a device page below one that is not there"
            assert node.page >= 0 or node.host >= 0 or node.children or node.holds, "an empty node"
        self._device_leaves.check(nodes)
        self._host_leaves.check(nodes)

    def _touch(self, node: Node) -> None:
        self._clock += 1
        node.used = self._clock

    def _left(self, node: Node, parent: Node) -> None:
        """The node has left a tier: its stamp goes to its parent, which may be a leaf there now."""
        parent.used = max(parent.used, node.used)
        self._queue(parent)
        self._prune(node)

    def _queue(self, node: Node) -> None:
        self._device_leaves.add(node)
        self._host_leaves.add(node)

    def _prune(self, node: Node) -> None:
        """Remove a node that has neither page nor slot nor children, and then its parents."""
        while node.parent is not None:
            if node.page >= 0 or node.host >= 0 or node.children or node.holds:
                return
            del node.parent.children[node.tokens]
            node = node.parent

    def _below(self, root: Node) -> Iterator[Node]:
        """All nodes under the root, parents before their children."""
        waiting = list(root.children.values())
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())
