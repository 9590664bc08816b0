"""Gradients of sparse latent attention's scores, laid out by hand for Hopper's tensor cores (in Gluon).

Query and output's gradient leave room in shared memory for two blocks of rows, and with two blocks the
compiler's own pipeline asks for a block and at once waits for it. Here the next block is on its way while one
is used. The left operand holds 8 heads of the query, then 8 of the output's gradient, and so on: a thread
that has a score in its registers then has the gradient of the same probability as well.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LOG2_E = gl.constexpr(1.4426950408889634)
HEADS = gl.constexpr(64)  # of a program: 128 rows of the left operand, two groups of four warps
SLOTS = gl.constexpr(32)  # of a block
VALUE = gl.constexpr(512)
ROPE = gl.constexpr(64)
SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
# 16 bytes a thread: a row of VALUE columns for each warp, or four rows of 64.
WIDE = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0]))
NARROW = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))


def supports(query: Tensor, value_width: int) -> bool:
    """Whether this is the width and the chip that the kernel is laid out for."""
    return (
        query.is_cuda
        and query.shape[1] % HEADS.value == 0
        and value_width == VALUE.value
        and query.shape[2] == VALUE.value + ROPE.value
        and torch.cuda.get_device_capability(query.device) == (9, 0)
    )


def score_gradients(
    query: Tensor,
    rows: Tensor,
    selected: Tensor,
    output: Tensor,
    lse: Tensor,
    grad_output: Tensor,
    grad_query: Tensor,
    mixture: Tensor,
    scale: float,
) -> None:
    """As `gpu_backward_scores.score_gradients`."""
    tokens, heads, _ = query.shape
    _kernel[(tokens, heads // HEADS.value)](
        query,
        rows,
        selected,
        output,
        lse,
        grad_output,
        grad_query,
        mixture,
        selected.shape[1],
        rows.stride(0),
        scale,
        ALL_HEADS=heads,
        num_warps=8,
    )


@gluon.jit
def _row_numbers(at_numbers, start, slots):
    """The row numbers of a block, as the threads that copy the latent and the rotary parts need them."""
    slot = start + gl.arange(0, SLOTS, layout=gl.SliceLayout(1, WIDE))
    rope_slot = start + gl.arange(0, SLOTS, layout=gl.SliceLayout(1, NARROW))
    return (
        gl.load(at_numbers + slot, mask=slot < slots, other=-1),
        gl.load(at_numbers + rope_slot, mask=rope_slot < slots, other=-1),
    )


@gluon.jit
def _copy_rows(latent, rope, rows_ptr, number, rope_number, row_stride):
    """Ask for a block of rows; what belongs to an empty slot becomes zero."""
    column = gl.arange(0, VALUE, layout=gl.SliceLayout(0, WIDE))[None]
    places = rows_ptr + (number * row_stride)[:, None] + column
    async_copy.async_copy_global_to_shared(latent, places, mask=(number >= 0)[:, None] & (column >= 0))
    column = gl.arange(0, ROPE, layout=gl.SliceLayout(0, NARROW))[None]
    places = rows_ptr + (rope_number * row_stride + VALUE)[:, None] + column
    async_copy.async_copy_global_to_shared(rope, places, mask=(rope_number >= 0)[:, None] & (column >= 0))
    async_copy.commit_group()


@gluon.jit
def _load_left(left, left_rope, query_ptr, grad_output_ptr, first_head):
    """Stack query and output's gradient, 8 heads of either in turn; the latter has no rotary part."""
    line = gl.arange(0, 2 * HEADS, layout=gl.SliceLayout(1, WIDE))
    head, is_query = (first_head + line // 16 * 8 + line % 8)[:, None], (line // 8 % 2 == 0)[:, None]
    column = gl.arange(0, VALUE, layout=gl.SliceLayout(0, WIDE))[None]
    places = gl.where(
        is_query, query_ptr + head * (VALUE + ROPE) + column, grad_output_ptr + head * VALUE + column
    )
    async_copy.async_copy_global_to_shared(left, places)
    line = gl.arange(0, 2 * HEADS, layout=gl.SliceLayout(1, NARROW))
    head, is_query = (first_head + line // 16 * 8 + line % 8)[:, None], (line // 8 % 2 == 0)[:, None]
    column = gl.arange(0, ROPE, layout=gl.SliceLayout(0, NARROW))[None]
    places = query_ptr + head * (VALUE + ROPE) + VALUE + column
    async_copy.async_copy_global_to_shared(left_rope, places, mask=is_query & (column >= 0))
    async_copy.commit_group()


@gluon.jit
def _offsets(output_ptr, grad_output_ptr, first_head):
    """[HEADS] sum over the columns of output * its gradient."""
    head = first_head + gl.arange(0, HEADS, layout=gl.SliceLayout(1, NARROW))
    at = head[:, None] * VALUE + gl.arange(0, 64, layout=gl.SliceLayout(0, NARROW))[None]
    products = gl.zeros([HEADS, 64], gl.float32, NARROW)
    for start in range(0, VALUE, 64):
        output = gl.load(output_ptr + at + start).to(gl.float32)
        products += output * gl.load(grad_output_ptr + at + start).to(gl.float32)
    return gl.sum(products, 1)


@gluon.jit
def _store_block(mixture_ptr, start, slots, block, ALL_HEADS: gl.constexpr):
    """Half of a block of the mixture, from shared memory [SLOTS, HEADS], in whole sectors."""
    slot = (start + gl.arange(0, SLOTS, layout=gl.SliceLayout(1, NARROW)))[:, None]
    head = gl.arange(0, HEADS, layout=gl.SliceLayout(0, NARROW))[None]
    gl.store(
        mixture_ptr + slot * (2 * ALL_HEADS) + head, block.load(NARROW), mask=(slot < slots) & (head >= 0)
    )


@gluon.jit
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
    ALL_HEADS: gl.constexpr,
):
    """One token and HEADS of its heads."""
    token = gl.program_id(0).to(gl.int64)
    group = gl.program_id(1) * HEADS
    first_head = token * ALL_HEADS + group
    at_numbers = selected_ptr + token * slots
    mixture_ptr += token * slots * (2 * ALL_HEADS) + group
    left = gl.allocate_shared_memory(gl.bfloat16, [2 * HEADS, VALUE], SHARED)
    left_rope = gl.allocate_shared_memory(gl.bfloat16, [2 * HEADS, ROPE], SHARED)
    latents = gl.allocate_shared_memory(gl.bfloat16, [2, SLOTS, VALUE], SHARED)
    ropes = gl.allocate_shared_memory(gl.bfloat16, [2, SLOTS, ROPE], SHARED)
    shared_scores = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, HEADS], SHARED)
    shared_probability = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, HEADS], SHARED)
    _load_left(left, left_rope, query_ptr, grad_output_ptr, first_head)
    number, rope_number = _row_numbers(at_numbers, 0, slots)
    _copy_rows(latents.index(0), ropes.index(0), rows_ptr, number, rope_number, row_stride)
    number, rope_number = _row_numbers(at_numbers, SLOTS, slots)

    product_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 32, 16])
    latent_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16])
    rope_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])
    nothing = gl.zeros([2 * HEADS, SLOTS], gl.float32, product_layout)
    split_layout: gl.constexpr = _halves(nothing)[0].type.layout
    offset = gl.convert_layout(
        _offsets(output_ptr, grad_output_ptr, first_head), gl.SliceLayout(1, split_layout)
    )
    head = gl.arange(0, HEADS, layout=gl.SliceLayout(1, split_layout))
    log2_sum = gl.load(lse_ptr + first_head + head) * LOG2_E
    block_slot = gl.arange(0, SLOTS, layout=gl.SliceLayout(0, split_layout))
    grad_latent = gl.zeros([HEADS, VALUE], gl.float32, latent_layout)
    grad_rope = gl.zeros([HEADS, ROPE], gl.float32, rope_layout)
    for start in range(0, slots, SLOTS):
        turn = start // SLOTS % 2
        latent, rope = latents.index(turn), ropes.index(turn)
        is_row = gl.load(at_numbers + start + block_slot, mask=start + block_slot < slots, other=-1) >= 0
        async_copy.wait_group(0)
        fence_async_shared()
        gl.thread_barrier()  # this block is there for all threads, and all are done with the one before
        _copy_rows(latents.index(1 - turn), ropes.index(1 - turn), rows_ptr, number, rope_number, row_stride)
        number, rope_number = _row_numbers(at_numbers, start + 2 * SLOTS, slots)
        products = warpgroup_mma(left, latent.permute([1, 0]), nothing, use_acc=False, is_async=True)
        products = warpgroup_mma(left_rope, rope.permute([1, 0]), products, is_async=True)
        products = warpgroup_mma_wait(0, [products])
        scores, grad_probability = _halves(products)
        probability = gl.exp2(scores * (scale * LOG2_E) - log2_sum[:, None])
        probability = gl.where(is_row[None], probability, 0.0)
        grad_scores = probability * (grad_probability - offset[:, None]) * scale
        shared_scores.permute([1, 0]).store(grad_scores.to(gl.bfloat16))
        shared_probability.permute([1, 0]).store(probability.to(gl.bfloat16))
        fence_async_shared()
        gl.thread_barrier()
        grad_latent = warpgroup_mma(shared_scores.permute([1, 0]), latent, grad_latent, is_async=True)
        grad_rope = warpgroup_mma(shared_scores.permute([1, 0]), rope, grad_rope, is_async=True)
        _store_block(mixture_ptr, start, slots, shared_scores, ALL_HEADS)
        _store_block(mixture_ptr + ALL_HEADS, start, slots, shared_probability, ALL_HEADS)
        grad_latent, grad_rope = warpgroup_mma_wait(0, [grad_latent, grad_rope])
    async_copy.wait_group(0)
    _store_gradient(grad_query_ptr, first_head, grad_latent, 0)
    _store_gradient(grad_query_ptr, first_head, grad_rope, VALUE)


@gluon.jit
def _halves(products):
    """The scores and the gradients of the probabilities, both [HEADS, SLOTS], of stacked products."""
    apart = products.reshape([HEADS // 8, 2, 8, SLOTS]).permute([0, 2, 3, 1])
    return apart.reshape([HEADS, SLOTS, 2]).split()


@gluon.jit
def _store_gradient(grad_query_ptr, first_head, gradient, first_column: gl.constexpr):
    gradient = gl.convert_layout(gradient.to(gl.bfloat16), NARROW)
    head = first_head + gl.arange(0, gradient.shape[0], layout=gl.SliceLayout(1, NARROW))
    column = first_column + gl.arange(0, gradient.shape[1], layout=gl.SliceLayout(0, NARROW))
    gl.store(grad_query_ptr + head[:, None] * (VALUE + ROPE) + column[None], gradient)
