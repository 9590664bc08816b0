"""Transfers between a GPU's pools and pinned host memory: by a kernel, in the worker's stream."""

from contextlib import closing

import pytest
import torch

from megaspan.cache.disk import DiskTier
from megaspan.cache.host import HostTier
from megaspan.cache.jobs import Source
from megaspan.cache.pool import PagePools
from megaspan.cache.transfer import Transfers
from tests.cache.transfer_rig import BOUND, DEBUG, LAYERS, PAGE, entries

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


@pytest.mark.parametrize("bytes_at_once", [1, 32 << 20])
@pytest.mark.parametrize("form", ["bfloat16", "fp8"])
@pytest.mark.parametrize("pin", [True, False])
def test_pages_come_back_to_the_gpu_from_the_host_and_the_disk(
    tmp_path, monkeypatch, form, pin, bytes_at_once
):
    """A segment a launch, or all of them; layer by layer, and nothing else is touched."""
    monkeypatch.setattr("megaspan.ops.page_copy.BYTES_AT_ONCE", bytes_at_once)
    pools = PagePools(DEBUG, 8, PAGE, latent_format=form, device="cuda")
    for segment in pools.segments:
        segment.pages.random_(0, 255)
    before = [segment.pages.clone() for segment in pools.segments]
    host = HostTier(pools.segments, slots=8, pin=pin)
    disk = DiskTier(tmp_path, 100 * host.page_bytes, b"debug", host.page_bytes)
    keys = entries(4)
    with closing(Transfers(pools.segments, host, disk, BOUND)) as transfers:
        transfers.backup([6, 1, 3, 0], [0, 7, 2, 4], keys)
        assert transfers.flush(BOUND)
        assert all(job.error is None for job in transfers.finished())
        host.memory[[7, 4]] = 255
        for segment in pools.segments:
            segment.pages.fill_(255)
        sources = [Source(0), Source(key=keys[1][0], tokens=keys[1][1]), Source(2)]
        job = transfers.restore([*sources, Source(key=keys[3][0], tokens=keys[3][1])], [5, 0, 4, 7])
        for layer in range(LAYERS):
            job.wait(layer)
            for old, segment in zip(before, pools.segments, strict=True):
                if segment.layer == layer:
                    assert torch.equal(segment.pages[[5, 0, 4, 7]], old[[6, 1, 3, 0]])
                    assert (segment.pages[[1, 2, 3, 6]] == 255).all()
        assert job.usable == 4


def test_a_backup_waits_for_what_the_engine_has_queued():
    """Its pages are written by work that was submitted before it and is still under way."""
    pools = PagePools(DEBUG, 8, PAGE, device="cuda")
    host = HostTier(pools.segments, slots=1, pin=True)
    for segment in pools.segments:
        segment.pages.zero_()
    with closing(Transfers(pools.segments, host)) as transfers:
        transfers.backup([0], [0])  # what is compiled is compiled now
        assert transfers.flush(BOUND)
        torch.cuda._sleep(200_000_000)
        for number, segment in enumerate(pools.segments):
            segment.pages[3] = number + 1
        transfers.backup([3], [0])
        assert transfers.flush(BOUND)
        parts = host.memory[0].split(host.widths)
    assert [sorted(set(part.tolist())) for part in parts] == [[number + 1] for number in range(len(parts))]
