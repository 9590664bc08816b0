"""Pools, tiers and transfers between them, with random rows and a gate that tests can shut."""

import threading

import torch

from megaspan.cache.disk import DiskTier
from megaspan.cache.host import HostTier
from megaspan.cache.jobs import Restore
from megaspan.cache.pool import PagePools
from megaspan.cache.transfer import Transfers
from megaspan.config import ModelConfig
from megaspan.costs.memory import Format

DEBUG = ModelConfig.preset("debug")
PAGE = 4
LAYERS = DEBUG.num_hidden_layers + DEBUG.num_nextn_predict_layers
BOUND = 5.0  # seconds that nothing here comes near unless it hangs


class Rig:
    """Pools of 8 pages with random rows, 8 host slots, and a gate that the transfer threads pass."""

    def __init__(self, folder=None, pages: int = 8, timeout: float = BOUND, form: Format = "float32"):
        self.pools = PagePools(DEBUG, pages, PAGE, latent_format=form)
        generator = torch.Generator().manual_seed(0)
        for segment in self.pools.segments:
            segment.pages.random_(0, 255, generator=generator)
        self.host = HostTier(self.pools.segments, slots=8)
        limit = 100 * self.host.page_bytes
        self.disk = DiskTier(folder, limit, b"debug", self.host.page_bytes) if folder else None
        self.gate = lambda job, segment: None
        self.transfers = Transfers(
            self.pools.segments, self.host, self.disk, timeout, lambda job, segment: self.gate(job, segment)
        )

    def content(self) -> list[torch.Tensor]:
        return [segment.pages.clone() for segment in self.pools.segments]

    def poison(self) -> None:
        """What a freed page may hold: NaN in every format."""
        for segment in self.pools.segments:
            segment.pages.fill_(255)

    def backed_up(self, pages, slots, entries=()) -> None:
        self.transfers.backup(pages, slots, entries)
        assert self.transfers.flush(BOUND)
        assert all(job.error is None for job in self.transfers.finished())

    def block(self, pool: str | None = None, layer: int = 0, kind: type = Restore) -> tuple:
        """Make jobs of a kind wait at one segment: (an event: somebody waits there, an event: go on)."""
        reached, go = threading.Event(), threading.Event()

        def gate(job, segment):
            if isinstance(job, kind) and segment.layer == layer and segment.pool == (pool or segment.pool):
                reached.set()
                assert go.wait(BOUND)

        self.gate = gate
        return reached, go


def entries(count: int) -> list[tuple[bytes, bytes]]:
    return [(bytes([number]) * 16, bytes([number]) * 4 * PAGE) for number in range(count)]
