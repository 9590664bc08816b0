"""The selections of one run, made again in another whose numbers are rounded in their own way.

A selection is a jump, not a rounding: two scores that rounding brings into another order put another row into
the attention, and all that follows differs by far more than it was rounded. To compare the arithmetic of two
runs, both must select alike; whether they do by themselves is a question of its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from torch import Tensor

from megaspan.model.forward_pass import ForwardPass
from megaspan.model.indexer import Indexer
from megaspan.model.selection import Selection


@contextmanager
def recorded_selections() -> Iterator[list[Tensor]]:
    """The positions int32 [T, K] that indexers choose meanwhile, in the order of their calls, on the CPU."""
    positions: list[Tensor] = []
    select = Indexer.forward

    def record(indexer: Indexer, *inputs) -> Selection:
        selection = select(indexer, *inputs)
        positions.append(selection.positions.cpu())
        return selection

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Indexer, "forward", record)
        yield positions


@contextmanager
def replayed_selections(positions: list[Tensor]) -> Iterator[list[float]]:
    """Indexers choose these positions meanwhile. Yields which share of each they would not have chosen."""
    flipped: list[float] = []
    select = Indexer.forward

    def replay(
        indexer: Indexer, hidden: Tensor, query_latent: Tensor, keys: Tensor, forward_pass: ForwardPass
    ) -> Selection:
        own_TK = select(indexer, hidden, query_latent, keys, forward_pass).positions.cpu()
        wanted_TK = positions[len(flipped)]
        found_TK = (wanted_TK[:, :, None] == own_TK[:, None]).any(-1)
        flipped.append(1 - float(found_TK[wanted_TK >= 0].float().mean()))
        wanted_TK = wanted_TK.to(hidden.device)
        return Selection(wanted_TK, forward_pass.table.rows(forward_pass.batch.sequence_ids, wanted_TK))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Indexer, "forward", replay)
        yield flipped
    assert len(flipped) == len(positions)
