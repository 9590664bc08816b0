"""Gradients of sparse latent attention on a GPU.

A row's gradient is a sum over the tokens that selected it, which lie anywhere. Three steps, for as many
tokens at a time as the working memory allows:

1. For each token, make the scores of its rows again; from them its query's gradient, and for each slot and
   head the score's gradient s and the probability p (bf16, as the tensor cores take them).
2. For each token, one product [K, 2H] @ [2H, W] of (s, p) with (query, output's gradient): what each slot
   contributes to its row's gradient.
3. For each row, the sum of its contributions in a fixed order.

Step 2 writes T * K * W numbers of 2 bytes and step 3 reads them, always whole rows. Atomic additions move as
many numbers of 4 bytes, and in an order that differs from run to run. Working row by row from the start would
reuse nothing: two neighbouring rows are rarely selected by the same token, so they share no product.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megaspan.ops.gpu_row_sums import WORK_BYTES, sum_by_row
from megaspan.ops.sparse_mla import gpu_backward_scores

# Slots of one program that adds atomically. Programs of the same slots of every token run together; where
# selections ascend, these name rows near to each other, which stay in the L2 cache meanwhile.
ATOMIC_SLOTS = 128


def supports_backward(query: Tensor, rows: Tensor, value_width: int) -> bool:
    """Whether the kernels take these operands: bf16 on a GPU, widths in steps of 16, up to 128 heads."""
    _, heads, width = query.shape
    return (
        query.is_cuda
        and query.dtype == rows.dtype == torch.bfloat16
        and heads <= 128
        and value_width % 16 == 0
        and width % 16 == 0
        and value_width < width
    )


def sparse_mla_backward(
    query: Tensor,
    rows: Tensor,
    selected: Tensor,
    value_width: int,
    scale: float,
    output: Tensor,
    lse: Tensor,
    grad_output: Tensor,
    budget_bytes: int,
    deterministic: bool = True,
) -> tuple[Tensor, Tensor]:
    """Gradients of query [T, H, W] and rows [N, W], in their dtype, given that of the output.

    query, rows, selected, value_width, scale: as for `sparse_mla`. A row that a token selected twice counts
        twice; a token that selected nothing has a gradient of zero.
    output, grad_output: [T, H, value_width]. lse: [T, H] fp32, the natural logarithm of the sum over the
        selected rows of exp(scale * score).
    Sums are in fp32. Equal bits on repeat unless `deterministic` is False. Temporary memory stays within
    `budget_bytes`, or what one token needs if that is more; the gradient of the rows in fp32 is not counted.
    """
    query, output, grad_output = query.contiguous(), output.contiguous(), grad_output.contiguous()
    selected, lse = selected.long().contiguous(), lse.contiguous()
    aligned = rows.stride(1) == 1 and rows.stride(0) % 16 == 0 and rows.data_ptr() % 16 == 0
    rows = rows if aligned else rows.contiguous()
    (tokens, heads, width), slots = query.shape, selected.shape[1]
    grad_query = torch.zeros_like(query)
    if not selected.numel():
        return grad_query, torch.zeros_like(rows)
    slot_bytes = 4 * heads + deterministic * (2 * width + WORK_BYTES)
    tile = min(tokens, _tokens_per_tile(budget_bytes // (slots * slot_bytes), query.device))
    at_once = deterministic and tile == tokens
    grad_rows = torch.zeros(rows.shape, dtype=rows.dtype if at_once else torch.float32, device=rows.device)
    for start in range(0, tokens, tile):
        part = slice(start, start + tile)
        mixture = query.new_empty(len(query[part]), slots, 2 * heads)
        operands = query[part], rows, selected[part], scale, output[part], lse[part], grad_output[part]
        gpu_backward_scores.score_gradients(*operands, grad_query[part], mixture)
        operands = query[part], grad_output[part], mixture, selected[part]
        if deterministic:
            sum_by_row(_contributions(*operands), selected[part].flatten(), grad_rows, add=not at_once)
        else:
            _contributions(*operands, added_to=grad_rows)
    return grad_query, grad_rows.to(rows.dtype)


def _tokens_per_tile(at_most: int, device: torch.device) -> int:
    """So many that no multiprocessor is left without a token at the end of a tile."""
    if device.type != "cuda":
        return max(1, at_most)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, at_most // processors * processors or at_most)


def _contributions(
    query: Tensor, grad_output: Tensor, mixture: Tensor, selected: Tensor, added_to: Tensor | None = None
) -> Tensor:
    """[T * K, W] in the dtype of the query: what each slot adds to its row's gradient.

    With `added_to`, an fp32 [N, W], they are added to its rows in any order, and that is returned.
    """
    (tokens, heads, width), slots = query.shape, selected.shape[1]
    result = query.new_empty(tokens * slots, width) if added_to is None else added_to
    columns = min(128, triton.next_power_of_2(width))
    slots_at_once = slots if added_to is None else ATOMIC_SLOTS
    _contributions_kernel[(tokens * triton.cdiv(width, columns), triton.cdiv(slots, slots_at_once))](
        query,
        grad_output,
        mixture,
        selected,
        result,
        slots,
        slots_at_once,
        ALL_HEADS=heads,
        WIDTH=width,
        VALUE_WIDTH=grad_output.shape[2],
        HEADS=max(16, triton.next_power_of_2(heads)),
        COLUMNS=columns,
        SLOTS=64,
        ATOMIC=added_to is not None,
        num_warps=4,
        num_stages=3 if heads <= 64 else 2,
    )
    return result


@triton.jit
def _contributions_kernel(
    query_ptr,
    grad_output_ptr,
    mixture_ptr,
    selected_ptr,
    result_ptr,
    slots,
    slots_at_once,
    ALL_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLOTS: tl.constexpr,
    ATOMIC: tl.constexpr,
):
    """COLUMNS columns of the contributions of `slots_at_once` slots of one token."""
    blocks: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    token = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    head = tl.arange(0, HEADS)
    at_head = (token * ALL_HEADS + head)[:, None]
    is_head, is_column = head < ALL_HEADS, column < WIDTH
    query = tl.load(
        query_ptr + at_head * WIDTH + column[None], mask=is_head[:, None] & is_column[None], other=0.0
    )
    grad_output = tl.load(
        grad_output_ptr + at_head * VALUE_WIDTH + column[None],
        mask=is_head[:, None] & (column < VALUE_WIDTH)[None],
        other=0.0,
    )
    first = tl.program_id(1) * slots_at_once
    last = tl.minimum(first + slots_at_once, slots)
    for start in range(first, last, SLOTS):
        slot = start + tl.arange(0, SLOTS)
        at_slot = token * slots + slot
        is_slot = slot < last
        at_mixture = mixture_ptr + at_slot[:, None] * (2 * ALL_HEADS) + head[None]
        in_mixture = is_slot[:, None] & is_head[None]
        grad_scores = tl.load(at_mixture, mask=in_mixture, other=0.0)
        probability = tl.load(at_mixture + ALL_HEADS, mask=in_mixture, other=0.0)
        contribution = tl.dot(grad_scores, query)
        contribution = tl.dot(probability, grad_output, contribution)
        if ATOMIC:
            number = tl.load(selected_ptr + at_slot, mask=is_slot, other=-1)
            at = result_ptr + number[:, None] * WIDTH + column[None]
            tl.atomic_add(at, contribution, mask=(number >= 0)[:, None] & is_column[None], sem="relaxed")
        else:
            at = result_ptr + at_slot[:, None] * WIDTH + column[None]
            tl.store(at, contribution.to(query.dtype), mask=is_slot[:, None] & is_column[None])
