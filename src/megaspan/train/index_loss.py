"""The indexers' own loss: to rank positions as the attention of the layers they serve weighs them.

A full layer that serves m layers is trained on KL(p ‖ softmax(I)), where p is the average over the
served layers of their attention, summed over heads and normalised (DeepSeek-V3.2 section 2.1;
IndexCache, arXiv 2603.12201, for the average). The target is taken over every visible position, for
a random sample of the queries: a sample over all positions also teaches what the selection missed.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from megaspan.model.batch import Batch
from megaspan.model.observe import AttentionSeen, RoutingSeen
from megaspan.ops.index_loss import index_loss


@dataclass
class _Group:
    """A full layer and the layers it serves. Queries are those of the sampled tokens.

    index: queries [Q, J, D], weights [Q, J] and keys [N, D], with gradient.
    layers: for each, absorbed queries [Q, H, W] and latent rows [N, W].
    """

    index: tuple[Tensor, Tensor, Tensor]
    scale: float
    layers: list[tuple[Tensor, Tensor]] = field(default_factory=list)


class IndexLoss:
    """Watch a forward pass (as its observer), then ask for `value`.

    batch: must have no past. sampled: [Q] ascending token indices whose attention is learnt from.
    """

    def __init__(self, batch: Batch, sampled: Tensor):
        self.batch, self.sampled = batch, sampled
        self._group: _Group | None = None
        self._groups = 0
        self._total = torch.zeros((), device=sampled.device)

    def __call__(self, seen: AttentionSeen | RoutingSeen) -> None:
        if isinstance(seen, RoutingSeen):
            return
        if seen.attention.indexer is not None:
            self._finish_group()
            self._group = _Group(self._index_operands(seen), seen.attention.scale)
        assert self._group is not None, "the first layer of a model has an indexer"
        with torch.no_grad():
            tokens = self.sampled
            query = seen.attention.absorb(seen.query_nope[tokens], seen.query_rope[tokens])
        self._group.layers.append((query, seen.rows.detach()))

    def value(self) -> Tensor:
        """Mean KL in nats over sampled queries and full layers."""
        self._finish_group()
        return self._total / (len(self.sampled) * self._groups)

    def _index_operands(self, seen: AttentionSeen) -> tuple[Tensor, Tensor, Tensor]:
        indexer = seen.attention.indexer
        assert indexer is not None
        with torch.enable_grad():
            queries, weights = indexer.queries(seen.hidden, seen.query_latent, seen.rotation)
            return queries[self.sampled], weights[self.sampled], indexer.keys(seen.hidden, seen.rotation)

    def _finish_group(self) -> None:
        """Add the loss of the group that is complete, and let go of what its layers attended with."""
        group, self._group = self._group, None
        if group is None:
            return
        self._groups += 1
        queries, weights, keys = group.index
        with torch.enable_grad():
            for part, rows in self._spans():
                layers = [(query[part], cached[rows]) for query, cached in group.layers]
                visible = self.sampled[part] - rows.start + 1
                operands = queries[part], weights[part], keys[rows]
                self._total = self._total + index_loss(*operands, layers, group.scale, visible)

    def _spans(self) -> list[tuple[slice, slice]]:
        """For each sequence, which of the sampled tokens are its own, and the rows of all its tokens."""
        starts = self.batch.query_starts
        edges = torch.searchsorted(self.sampled, torch.tensor(starts, device=self.sampled.device)).tolist()
        return [
            (slice(first, last), slice(start, stop))
            for first, last, start, stop in zip(edges, edges[1:], starts, starts[1:], strict=False)
            if last > first
        ]
