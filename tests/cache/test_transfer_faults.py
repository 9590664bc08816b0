"""Transfers that fail, hang, are aborted or find damage: bounded, and told to whoever waits."""

import random
import threading
import time

import pytest
import torch

from megaspan.cache.jobs import Backup, Restore, RestoreFailed, Source
from tests.cache.transfer_rig import BOUND, LAYERS, entries

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def test_a_failing_loader_is_told_to_every_reader(rig):
    """P47: an exception in the thread reaches whoever waits, and the thread does the next job."""
    rig = rig()
    rig.backed_up([0], [0])

    def gate(job, segment):
        if segment.layer == 3:
            raise OSError("the bus is gone")

    rig.gate = gate
    job = rig.transfers.restore([Source(0)], [1])
    for layer in (3, LAYERS - 1):
        with pytest.raises(RestoreFailed, match="the bus is gone"):
            job.wait(layer)
    assert rig.transfers.flush(BOUND)
    assert rig.transfers.finished() == [job]
    assert isinstance(job.error, OSError)
    rig.gate = lambda job, segment: None
    rig.transfers.restore([Source(0)], [2]).wait(LAYERS - 1)


def test_a_failing_backup_is_acknowledged_with_its_error(rig):
    """P47: the pages are let go; the slots hold no page."""
    rig = rig(disk=True)

    def gate(job, segment):
        raise OSError("no")

    rig.gate = gate
    job = rig.transfers.backup([0], [0], entries(1))
    assert rig.transfers.flush(BOUND)
    assert rig.transfers.finished() == [job]
    assert isinstance(job.error, OSError)
    assert rig.disk.keys() == []


def test_a_loader_that_never_returns_is_given_up_within_the_bound(rig):
    """P47: those who wait are told after `timeout`; those behind it, and new ones, at once; close returns."""
    rig = rig(timeout=0.1)
    rig.backed_up([0], [0])
    reached, go = rig.block()
    stuck, behind = rig.transfers.restore([Source(0)], [1]), rig.transfers.restore([Source(0)], [2])
    started = time.monotonic()
    with pytest.raises(RestoreFailed, match=r"within 0\.1 s"):
        stuck.wait(0)
    assert time.monotonic() - started < 1.0
    assert reached.is_set()
    while not rig.transfers.stalled:
        time.sleep(0.01)
    assert rig.transfers.finished() == [behind]  # untouched, so its page is free; the stuck one's is not
    assert isinstance(behind.error, RestoreFailed)
    late = rig.transfers.restore([Source(0)], [3])
    assert rig.transfers.finished() == [late]
    assert not stuck.done
    go.set()
    assert rig.transfers.flush(BOUND)
    assert rig.transfers.finished() == [stuck]
    assert not rig.transfers.stalled
    rig.transfers.restore([Source(0)], [4]).wait(0)


def test_close_returns_though_a_thread_hangs(rig):
    """P47: shutting down does not depend on the tier; what had not begun is acknowledged as failed."""
    rig = rig()
    rig.backed_up([0], [0])
    reached, go = rig.block()
    job = rig.transfers.restore([Source(0)], [1])
    assert reached.wait(BOUND)
    queued = rig.transfers.restore([Source(0)], [2])
    started = time.monotonic()
    rig.transfers.close()
    assert time.monotonic() - started < 2.0
    refused = rig.transfers.backup([3], [3])
    assert refused.done
    assert isinstance(refused.error, RestoreFailed)
    assert not job.done
    go.set()
    assert rig.transfers.flush(BOUND)
    assert all(isinstance(each.error, RestoreFailed) for each in (job, queued))
    assert set(rig.transfers.finished()) == {job, queued, refused}


@pytest.mark.parametrize("kind", [Restore, Backup])
def test_an_aborted_job_keeps_its_pages_until_the_thread_lets_go(rig, kind):
    """P52: the write that was under way still lands, so until the ack its page may not be another's."""
    rig = rig()
    rig.backed_up([0], [0])
    reached, go = rig.block(kind=kind)
    rig.host.memory[1].fill_(7)
    rig.pools.segments[0].pages[5].fill_(9)
    restores = kind is Restore
    job = rig.transfers.restore([Source(1)], [5]) if restores else rig.transfers.backup([5], [1])
    assert reached.wait(BOUND)
    job.abort()
    assert rig.transfers.finished() == []
    assert not job.done
    go.set()
    assert rig.transfers.flush(BOUND)
    assert rig.transfers.finished() == [job]
    packed = rig.host.columns(rig.host.memory)
    pages = [rig.host.words(segment.pages)[5] for segment in rig.pools.segments]
    equal = [torch.equal(page, slots[1]) for page, slots in zip(pages, packed, strict=True)]
    assert equal == [True] + [False] * (len(pages) - 1)  # the late write, and nothing after it


