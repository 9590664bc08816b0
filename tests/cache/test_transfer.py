"""Transfers: pages come back as they left, and layers are ready in order."""

import threading
import time

import pytest
import torch

from megaspan.cache.host import HostTier
from megaspan.cache.jobs import Source
from megaspan.cache.paged import PagedCache
from megaspan.cache.pool import PagePools
from megaspan.cache.transfer import Transfers
from megaspan.model.batch import Batch
from tests.cache.transfer_rig import BOUND, DEBUG, LAYERS, PAGE, entries
from tests.model.models import in_chunks, random_model, random_tokens

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("form", ["float32", "bfloat16", "fp8"])
def test_every_pool_survives_the_way_to_the_host_and_back(rig, form):
    """P40, P42, O4: rows of every layer of both pools, the draft layer's too, into other pages."""
    rig = rig(form=form)
    before = rig.content()
    rig.backed_up([6, 1, 3], [0, 7, 2])
    rig.poison()
    job = rig.transfers.restore([Source(7), Source(0), Source(2)], [5, 0, 4])
    assert job.staged
    assert job.usable == 3
    for layer in range(LAYERS):
        job.wait(layer)
    for old, segment in zip(before, rig.pools.segments, strict=True):
        assert torch.equal(segment.pages[[5, 0, 4]], old[[1, 6, 3]]), (segment.pool, segment.layer)
        assert (segment.pages[[1, 2, 3, 6, 7]] == 255).all()


def test_rows_of_an_odd_width_are_copied_as_well(rig):
    """P45: a row of 52 or 20 bytes in a page of one token is no multiple of a word."""
    pools = PagePools(DEBUG, 3, page_size=1, latent_format="fp8")
    host = HostTier(pools.segments, 2)
    for number, segment in enumerate(pools.segments):
        segment.pages.fill_(number)
    transfers = Transfers(pools.segments, host)
    transfers.backup([2, 1], [0, 1])
    assert transfers.flush(BOUND)
    transfers.restore([Source(1)], [0]).wait(LAYERS - 1)
    transfers.close()
    assert [int(segment.pages[0, -1]) for segment in pools.segments] == list(range(len(pools.segments)))


def test_a_pass_goes_on_from_restored_pages_as_from_its_own(rig):
    """O4, P39, P40: read 40 tokens (5 times top-k), evict to the host, poison, restore slowly, read on."""
    rig = rig(pages=12)
    model, tokens = random_model(DEBUG), random_tokens(DEBUG, 46)
    expected = in_chunks(model, tokens, [40, 6])
    cache = PagedCache(rig.pools, sequences=1, max_pages=12)
    cache.assign(0, 0, [11, 2, 5, 0, 9, 7, 3, 10, 1, 8])
    with torch.no_grad():
        model(Batch.of([tokens[:40]]), cache)
    rig.backed_up([11, 2, 5, 0, 9, 7, 3, 10], list(range(8)))
    rig.poison()
    rig.gate = lambda job, segment: time.sleep(0.005)
    job = rig.transfers.restore([Source(slot) for slot in range(8)], [4, 1, 8, 6, 2, 0, 11, 3])
    cache.assign(0, 0, [4, 1, 8, 6, 2, 0, 11, 3, 9, 7, 5, 10])
    with torch.no_grad():
        cache.depend_on([job])
        logits = model.unembed(model(Batch.of([tokens[32:46]], [32]), cache))
    torch.testing.assert_close(logits, expected[32:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pool", ["latent", "index"])
def test_a_layer_is_ready_when_both_pools_are(rig, pool):
    """P39: with one pool's rows late in full layer 2, the layers before it are ready, the others not."""
    rig = rig()
    rig.backed_up([0], [0])
    reached, go = rig.block(pool, layer=2)
    job = rig.transfers.restore([Source(0)], [1])
    assert reached.wait(BOUND)
    job.wait(0)
    job.wait(1)
    assert [job.ready(layer) for layer in range(4)] == [True, True, False, False]
    returned = threading.Event()
    waiter = threading.Thread(target=lambda: (job.wait(2), returned.set()))
    waiter.start()
    assert not returned.wait(0.05)
    go.set()
    assert returned.wait(BOUND)
    waiter.join()
    assert job.ready(2)


def test_jobs_of_a_kind_are_done_in_order_and_acknowledged_once(rig):
    rig = rig()
    jobs = [rig.transfers.backup([page], [page]) for page in range(5)]
    assert rig.transfers.flush(BOUND)
    assert rig.transfers.finished() == jobs
    assert rig.transfers.finished() == []
    assert all(job.done and job.seconds > 0 for job in jobs)


def test_a_job_says_what_goes_where(rig):
    rig = rig()
    with pytest.raises(ValueError, match="2 sources cannot fill 1"):
        rig.transfers.restore([Source(0), Source(1)], [0])
    with pytest.raises(ValueError, match="2 pages do not fit 1 slots"):
        rig.transfers.backup([0, 1], [0])


def test_pages_come_back_from_the_disk_among_those_of_the_host(rig):
    """O4: after the host slots were reused, in an order that mixes both tiers."""
    rig = rig(disk=True)
    before, keys = rig.content(), entries(4)
    rig.backed_up([0, 1, 2, 3], [0, 1, 2, 3], keys)
    rig.host.memory[:2] = 255
    rig.poison()
    sources = [
        Source(key=keys[0][0], tokens=keys[0][1]),
        Source(2),
        Source(key=keys[1][0], tokens=keys[1][1]),
    ]
    job = rig.transfers.restore([*sources, Source(3)], [7, 6, 5, 4])
    job.wait(LAYERS - 1)
    assert job.staged
    assert job.usable == 4
    for old, segment in zip(before, rig.pools.segments, strict=True):
        assert torch.equal(segment.pages[[7, 6, 5, 4]], old[[0, 2, 1, 3]])


def test_tensors_of_inference_mode_can_be_filled():
    """An engine runs in inference mode, and its tensors refuse writes from outside it."""
    with torch.inference_mode():
        pools = PagePools(DEBUG, 2, PAGE)
        transfers = Transfers(pools.segments, HostTier(pools.segments, 1))
        pools.segments[0].pages[0] = 3
    transfers.backup([0], [0])
    assert transfers.flush(BOUND)
    transfers.restore([Source(0)], [1]).wait(LAYERS - 1)
    transfers.close()
    assert (pools.segments[0].pages[1] == 3).all()
