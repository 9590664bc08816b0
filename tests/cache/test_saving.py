"""Saving at the end of a process: what the next one finds on the disk, and how long that may take."""

import threading
import time

import pytest

from megaspan.cache.disk import HEADER, DiskTier
from megaspan.cache.jobs import Backup, Restore
from tests.cache.tiered import Tiered, counted
from tests.cache.transfer_rig import BOUND, PAGE

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture
def tiered(rig):
    """Write-back: nothing is saved before its device page is wanted."""
    return Tiered(rig(disk=True), write_back=True)


def file_bytes(tiered: Tiered) -> int:
    return HEADER.size + 4 * PAGE + tiered.rig.host.page_bytes


def next_process(tiered: Tiered) -> DiskTier:
    return DiskTier(tiered.disk.folder.parent, 10**9, b"debug", tiered.disk.page_bytes)


def on_disk(tiered: Tiered, tokens) -> list[bytes]:
    """The rows of the prompt's pages that the next process would restore, from the first on."""
    disk, tree, rows = next_process(tiered), tiered.tree, []
    chain = tree.root("0").hash
    for start in range(0, len(tokens) // PAGE * PAGE, PAGE):
        page = tokens[start : start + PAGE].tobytes()
        chain = tree.chain(chain, page)
        payload = disk.read(chain, page)
        if payload is None:
            break
        rows.append(bytes(payload))
    return rows


def test_pages_that_were_never_evicted_are_saved(tiered):
    """Also those that a request still uses."""
    ended, tokens = tiered.serve(counted(3)), counted(4, first=50)
    lease = tiered.prefixes.open(tokens, "0")
    tiered.prefixes.grow(lease, 16)
    tiered.prefixes.publish(lease, tokens[:16])
    assert tiered.tiers.save_all(BOUND)
    assert on_disk(tiered, counted(3)) == ended
    assert on_disk(tiered, tokens) == [tiered.rows(page) for page in lease.pages]
    tiered.prefixes.check()


def test_more_pages_than_slots_pass_through_these(tiered, monkeypatch):
    """In groups that fit the slots, and what may be in memory twice."""
    slots = tiered.rig.host.take(6)
    monkeypatch.setattr("megaspan.cache.transfer.STAGED_BYTES", 3 * tiered.rig.host.page_bytes)
    rows = tiered.serve(counted(7))
    assert tiered.tiers.save_all(BOUND)
    assert on_disk(tiered, counted(7)) == rows
    tiered.rig.host.give(slots)


def test_pages_of_the_host_that_a_slow_disk_had_not_taken_are_saved(tiered, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("megaspan.cache.transfer.UNSAVED_BYTES", 0)
        rows = tiered.serve(counted(3))
        tiered.evict()
    assert on_disk(tiered, counted(3)) == []
    assert tiered.tiers.save_all(BOUND)
    assert on_disk(tiered, counted(3)) == rows


def test_a_disk_too_small_for_all_gets_the_prefix_used_last(tiered, monkeypatch):
    """And what it has of that already does not make room for the rest, but what nobody knows does."""
    tiered.disk.limit_bytes = 5 * file_bytes(tiered)
    first = tiered.serve(counted(3))
    tiered.evict()
    for number in range(2):
        tiered.disk.write(bytes([number]) * 16, bytes(4 * PAGE), bytes(tiered.disk.page_bytes))
    second = tiered.serve(counted(3, first=50))
    tiered.prefixes.close(tiered.prefixes.open(counted(3), "0"))
    write_file, written = tiered.disk._write_file, []
    monkeypatch.setattr(
        tiered.disk, "_write_file", lambda path, *parts: (written.append(path), write_file(path, *parts))
    )
    assert tiered.tiers.save_all(BOUND)
    assert len(written) == 2
    assert on_disk(tiered, counted(3)) == first
    assert on_disk(tiered, counted(3, first=50)) == second[:2]


def test_a_disk_that_refuses_is_not_asked_again_and_again(tiered, monkeypatch):
    def refuse(*arguments):
        raise OSError(28, "no space")

    monkeypatch.setattr(tiered.disk, "_write_file", refuse)
    tiered.serve(counted(3))
    began = time.monotonic()
    assert not tiered.tiers.save_all(BOUND)
    assert time.monotonic() - began < 1.0


def test_a_disk_that_hangs_is_waited_for_no_longer_than_was_said(tiered, monkeypatch):
    """P47: at the end of a process as well."""
    go = threading.Event()
    monkeypatch.setattr(tiered.disk, "_write_file", lambda *arguments: go.wait(BOUND))
    tiered.serve(counted(3))
    began = time.monotonic()
    assert not tiered.tiers.save_all(0.1)
    assert time.monotonic() - began < 1.0
    go.set()


@pytest.mark.parametrize("kind", [Restore, Backup])
def test_a_transfer_that_hangs_is_waited_for_only_if_it_saves(tiered, kind):
    """P47: a restore is nobody's concern any more."""
    tiered.serve(counted(3))
    tiered.evict()
    rows = tiered.serve(counted(2, first=50))
    reached, go = tiered.rig.block(kind=kind)
    if kind is Restore:
        tiered.restoring(counted(3))
        assert reached.wait(BOUND)
    began = time.monotonic()
    assert tiered.tiers.save_all(BOUND if kind is Restore else 0.1) is (kind is Restore)
    assert time.monotonic() - began < 1.0
    go.set()
    assert (on_disk(tiered, counted(2, first=50)) == rows) is (kind is Restore)


def test_without_a_disk_there_is_nothing_to_save(rig):
    tiered = Tiered(rig(), write_back=True)
    tiered.serve(counted(3))
    assert tiered.tiers.save_all(BOUND)
    assert tiered.rig.host.free == tiered.rig.host.total
