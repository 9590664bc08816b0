"""What is the same for every layer of one forward pass."""

from dataclasses import dataclass

from megaspan.model.batch import Batch
from megaspan.model.cache import Cache
from megaspan.model.layers import Rotation
from megaspan.model.observe import Observer
from megaspan.ops.rows import RowTable


@dataclass(frozen=True)
class ForwardPass:
    """The batch, the cache that its rows go to, where these lie, and how its positions rotate."""

    batch: Batch
    cache: Cache
    table: RowTable
    rotation: Rotation
    observe: Observer | None = None
