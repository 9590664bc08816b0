"""Paths of token pages, and trees grown from them."""

import numpy as np

from megaspan.cache.prefix import Node

PAGE = 2


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
