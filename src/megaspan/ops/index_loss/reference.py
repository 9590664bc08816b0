"""The indexer's loss, written as plainly as it can be."""

from collections.abc import Sequence

import torch
from torch import Tensor


def index_loss_reference(
    index_query: Tensor,
    index_weights: Tensor,
    index_keys: Tensor,
    layers: Sequence[tuple[Tensor, Tensor]],
    scale: float,
    seen: Tensor,
) -> Tensor:
    """As `index_loss`, one query after the other; the target has no gradient."""
    total = index_query.new_zeros((), dtype=torch.promote_types(index_query.dtype, torch.float32))
    for number, (query_JD, weight_J) in enumerate(zip(index_query, index_weights, strict=True)):
        numbers = torch.arange(int(seen[number])) if seen.ndim == 1 else seen[number][seen[number] >= 0]
        numbers = numbers.to(index_keys.device)
        if len(numbers):
            with torch.no_grad():
                per_layer = [(scale * query[number] @ rows[numbers].mT).softmax(-1) for query, rows in layers]
                target = torch.stack(per_layer).mean((0, 1))
            scores = weight_J @ (query_JD @ index_keys[numbers].mT).relu().to(weight_J.dtype)
            total = total + (torch.xlogy(target, target) - target * scores.log_softmax(-1)).sum()
    return total
