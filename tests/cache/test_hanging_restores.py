"""A restore that hangs while its client leaves: nobody else waits for it, and no counter says it came."""

import threading
import time

import pytest

from megaspan.cache.jobs import Restore, RestoreFailed
from tests.cache.tiered import Tiered, counted
from tests.cache.transfer_rig import BOUND
from tests.engine.engines import (
    GREEDY,
    assert_idle,
    assert_solo,
    debug_model,
    drain,
    evict_device,
    make_engine,
    prompt,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")
IDS = prompt(40)


@pytest.fixture
def tiered(rig):
    """Three pages on the host alone, their rows in `expected`."""
    return Tiered(rig())


def hanging(tiered: Tiered):
    """(rows that are on the host alone, a lease whose restore of them hangs, an event that lets it go)."""
    rows = tiered.serve(counted(3))
    tiered.evict()
    reached, go = tiered.rig.block(layer=3)
    lease = tiered.restoring(counted(4))
    assert reached.wait(BOUND)
    return rows, lease, go


def test_what_an_aborted_restore_read_is_anybodys_at_once(tiered):
    """P47, P52: others need not wait; the pages that it may still write to are nobody's until it ends."""
    rows, first, go = hanging(tiered)
    pages, aborted = list(first.pages), first.restore
    tiered.prefixes.close(first)
    second = tiered.restoring(counted(4))
    assert not any(node.pending > 1 for node in second.below)
    assert not set(second.pages) & set(pages)
    tiered.prefixes.poll()
    assert tiered.prefixes.locked_pages == 6
    go.set()
    tiered.settle()
    assert isinstance(aborted.error, RestoreFailed)
    assert second.restore.error is None
    assert [tiered.rows(page) for page in second.pages] == rows
    tiered.prefixes.close(second)
    assert tiered.rig.pools.free_pages == tiered.rig.pools.total_pages
    tiered.prefixes.check()


def test_a_slot_that_an_aborted_restore_still_reads_may_be_anothers(tiered):
    """P52: what it reads of the other's rows goes to pages that are its own, and to nobody after it ends."""
    _, first, go = hanging(tiered)
    slots = {node.host for node in first.below}
    tiered.prefixes.close(first)
    tiered.prefixes.flush()
    rows = tiered.serve(counted(3, first=50))
    while not tiered.tree.host_pages:
        tiered.prefixes.poll()
    assert slots.isdisjoint(tiered.rig.host._free)
    go.set()
    tiered.settle()
    tiered.evict()
    lease = tiered.restoring(counted(4, first=50))
    tiered.settle()
    assert [tiered.rows(page) for page in lease.pages] == rows


def test_tokens_count_as_restored_when_all_layers_are_there(tiered):
    """P71: not before, and never where the restore fails after some of them."""
    _, lease, go = hanging(tiered)
    tiered.prefixes.settle_restore(lease)
    tiered.prefixes.publish(lease, counted(3)[:12])
    assert tiered.prefixes.restored_tokens == 0
    lease.restore.abort()
    go.set()
    tiered.settle()
    tiered.prefixes.publish(lease, counted(3)[:12])
    tiered.prefixes.abandon_restore(lease)
    assert (tiered.prefixes.restored_tokens, tiered.prefixes.failed_restores) == (0, 1)
    tiered.serve(counted(3))
    tiered.evict()
    lease = tiered.restoring(counted(4))
    lease.restore.wait(9)
    tiered.prefixes.settle_restore(lease)
    for _ in range(2):
        tiered.prefixes.publish(lease, counted(0)[:0])
        assert tiered.prefixes.restored_tokens == 12


@pytest.fixture(scope="module")
def model():
    return debug_model()


@pytest.fixture
def engine(model):
    engine = make_engine(model, pages=40, host_pages=40, load_timeout=0.3)
    engine.generate([IDS], GREEDY)
    evict_device(engine)
    yield engine
    engine.close()


@pytest.mark.parametrize("layer", [0, 4])
@pytest.mark.parametrize("lets_go", [False, True])
def test_others_with_the_prefix_are_served_though_an_aborted_restore_hangs(model, engine, layer, lets_go):
    """P47, P53: by their own restore where the thread goes on, else by computing; with the right tokens."""
    reached, go = threading.Event(), threading.Event()

    def hang(job, segment):
        if isinstance(job, Restore) and segment.layer == layer and not reached.is_set():
            reached.set()
            assert go.wait(BOUND)

    engine.memory.tiers.transfers.before_segment = hang
    engine.submit(IDS, GREEDY, "first")
    engine._prepare()
    assert reached.wait(BOUND)
    engine.submit(IDS, GREEDY, "second")
    engine._prepare()
    engine.abort("first")
    began = time.monotonic()
    if lets_go:
        threading.Timer(0.05, go.set).start()
    outputs = drain(engine, 100_000)
    assert time.monotonic() - began < 3.0
    assert outputs["first"][-1].finish_reason == "abort"
    assert_solo(model, IDS, GREEDY, outputs["second"])
    assert outputs["second"][-1].cached_tokens == (36 if lets_go else 0)
    stats = engine.stats()
    assert stats.host_hits_total == stats.prefix_hits_total == (36 if lets_go else 0)
    go.set()
    assert_idle(engine)
