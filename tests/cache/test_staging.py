"""P26: moving a long prefix takes a bounded amount of memory, and changes nothing about what comes back."""

from contextlib import contextmanager

import pytest
import torch

from megaspan.cache.jobs import Source
from tests.allocations import peak_bytes
from tests.cache.transfer_rig import BOUND, LAYERS, entries

pytestmark = pytest.mark.usefixtures("poisoned_memory")
PAGES = 40


def on_disk(rig, pages: int) -> list[Source]:
    """The first pages of the pools, on the disk alone, through a few slots."""
    keys = entries(pages)
    for first in range(0, pages, 8):
        few = range(first, min(first + 8, pages))
        rig.backed_up(list(few), list(range(len(few))), [keys[number] for number in few])
    return [Source(key=key, tokens=tokens) for key, tokens in keys]


@contextmanager
def measuring(worker, monkeypatch):
    """The most bytes that tensors of each of a worker's jobs took at once."""
    peaks, work = [], worker._run
    with monkeypatch.context() as patch:
        patch.setattr(worker, "_run", lambda job: peaks.append(peak_bytes(lambda: work(job))))
        yield peaks


@pytest.fixture
def staged(rig, monkeypatch):
    """A rig that may hold three pages at once, as they are read and once more as they are copied."""
    rig = rig(disk=True, pages=2 * PAGES)
    monkeypatch.setattr("megaspan.cache.transfer.STAGED_BYTES", 3 * rig.host.page_bytes)
    return rig


@pytest.mark.parametrize("pages", [1, 3, 4, 9, PAGES])
def test_restoring_from_the_disk_takes_bounded_memory(staged, monkeypatch, pages):
    """P26: at any length, and every page comes back to its place."""
    before, sources = staged.content(), on_disk(staged, pages)
    staged.poison()
    with measuring(staged.transfers._restoring, monkeypatch) as peaks:
        job = staged.transfers.restore(sources, list(range(pages, 2 * pages)))
        assert staged.transfers.flush(BOUND)
    assert job.usable == pages
    for old, segment in zip(before, staged.pools.segments, strict=True):
        assert torch.equal(segment.pages[pages : 2 * pages], old[:pages])
    assert 0 < peaks[0] < 6 * staged.host.page_bytes + 5000


@pytest.mark.parametrize("kind", ["backup", "restore"])
def test_moving_to_and_from_the_host_takes_bounded_memory(staged, monkeypatch, kind):
    """P26: of a layer's rows no more are in memory a third time than may be."""
    pages, slots = list(range(8)), list(range(8))
    before = staged.content()
    widest = max(segment.pages.shape[1] for segment in staged.pools.segments)
    monkeypatch.setattr("megaspan.cache.transfer.STAGED_BYTES", 2 * widest)
    worker = staged.transfers._backups if kind == "backup" else staged.transfers._restoring
    with measuring(worker, monkeypatch) as peaks:
        staged.backed_up(pages, slots)
        staged.poison()
        staged.transfers.restore([Source(slot) for slot in slots], pages).wait(LAYERS - 1)
        assert staged.transfers.flush(BOUND)
    for old, segment in zip(before, staged.pools.segments, strict=True):
        assert torch.equal(segment.pages[:8], old[:8])
    assert 0 < peaks[0] < 2 * widest + 2000 < 8 * widest


def test_layers_are_ready_in_order_once_the_last_group_is_there(staged):
    """P39: no layer before every group has its rows, nor is the restore staged before all is found good."""
    sources = on_disk(staged, 8)  # groups of 3, 3 and 2
    passed = []
    seen = {}

    def gate(job, segment):
        passed.append(segment)
        seen[len(passed)] = (job.staged, [job.ready(layer) for layer in range(LAYERS)])

    staged.gate = gate
    job = staged.transfers.restore(sources, list(range(40, 48)))
    assert staged.transfers.flush(BOUND)
    segments = staged.pools.segments
    assert passed == segments * 3
    for count, (is_staged, ready) in seen.items():
        in_last = count - 1 - 2 * len(segments)
        assert is_staged is (in_last >= 0)
        done = segments[: max(0, in_last)]
        expected = [all(each in done for each in segments if each.layer == layer) for layer in range(LAYERS)]
        assert ready == expected
    assert all(job.ready(layer) for layer in range(LAYERS))


@pytest.mark.parametrize("bad", [2, 3, 5, 7])
def test_a_bad_page_of_any_group_ends_what_is_usable(staged, bad):
    """P50: what comes before it is good in every pool, at whichever end of a group it is."""
    before, sources = staged.content(), on_disk(staged, 8)
    path = staged.disk.folder / f"{sources[bad].key.hex()}.page"
    path.write_bytes(path.read_bytes()[:-1])
    staged.poison()
    job = staged.transfers.restore(sources, list(range(40, 48)))
    job.wait(LAYERS - 1)
    assert (job.usable, job.staged) == (bad, True)
    for old, segment in zip(before, staged.pools.segments, strict=True):
        assert torch.equal(segment.pages[40 : 40 + bad], old[:bad])
        assert (segment.pages[40 + bad : 48] == 255).all()


def test_pages_of_both_tiers_in_several_groups(staged):
    before, sources = staged.content(), on_disk(staged, 8)
    mixed = [Source(7), sources[0], Source(6), *sources[1:5], Source(5), sources[5]]
    staged.backed_up(list(range(8)), list(range(8)))
    staged.poison()
    staged.transfers.restore(mixed, list(range(50, 59))).wait(LAYERS - 1)
    for old, segment in zip(before, staged.pools.segments, strict=True):
        assert torch.equal(segment.pages[50:59], old[[7, 0, 6, 1, 2, 3, 4, 5, 5]])


def test_a_restore_given_up_between_groups_stops_there(staged):
    """P52: the thread lets go before it reads on."""
    sources, reached = on_disk(staged, 8), []

    def gate(job, segment):
        reached.append(segment)
        job.abort()

    staged.gate = gate
    job = staged.transfers.restore(sources, list(range(40, 48)))
    assert staged.transfers.flush(BOUND)
    assert (len(reached), job.staged) == (1, False)
