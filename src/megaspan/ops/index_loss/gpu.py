"""The indexer's loss and its gradients on a GPU, streamed over the rows that the queries see.

For a tile of queries, `gpu_target` writes the distribution p to be learnt, one number a query and row;
`gpu_queries` reads it for the loss and leaves the scores' gradient, softmax(I) - p, in its place; `gpu_keys`
sums what the keys get from that.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megaspan.ops.gpu_row_sums import WORK_BYTES, sum_by_row
from megaspan.ops.index_loss.gpu_keys import add_key_gradients, key_contributions
from megaspan.ops.index_loss.gpu_queries import loss_and_query_gradients
from megaspan.ops.index_loss.gpu_target import attention_target


def supports(index_query: Tensor, index_keys: Tensor, layers: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Whether the kernels take these operands: all in bf16, no more than 128 heads."""
    heads = max(index_query.shape[1], *(query.shape[1] for query, _ in layers))
    tensors = index_query, index_keys, *(tensor for layer in layers for tensor in layer)
    return heads <= 128 and all(tensor.dtype == torch.bfloat16 for tensor in tensors)


def index_loss_gpu(
    index_query: Tensor,
    index_weights: Tensor,
    index_keys: Tensor,
    layers: Sequence[tuple[Tensor, Tensor]],
    scale: float,
    seen: Tensor,
    budget_bytes: int,
    needed: bool,
) -> tuple[Tensor, list[Tensor]]:
    """The loss, fp32, and where `needed` its gradients; arguments as for `index_loss`. Bits repeat."""
    query, weights, keys = (
        index_query.contiguous(),
        index_weights.float().contiguous(),
        index_keys.contiguous(),
    )
    seen = seen.long().contiguous()
    layers = [(layer_query.contiguous(), rows.contiguous()) for layer_query, rows in layers]
    selected = seen.ndim == 2
    queries, slots = len(query), seen.shape[1] if selected else len(keys)
    if not queries or not slots:
        return query.new_zeros((), dtype=torch.float32), [torch.zeros_like(t) for t in (query, weights, keys)]
    losses = torch.empty(queries, dtype=torch.float32, device=query.device)
    grad_query, grad_weights = torch.empty_like(query), torch.empty_like(weights)
    grad_keys = torch.zeros(keys.shape, dtype=torch.float32, device=keys.device)
    slot_bytes = 4 + (selected * needed) * (4 * keys.shape[1] + WORK_BYTES)
    step = max(1, budget_bytes // (slots * slot_bytes))
    for start in range(0, queries, step):
        part = slice(start, start + step)
        target = query.new_empty(len(query[part]), slots, dtype=torch.float32)
        attention_target([(q[part], rows) for q, rows in layers], scale, seen[part], target)
        operands = query[part], weights[part], keys, seen[part], target
        loss_and_query_gradients(*operands, losses[part], grad_query[part], grad_weights[part])
        if needed and selected:
            contributions = key_contributions(*operands)
            sum_by_row(contributions.flatten(0, 1), seen[part].flatten(), grad_keys, add=True)
        elif needed:
            add_key_gradients(*operands, grad_keys)
    return losses.sum(), [grad_query, grad_weights, grad_keys.to(keys.dtype)] if needed else []
