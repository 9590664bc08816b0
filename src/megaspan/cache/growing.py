"""A cache that grows: each sequence has one contiguous stretch of rows in every layer."""

import torch
from torch import Tensor

from megaspan.config import ModelConfig
from megaspan.model.batch import Batch
from megaspan.ops.rows import RowTable
from megaspan.ops.write_rows import IndexProjection, LatentProjection


class GrowingCache:
    """Rows of S sequences for generation. Memory that was reserved but not yet written costs nothing
    on an operating system that hands out pages on first use.

    capacity: tokens a sequence may hold before the storage is moved to one twice as large. dtype: of
    the latent rows. index_dtype: of the index keys (bf16 keys halve what the index scan reads).
    """

    rotates_index = False

    def __init__(
        self,
        config: ModelConfig,
        sequences: int = 1,
        capacity: int = 1024,
        dtype: torch.dtype = torch.float32,
        index_dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
    ):
        self.capacity = capacity
        self.sequences = sequences
        index_dtype = index_dtype or dtype
        self.latent = [
            torch.empty(sequences * capacity, config.latent_width, dtype=dtype, device=device)
            for _ in range(config.num_hidden_layers)
        ]
        self.index = {
            layer: torch.empty(sequences * capacity, config.index_head_dim, dtype=index_dtype, device=device)
            for layer in config.full_layers
        }
        self.lengths = [0] * sequences

    def table(self, batch: Batch) -> RowTable:
        if list(batch.past_lengths) != self.lengths:
            raise ValueError(f"the batch says {batch.past_lengths} tokens are cached, but {self.lengths} are")
        longest = max(batch.total_lengths)
        if longest > self.capacity:
            self._move_to(max(longest, 2 * self.capacity))
        starts = torch.arange(self.sequences, device=batch.token_ids.device) * self.capacity
        return RowTable(starts[:, None], page_size=self.capacity)

    def write_latent(self, layer: int, batch: Batch, new: LatentProjection) -> Tensor:
        return self._write(self.latent[layer], batch, new.rows)

    def write_index(self, layer: int, batch: Batch, new: IndexProjection) -> Tensor:
        return self._write(self.index[layer], batch, new.rows)

    def commit(self, batch: Batch) -> None:
        self.lengths = list(batch.total_lengths)

    def memory(self) -> dict[str, int]:
        """Bytes of the rows written so far: {"latent": …, "index": …}."""
        tokens = sum(self.lengths)
        return {
            "latent": sum(tokens * rows.shape[1] * rows.element_size() for rows in self.latent),
            "index": sum(tokens * keys.shape[1] * keys.element_size() for keys in self.index.values()),
        }

    def _write(self, storage: Tensor, batch: Batch, rows: Tensor) -> Tensor:
        for sequence, past in enumerate(batch.past_lengths):
            new = rows[batch.query_starts[sequence] : batch.query_starts[sequence + 1]]
            first = sequence * self.capacity + past
            storage[first : first + len(new)] = new
        return storage

    def _move_to(self, capacity: int) -> None:
        def moved(storage: Tensor) -> Tensor:
            larger = storage.new_empty(self.sequences * capacity, storage.shape[1])
            for sequence, length in enumerate(self.lengths):
                old = sequence * self.capacity
                larger[sequence * capacity :][:length] = storage[old : old + length]
            return larger

        # All or nothing: where memory runs out half-way, the old rows are still there.
        latent = [moved(rows) for rows in self.latent]
        self.index = {layer: moved(keys) for layer, keys in self.index.items()}
        self.latent = latent
        self.capacity = capacity
