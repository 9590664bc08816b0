"""What the model asks of a cache. The caches themselves live in `megaspan.cache`."""

from typing import Protocol

from torch import Tensor

from megaspan.model.batch import Batch
from megaspan.ops.rows import RowTable


class Cache(Protocol):
    """Keeps the latent rows of every layer and the index keys of the full layers."""

    def table(self, batch: Batch) -> RowTable:
        """Make room for the batch's new rows and say where each sequence's rows live."""
        ...

    def write_latent(self, layer: int, batch: Batch, rows: Tensor) -> Tensor:
        """Store the new latent rows [T, W] of a layer; return all of its rows [N, W] to read from."""
        ...

    def write_index(self, layer: int, batch: Batch, keys: Tensor) -> Tensor:
        """Store the new index keys [T, D] of a full layer; return all of its keys [N, D]."""
        ...

    def commit(self, batch: Batch) -> None:
        """The pass has ended: the batch's rows are past from now on. Those of a failed pass never are."""
        ...
