"""The cache of one call: the batch's own rows and nothing else, so gradients flow through it."""

import torch
from torch import Tensor

from megaspan.model.batch import Batch
from megaspan.ops.rows import RowTable
from megaspan.ops.write_rows import IndexProjection, LatentProjection


class TransientCache:
    """For training packs and one-shot use. Every sequence must start at position 0."""

    rotates_index = False

    def table(self, batch: Batch) -> RowTable:
        if any(batch.past_lengths):
            raise ValueError("a TransientCache holds no past: give each sequence from its first token")
        starts = torch.tensor(batch.query_starts[:-1], device=batch.token_ids.device)
        return RowTable(starts[:, None], page_size=max(batch.query_lengths))

    def write_latent(self, layer: int, batch: Batch, new: LatentProjection) -> Tensor:
        return new.rows

    def write_index(self, layer: int, batch: Batch, new: IndexProjection) -> Tensor:
        return new.rows

    def commit(self, batch: Batch) -> None:
        pass
