"""What the model asks of a cache. The caches themselves live in `megaspan.cache`."""

from typing import Protocol

from torch import Tensor

from megaspan.model.batch import Batch
from megaspan.ops.rows import RowTable
from megaspan.ops.write_rows import IndexProjection, LatentProjection


class Cache(Protocol):
    """Keeps the latent rows of every layer and the index keys of the full layers.

    It is handed what rows are made of, and makes them (`new.rows`) or has a kernel make and store them.
    """

    @property
    def rotates_index(self) -> bool:
        """Whether FP8 index keys are multiplied by a Hadamard matrix, as the queries must then be."""
        ...

    def table(self, batch: Batch) -> RowTable:
        """Make room for the batch's new rows and say where each sequence's rows live."""
        ...

    def write_latent(self, layer: int, batch: Batch, new: LatentProjection) -> Tensor:
        """Store the T new latent rows of a layer; return all of its rows [N, W] to read from."""
        ...

    def write_index(self, layer: int, batch: Batch, new: IndexProjection) -> Tensor:
        """Store the T new index keys of a full layer; return all of its keys [N, D]."""
        ...

    def commit(self, batch: Batch) -> None:
        """The pass has ended: the batch's rows are past from now on. Those of a failed pass never are."""
        ...
