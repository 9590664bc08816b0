"""The paged cache of a single sequence that owns every page."""

import torch

from megaspan.cache.paged import PagedCache
from megaspan.cache.pool import PAGE_SIZE, PagePools
from megaspan.config import ModelConfig
from megaspan.costs.memory import Format
from megaspan.model.batch import Batch


class SoloCache(PagedCache):
    """Room for one sequence of up to `capacity` tokens, reserved at once: CUDA graphs need rows that stay.

    lengths: the tokens that it holds, as those of a `GrowingCache`.
    """

    def __init__(
        self,
        config: ModelConfig,
        capacity: int,
        latent_format: Format,
        index_format: Format | None = None,
        device: str | torch.device = "cpu",
    ):
        pages = -(-capacity // PAGE_SIZE)
        pools = PagePools(
            config, pages, PAGE_SIZE, latent_format, index_format, device, mtp=False, scratch=True
        )
        super().__init__(pools, 1, pages)
        self.assign(0, 0, pools.take(pages) or [])
        self.lengths = [0]

    def commit(self, batch: Batch) -> None:
        super().commit(batch)
        for slot, length in zip(batch.table_rows, batch.total_lengths, strict=True):
            if slot != self.scratch_slot:
                self.lengths[slot] = length

    def memory(self) -> dict[str, int]:
        """Bytes of the rows written so far: {"latent": …, "index": …}."""
        layers, formats, (tokens,) = self.pools.layers, self.pools.formats, self.lengths
        return {pool: tokens * form.nbytes * len(layers[pool]) for pool, form in formats.items()}
