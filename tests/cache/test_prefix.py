"""The prefix tree: what is found in it, under which names, and at what cost."""

import time

import numpy as np
import pytest

from megaspan.cache.prefix import PrefixTree
from tests.cache.prefix_paths import PAGE, grow, ids, key


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
            tree = PrefixTree(PAGE, lambda name=fingerprint: name)
            hashes += [grow(tree, path, range(len(path)), version)[-1].hash for path in paths]
    assert len(set(hashes)) == len(hashes) == 20
    assert all(len(chain) == 16 for chain in hashes)
    again = grow(PrefixTree(PAGE, lambda: b"fp8"), [1, 2], [7, 8], "1")
    assert again[1].hash == hashes[2] == PrefixTree.chain(again[0].hash, key(2))


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
