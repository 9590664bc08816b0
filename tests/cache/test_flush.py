"""Flushing: nothing that was there is leased again, from any tier, however far it was on its way."""

import threading
import time

import pytest

from megaspan.cache.disk import DiskTier
from megaspan.cache.jobs import Backup
from tests.cache.tiered import Tiered, counted
from tests.cache.transfer_rig import BOUND

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture
def tiered(rig):
    return Tiered(rig(disk=True))


def found(tiered: Tiered) -> int:
    """How many pages of a prompt are there, in any tier."""
    lease = tiered.prefixes.open(counted(3), "0")
    pages = len(lease.pages) + len(lease.sources)
    tiered.prefixes.close(lease)
    return pages


def files(tiered: Tiered) -> list[str]:
    assert tiered.disk is not None
    return [path.name for path in tiered.disk.folder.iterdir()]


def listed_by_the_next_process(tiered: Tiered) -> list[bytes]:
    assert tiered.disk is not None
    return DiskTier(tiered.disk.folder.parent, 10**9, b"debug", tiered.disk.page_bytes).keys()


@pytest.mark.parametrize("evicted", [False, True])
def test_nothing_is_found_in_any_tier(tiered, evicted):
    """Neither now nor by the next process: rows of other weights would be served as this one's."""
    tiered.serve(counted(3))
    tiered.settle()
    if evicted:
        tiered.evict()
    assert len(listed_by_the_next_process(tiered)) == 3
    tiered.prefixes.flush()
    assert found(tiered) == 0
    tiered.settle()
    assert found(tiered) == 0
    assert listed_by_the_next_process(tiered) == []


def test_what_is_served_afterwards_is_kept_as_before(tiered):
    tiered.serve(counted(3))
    tiered.settle()
    tiered.prefixes.flush()
    tiered.serve(counted(2))
    tiered.settle()
    assert len(listed_by_the_next_process(tiered)) == 2
    tiered.evict()
    assert len(tiered.prefixes.open(counted(3), "0").sources) == 2


def test_foreign_files_and_pages_of_other_models_stay(tiered):
    tiered.serve(counted(3))
    tiered.settle()
    (tiered.disk.folder / "notes.txt").write_text("mine")
    other = DiskTier(tiered.disk.folder.parent, 10**9, b"another model", 3)
    other.write(b"key", b"", b"abc")
    tiered.prefixes.flush()
    tiered.settle()
    assert files(tiered) == ["notes.txt"]
    assert other.read(b"key", b"") == b"abc"


def test_a_page_that_another_process_wrote_goes_as_well(tiered):
    """It is of the same model, and listed by whoever opens the folder next."""
    other = DiskTier(tiered.disk.folder.parent, 10**9, b"debug", tiered.disk.page_bytes)
    other.write(b"\1" * 16, b"", bytes(tiered.disk.page_bytes))
    tiered.prefixes.flush()
    tiered.settle()
    assert files(tiered) == []


def test_pages_published_just_before_are_not_saved(tiered):
    """Though a request still uses them."""
    lease = tiered.prefixes.open(counted(3), "0")
    tiered.prefixes.grow(lease, 12)
    tiered.prefixes.publish(lease, counted(3)[:12])
    tiered.prefixes.flush()
    tiered.settle()
    assert files(tiered) == []
    tiered.prefixes.close(lease)
    tiered.check_empty()


@pytest.mark.parametrize("layer", [0, 5])
def test_a_backup_under_way_comes_to_nothing(tiered, layer):
    """Its pages and slots are free when its thread lets go, and not before (P52)."""
    reached, go = tiered.rig.block(layer=layer, kind=Backup)
    tiered.serve(counted(3))
    tiered.prefixes.poll()
    assert reached.wait(BOUND)
    tiered.prefixes.flush()
    assert tiered.rig.pools.free_pages == 5
    go.set()
    tiered.settle()
    tiered.check_empty()
    assert files(tiered) == []


def test_pages_on_their_way_to_the_disk_do_not_get_there(tiered, monkeypatch):
    """The one that is being written, those behind it, and the backup that would add more; nobody waits."""
    reached, go = threading.Event(), threading.Event()
    write_file = tiered.disk._write_file

    def slow(*arguments):
        reached.set()
        assert go.wait(BOUND)
        write_file(*arguments)

    monkeypatch.setattr(tiered.disk, "_write_file", slow)
    tiered.serve(counted(3))
    tiered.prefixes.poll()
    assert reached.wait(BOUND)
    began = time.monotonic()
    tiered.prefixes.flush()
    assert time.monotonic() - began < 1.0
    assert found(tiered) == 0
    go.set()
    tiered.settle()
    assert found(tiered) == 0
    assert files(tiered) == []


@pytest.mark.parametrize("settled", [False, True])
def test_who_restores_meanwhile_keeps_what_comes_to_itself(tiered, settled):
    """Its rows are of before the flush: right for its own context, wrong for all who come after."""
    tokens = counted(4)
    tiered.serve(counted(3))
    tiered.settle()
    tiered.evict()
    reached, go = tiered.rig.block(layer=5)
    lease = tiered.restoring(tokens)
    assert reached.wait(BOUND)
    tiered.prefixes.flush()
    go.set()
    lease.restore.wait(9)
    tiered.prefixes.settle_restore(lease)
    if settled:
        tiered.settle()
    assert len(lease.pages) == 3
    assert tiered.prefixes.publish(lease, tokens[:12]) == []
    assert found(tiered) == 0
    tiered.prefixes.close(lease)
    tiered.settle()
    tiered.check_empty()
