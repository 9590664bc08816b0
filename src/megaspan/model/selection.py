"""Which positions each token attends to, handed from a full layer to the shared layers after it."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Selection:
    """K chosen positions for each of T tokens. IndexShare is the hand-over of this value, nothing more.

    positions: [T, K] int32, ascending, -1 padded at the end. rows: [T, K] int64, the same positions
    as row numbers of the cache, converted once for all the layers that share them.
    """

    positions: Tensor
    rows: Tensor


class Everything:
    """In place of a Selection: every visible position, as before the indexers are trained."""


EVERYTHING = Everything()
