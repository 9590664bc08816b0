"""What leaves the prefix tree, in which order, and what stays because it is in use."""

import pytest

from megaspan.cache.prefix import PrefixTree
from tests.cache.prefix_paths import PAGE, grow, ids, key


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


def test_what_is_cleared_is_not_found_though_it_stays_as_long_as_it_is_in_use():
    tree = PrefixTree(PAGE)
    nodes = grow(tree, [0, 1, 2], [0, 1, 2])
    tree.set_host(nodes[2], 4)
    tree.set_host(nodes[0], 3)
    tree.hold(nodes[0])
    grow(tree, [5], [8], version="other")
    pages, slots = tree.clear()
    assert (sorted(pages), slots) == ([1, 2, 8], [4])
    assert tree.walk("v", ids([0, 1]), 9) == []
    assert tree.sweep() == ([], [])
    again = grow(tree, [0], [5])
    assert again[0].hash == nodes[0].hash  # the same tokens, by another node
    tree.check()
    tree.release(nodes[0])
    assert tree.sweep() == ([0], [3])
    assert tree.walk("v", ids([0, 1]), 9) == again
    tree.check()


def test_the_branch_used_last_comes_first_from_its_root_down():
    """So that whatever bound cuts the list off leaves prefixes that begin at their beginning."""
    tree = PrefixTree(PAGE)
    first = grow(tree, [0, 0, 0], [0, 1, 2])
    second = grow(tree, [1, 1], [3, 4], version="other")
    assert tree.by_use() == [*second, *first]
    tree.walk("v", ids([0, 0]), 9)
    assert tree.by_use() == [*first[:2], *second, first[2]]
    tree.clear()
    assert tree.by_use() == []