@pytest.mark.parametrize("bad", [0, 1, 3])
def test_a_damaged_page_ends_what_is_usable(rig, bad):
    """P50: the pages before it come back in every pool, those behind it are left alone in every pool."""
    rig = rig(disk=True)
    before, keys = rig.content(), entries(4)
    rig.backed_up([0, 1, 2, 3], [0, 1, 2, 3], keys)
    path = rig.disk.folder / f"{keys[bad][0].hex()}.page"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    rig.poison()
    job = rig.transfers.restore([Source(key=key, tokens=tokens) for key, tokens in keys], [4, 5, 6, 7])
    job.wait(LAYERS - 1)
    assert job.usable == bad
    assert job.error is None
    for old, segment in zip(before, rig.pools.segments, strict=True):
        assert torch.equal(segment.pages[4 : 4 + bad], old[:bad])
        assert (segment.pages[4 + bad :] == 255).all()
    assert not rig.disk.has(keys[bad][0])


def test_a_backup_does_not_wait_for_the_disk(rig, monkeypatch):
    """P47: a disk that hangs holds no page and no slot, and what it cannot keep up with is not written."""
    rig = rig(disk=True)
    reached, go = threading.Event(), threading.Event()
    written = []

    def write(key, tokens, payload, generation):
        reached.set()
        assert go.wait(BOUND)
        written.append((key, payload))
        return True

    monkeypatch.setattr(rig.disk, "write", write)
    monkeypatch.setattr("megaspan.cache.transfer.UNSAVED_BYTES", 2 * rig.host.page_bytes)
    keys = entries(3)
    job = rig.transfers.backup([0, 1, 2], [0, 1, 2], keys)
    while not job.done:
        time.sleep(0.001)
    assert rig.transfers.finished() == [job]
    assert rig.transfers.unsaved_pages == 1
    first = rig.host.memory[0].numpy().tobytes()
    rig.host.memory.fill_(255)  # the slots are another's now
    assert reached.wait(BOUND)
    go.set()
    assert rig.transfers.flush(BOUND)
    assert [key for key, _ in written] == [keys[0][0], keys[1][0]]
    assert written[0][1] == first


def test_a_disk_that_never_answers_is_given_up(rig, monkeypatch):
    """P47: a restore that is not even staged fails by the clock of whoever polls."""
    rig = rig(disk=True, timeout=0.1)
    go = threading.Event()
    monkeypatch.setattr(rig.disk, "read", lambda key, tokens: go.wait(BOUND) and None)
    job = rig.transfers.restore([Source(key=b"k", tokens=b"t")], [0])
    started = time.monotonic()
    while job.error is None and time.monotonic() - started < BOUND:
        rig.transfers.finished()
        time.sleep(0.01)
    assert time.monotonic() - started < 1.0
    assert isinstance(job.error, RestoreFailed)
    assert not job.staged
    assert not job.done
    go.set()
    assert rig.transfers.flush(BOUND)
    assert rig.transfers.finished() == [job]


def test_a_hanging_backup_is_seen(rig):
    """P47: who waits for pages that a backup holds can know that they are not coming."""
    rig = rig(timeout=0.05)
    reached, go = rig.block(kind=Backup)
    assert not rig.transfers.backups_stalled
    job = rig.transfers.backup([0], [0])
    assert reached.wait(BOUND)
    time.sleep(0.06)
    assert rig.transfers.backups_stalled
    assert rig.transfers.finished() == []
    go.set()
    assert rig.transfers.flush(BOUND)
    assert rig.transfers.finished() == [job]
    assert not rig.transfers.backups_stalled


@pytest.mark.parametrize("seed", range(4))
def test_pages_keep_their_content_whatever_is_moved_aborted_or_fails(rig, seed):
    """P52, O4: pages and slots are reused as soon as they are acknowledged, and never hold another's rows."""
    rig = rig(pages=16)
    chance, faults = random.Random(seed), random.Random(seed + 1)
    pages, slots = set(range(16)), set(range(8))  # free ones
    saved: dict[int, int] = {}  # slot → what its bytes are
    moving: dict[Backup | Restore, int] = {}

    def gate(job, segment):
        time.sleep(faults.choice([0, 0, 0, 1e-4]))
        if faults.random() < 0.005:
            raise OSError("fault")

    def acknowledged(job):
        page, slot, content = job.pages[0], None, moving.pop(job)
        if isinstance(job, Restore):
            if job.error is None:
                assert all((segment.pages[page] == content).all() for segment in rig.pools.segments)
        else:
            slot = job.slots[0]
            slots.discard(slot) if job.error is None else slots.add(slot)
            if job.error is None:
                saved[slot] = content
        for segment in rig.pools.segments:
            segment.pages[page] = 255
        pages.add(page)

    rig.gate = gate
    for step in range(150):
        if pages and slots and chance.random() < 0.5:
            page, slot = pages.pop(), slots.pop()
            for segment in rig.pools.segments:
                segment.pages[page] = step
            moving[rig.transfers.backup([page], [slot])] = step
        elif pages and saved:
            slot = chance.choice(list(saved))
            page = pages.pop()
            job = rig.transfers.restore([Source(slot)], [page])
            moving[job] = saved[slot]
            if chance.random() < 0.3:
                job.abort()
        if saved and chance.random() < 0.2 and not any(isinstance(job, Restore) for job in moving):
            slot, _ = saved.popitem()
            slots.add(slot)
        for job in rig.transfers.finished():
            acknowledged(job)
    assert rig.transfers.flush(BOUND)
    for job in rig.transfers.finished():
        acknowledged(job)
    assert not moving
    assert len(pages) == 16
    assert len(slots) + len(saved) == 8
