"""The indexers' own loss: to rank positions as the attention of the layers they serve weighs them.

A full layer that serves m layers is trained on KL(p ‖ softmax(I)), where p is the average over the
served layers of their attention, summed over heads and normalised (DeepSeek-V3.2 section 2.1;
IndexCache, arXiv 2603.12201, for the average). The target is taken over every visible position, for
a random sample of the queries: a sample over all positions also teaches what the selection missed.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megaspan.model.attention import Attention
from megaspan.model.batch import Batch
from megaspan.model.observe import AttentionSeen, RoutingSeen
from megaspan.ops.budget import working_memory


@dataclass
class _Group:
    """A full layer and the layers it serves: index scores with gradient, and the targets' running sum.

    Each list has an entry for each tile: some sampled tokens of one sequence, and the rows of all its tokens.
    """

    tiles: list[tuple[Tensor, slice]]
    scores: list[Tensor]  # [Q, L], -inf where not visible
    targets: list[Tensor]  # [Q, L]
    layers: int = 0


@dataclass
class IndexLoss:
    """Watch a forward pass (as its observer), then ask for `value`.

    batch: must have no past. sampled: [Q] ascending token indices whose attention is learnt from.
    """

    batch: Batch
    sampled: Tensor
    groups: list[_Group] = field(default_factory=list)

    def __call__(self, seen: AttentionSeen | RoutingSeen) -> None:
        if isinstance(seen, RoutingSeen):
            return
        if seen.attention.indexer is not None:
            tiles = self._tiles(max(seen.attention.heads, seen.attention.indexer.heads))
            with torch.enable_grad():
                self.groups.append(_Group(tiles, self._index_scores(seen, tiles), []))
        group = self.groups[-1]
        with torch.no_grad():
            targets = self._attention(seen, group.tiles)
        group.targets = (
            [a + b for a, b in zip(group.targets, targets, strict=True)] if group.layers else targets
        )
        group.layers += 1

    def value(self) -> Tensor:
        """Mean KL in nats over sampled queries and full layers."""
        total = torch.zeros((), device=self.sampled.device)
        for group in self.groups:
            for scores, summed in zip(group.scores, group.targets, strict=True):
                target = summed / group.layers
                log_guess = scores.log_softmax(-1).masked_fill(scores.isneginf(), 0.0)
                total = total + (torch.xlogy(target, target) - target * log_guess).sum()
        return total / (len(self.sampled) * len(self.groups))

    def _tiles(self, heads: int) -> list[tuple[Tensor, slice]]:
        """For each sequence, its sampled tokens and the rows of all its tokens, cut so that what stands a
        head, a token and a row fits the working memory: a few float32 numbers."""
        budget = working_memory(self.sampled.device) // (16 * heads)
        return [
            (tile, rows)
            for tokens, rows in self._spans()
            for tile in tokens.split(max(1, budget // (rows.stop - rows.start)))
        ]

    def _spans(self) -> list[tuple[Tensor, slice]]:
        """For each sequence, its sampled tokens and the rows of all its tokens."""
        starts = self.batch.query_starts
        edges = torch.searchsorted(self.sampled, torch.tensor(starts, device=self.sampled.device)).tolist()
        return [
            (self.sampled[first:last], slice(start, stop))
            for first, last, start, stop in zip(edges, edges[1:], starts, starts[1:], strict=False)
            if last > first
        ]

    def _index_scores(self, seen: AttentionSeen, tiles: list[tuple[Tensor, slice]]) -> list[Tensor]:
        """Scores of every tile; what stands per head is made again in the backward pass, not kept."""
        indexer = seen.attention.indexer
        assert indexer is not None
        keys = indexer.keys(seen.hidden, seen.rotation)
        queries, weights = indexer.queries(seen.hidden, seen.query_latent, seen.rotation)

        def score(query: Tensor, weight: Tensor, key: Tensor) -> Tensor:
            per_head = torch.einsum("qhd,ld->qhl", query, key).relu()
            return torch.einsum("qhl,qh->ql", per_head.float(), weight)

        results = []
        for tokens, rows in tiles:
            operands = (queries[tokens], weights[tokens], keys[rows])
            scores = torch.as_tensor(checkpoint(score, *operands, use_reentrant=False))
            results.append(scores.masked_fill(self._hidden_from(tokens, rows), -torch.inf))
        return results

    def _attention(self, seen: AttentionSeen, tiles: list[tuple[Tensor, slice]]) -> list[Tensor]:
        attention: Attention = seen.attention
        results = []
        for tokens, rows in tiles:
            query = attention.absorb(seen.query_nope[tokens], seen.query_rope[tokens])
            scores = torch.einsum("qhw,lw->hql", query, seen.rows[rows]).float() * attention.scale
            scores.masked_fill_(self._hidden_from(tokens, rows), -torch.inf)
            results.append(scores.softmax(-1).mean(0))
        return results

    def _hidden_from(self, tokens: Tensor, rows: slice) -> Tensor:
        """[Q, L]: True where a row comes after the token."""
        return torch.arange(rows.start, rows.stop, device=tokens.device) > tokens[:, None]
