"""Gradients of sparse latent attention's scores on a GPU, for any width and number of heads."""

import triton
import triton.language as tl
from torch import Tensor

from megaspan.ops.sparse_mla import gpu_backward_hopper

LOG2_E = tl.constexpr(1.4426950408889634)
HEADS_AT_ONCE = 64


def score_gradients(
    query: Tensor,
    rows: Tensor,
    selected: Tensor,
    scale: float,
    output: Tensor,
    lse: Tensor,
    grad_output: Tensor,
    grad_query: Tensor,
    mixture: Tensor,
) -> None:
    """Fill grad_query [T, H, W] and mixture [T, K, 2H], the latter with the gradient of every slot's and
    head's score, then with every probability. Operands as for `sparse_mla_backward`, but contiguous.
    """
    (tokens, heads, width), slots, value_width = query.shape, selected.shape[1], output.shape[2]
    operands = query, rows, selected, output, lse, grad_output, grad_query, mixture
    if gpu_backward_hopper.supports(query, value_width):
        gpu_backward_hopper.score_gradients(*operands, scale)
        return
    at_once = max(16, min(HEADS_AT_ONCE, triton.next_power_of_2(heads)))
    _kernel[(tokens, triton.cdiv(heads, at_once))](
        *operands,
        slots,
        rows.stride(0),
        scale,
        ALL_HEADS=heads,
        WIDTH=width,
        VALUE_WIDTH=value_width,
        HEADS=at_once,
        VALUE=max(16, triton.next_power_of_2(value_width)),
        ROPE=max(16, triton.next_power_of_2(width - value_width)),
        SLOTS=32,
        num_warps=8,
        num_stages=2,
    )


@triton.jit
def _kernel(
    query_ptr,
    rows_ptr,
    selected_ptr,
    output_ptr,
    lse_ptr,
    grad_output_ptr,
    grad_query_ptr,
    mixture_ptr,
    slots,
    row_stride,
    scale,
    ALL_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE: tl.constexpr,
    ROPE: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """One token and HEADS of its heads."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = head < ALL_HEADS
    column, rope_column = tl.arange(0, VALUE), VALUE_WIDTH + tl.arange(0, ROPE)
    is_column, is_rope = column < VALUE_WIDTH, rope_column < WIDTH
    in_latent, in_rope = is_head[:, None] & is_column[None], is_head[:, None] & is_rope[None]
    at_head = (token * ALL_HEADS + head)[:, None]
    at_output = at_head * VALUE_WIDTH + column[None]
    at_query = query_ptr + at_head * WIDTH
    query = tl.load(at_query + column[None], mask=in_latent, other=0.0)
    query_rope = tl.load(at_query + rope_column[None], mask=in_rope, other=0.0)
    output = tl.load(output_ptr + at_output, mask=in_latent, other=0.0)
    grad_output = tl.load(grad_output_ptr + at_output, mask=in_latent, other=0.0)
    offset = tl.sum(output.to(tl.float32) * grad_output.to(tl.float32), 1)
    log2_sum = tl.load(lse_ptr + token * ALL_HEADS + head, mask=is_head, other=0.0) * LOG2_E
    grad_latent = tl.zeros((HEADS, VALUE), tl.float32)
    grad_rope = tl.zeros((HEADS, ROPE), tl.float32)
    for start in range(0, slots, SLOTS):
        slot = start + tl.arange(0, SLOTS)
        number = tl.load(selected_ptr + token * slots + slot, mask=slot < slots, other=-1)
        is_row = number >= 0
        at_row = rows_ptr + number[:, None] * row_stride
        latent = tl.load(at_row + column[None], mask=is_row[:, None] & is_column[None], other=0.0)
        rope = tl.load(at_row + rope_column[None], mask=is_row[:, None] & is_rope[None], other=0.0)
        scores = tl.dot(query_rope, rope.T, tl.dot(query, latent.T))
        probability = tl.exp2(scores * (scale * LOG2_E) - log2_sum[:, None])
        probability = tl.where(is_row[None], probability, 0.0)
        grad_probability = tl.dot(grad_output, latent.T)
        grad_scores = (probability * (grad_probability - offset[:, None]) * scale).to(latent.dtype)
        grad_latent = tl.dot(grad_scores, latent, grad_latent)
        grad_rope = tl.dot(grad_scores, rope, grad_rope)
        at_mixture = mixture_ptr + (token * slots + slot)[None] * (2 * ALL_HEADS) + head[:, None]
        in_mixture = (slot < slots)[None] & is_head[:, None]
        tl.store(at_mixture, grad_scores, mask=in_mixture)
        tl.store(at_mixture + ALL_HEADS, probability.to(latent.dtype), mask=in_mixture)
    at_gradient = grad_query_ptr + at_head * WIDTH
    tl.store(at_gradient + column[None], grad_latent.to(query.dtype), mask=in_latent)
    tl.store(at_gradient + rope_column[None], grad_rope.to(query.dtype), mask=in_rope)
