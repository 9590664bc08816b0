"""The indexer's loss in PyTorch, for a tile of queries at a time."""

from collections.abc import Sequence

import torch
from torch import Tensor


def index_loss_tiled(
    index_query: Tensor,
    index_weights: Tensor,
    index_keys: Tensor,
    layers: Sequence[tuple[Tensor, Tensor]],
    scale: float,
    seen: Tensor,
    budget_bytes: int,
    needed: bool,
) -> tuple[Tensor, list[Tensor]]:
    """The loss, fp32, and where `needed` its gradients; arguments as for `index_loss`."""
    exact = torch.promote_types(index_query.dtype, torch.float32)
    loss = torch.zeros((), dtype=exact, device=index_query.device)
    operands = [index_query.detach(), index_weights.detach(), index_keys.detach()]
    gradients = [torch.zeros_like(operand, dtype=exact) for operand in operands] if needed else []
    for tile in _tiles(index_query, index_keys, layers, seen, budget_bytes):
        rows = _Rows(seen[tile], len(index_keys))
        per_layer = [rows.attention(query[tile], rows_NW, scale) for query, rows_NW in layers]
        target = sum(per_layer[1:], per_layer[0]) / len(layers)
        tile_operands = [operands[0][tile], operands[1][tile], operands[2]]
        with torch.set_grad_enabled(needed):
            query, weights, keys = (operand.requires_grad_(needed) for operand in tile_operands)
            per_head = rows.products(query, keys).relu().to(exact)
            scores = torch.einsum("qhl,qh->ql", per_head, weights.to(exact)).masked_fill(
                rows.hidden, -torch.inf
            )
            log_guess = scores.log_softmax(-1).masked_fill(rows.hidden, 0.0)
            tile_loss = (torch.xlogy(target, target) - target * log_guess).sum()
        loss += tile_loss.detach()
        if needed:
            parts = torch.autograd.grad(tile_loss, (query, weights, keys))
            gradients[0][tile], gradients[1][tile] = parts[0], parts[1]
            gradients[2] += parts[2]
    return loss, [g.to(operand.dtype) for g, operand in zip(gradients, operands, strict=False)]


class _Rows:
    """What the queries of a tile see: the first rows, or the rows of a selection. hidden: [Q, L]."""

    def __init__(self, seen: Tensor, count: int):
        self.numbers = None
        if seen.ndim == 1:
            self.count = min(count, int(seen.max()))
            self.hidden = torch.arange(self.count, device=seen.device) >= seen[:, None]
        else:
            self.hidden = seen < 0
            self.numbers = seen.clamp(min=0)

    def products(self, query_QHW: Tensor, rows_NW: Tensor) -> Tensor:
        """[Q, H, L]: every head's product with every row."""
        if self.numbers is None:
            return torch.einsum("qhw,lw->qhl", query_QHW, rows_NW[: self.count])
        gathered = rows_NW[self.numbers].masked_fill(self.hidden[..., None], 0.0)
        return torch.einsum("qhw,qlw->qhl", query_QHW, gathered)

    def attention(self, query_QHW: Tensor, rows_NW: Tensor, scale: float) -> Tensor:
        """[Q, L]: the heads' mean."""
        scores = self.products(query_QHW, rows_NW)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
        scores.masked_fill_(self.hidden[:, None], -torch.inf)
        return scores.softmax(-1).mean(1).masked_fill(self.hidden, 0.0)


def _tiles(
    index_query: Tensor,
    index_keys: Tensor,
    layers: Sequence[tuple[Tensor, Tensor]],
    seen: Tensor,
    budget_bytes: int,
) -> list[slice]:
    """Tiles for which the numbers of every head, query and row fit the budget, and rows that are gathered."""
    heads = max(index_query.shape[1], *(query.shape[1] for query, _ in layers))
    length, width = (len(index_keys), 0) if seen.ndim == 1 else (seen.shape[1], layers[0][1].shape[1])
    query_bytes = length * (20 * heads + 12 * width)
    step = max(1, budget_bytes // max(1, query_bytes))
    return [slice(start, start + step) for start in range(0, len(index_query), step)]
