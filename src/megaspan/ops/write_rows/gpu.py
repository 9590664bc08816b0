"""Cache rows on a GPU: norm, rotation, rounding to FP8 and the store in one kernel for each kind of row.

A row is computed by one warp from its own token alone. Its numbers have the bits of `rms_norm_gpu`,
`rotate_gpu` and the encoders of `ops.quant`, with whose kernels this one shares them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megaspan.ops.linear.gpu_norm import norm_block, norm_warps, rms_normed, rounded, row_stride
from megaspan.ops.quant.gpu_rows import hadamard_stages, index_quantized, latent_quantized
from megaspan.ops.quant.latent_rows import GROUP, latent_row_bytes, scale_count
from megaspan.ops.rotation.gpu import rotated

GROUP_ = tl.constexpr(GROUP)


def write_latent_rows_gpu(
    projected: Tensor, norm_weight: Tensor, eps: float, turns: Tensor, storage: Tensor, places: Tensor
) -> None:
    """Norm the first R of projected [T, R + P], rotate the last P, and store as rows `places` of storage.

    projected: fp32 or bf16, rows any distance apart; norm_weight: [R], of the same dtype; turns: [T, 2, P]
    fp32, see `turns`; places: [T] int64.
    storage: [N, R + P] fp32 or bf16, or uint8 [N, latent_row_bytes] for FP8 rows.
    Raises ValueError where the shapes do not fit, or an FP8 row's scales would not be aligned.
    """
    (tokens, width), rank, rope = projected.shape, len(norm_weight), turns.shape[2]
    fp8 = storage.dtype == torch.uint8
    _require_fit(projected, norm_weight, turns, places)
    if width != rank + rope or storage.shape[1] != (latent_row_bytes(rank, rope) if fp8 else width):
        raise ValueError(f"projected {list(projected.shape)} and storage {list(storage.shape)} do not fit")
    if fp8 and (rank % 4 or storage.stride(0) % 4):
        raise ValueError(f"FP8 rows on a GPU need a latent rank that is a multiple of 4, not {rank}")
    block = norm_block(rank)
    projected = projected if projected.stride(1) == 1 else projected.contiguous()
    _latent_kernel[(tokens,)](
        projected,
        norm_weight.contiguous(),
        turns.contiguous(),
        storage,
        places.contiguous(),
        eps,
        row_stride(projected),
        storage.stride(0),
        RANK=rank,
        ROPE=rope,
        RANK_BLOCK=block,
        ROPE_BLOCK=triton.next_power_of_2(rope),
        GROUPS=scale_count(rank),
        FP8=fp8,
        num_warps=norm_warps(block),
        enable_fp_fusion=False,
    )


def write_index_rows_gpu(
    projected: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    turns: Tensor,
    storage: Tensor,
    places: Tensor,
    page_size: int,
    rotate: bool,
) -> None:
    """Layer norm of projected [T, D], rotation of the first P, and store as rows `places` of storage.

    norm_weight, norm_bias: [D]; the others as in `write_latent_rows_gpu`.
    storage: [N, D] fp32 or bf16; or uint8 [N, D + 4], contiguous, for FP8 rows: in each page of `page_size`
    rows first the e4m3 values of all of them, then their fp32 scales. rotate: by the Hadamard matrix before
    the rounding to FP8, where D is a power of two.
    Raises ValueError where the shapes do not fit, or the scales would not be aligned.
    """
    tokens, width = projected.shape
    fp8 = storage.dtype == torch.uint8
    _require_fit(projected, norm_weight, turns, places)
    if norm_bias.shape != norm_weight.shape or len(norm_weight) != width or turns.shape[2] > width:
        raise ValueError(f"projected {list(projected.shape)} and turns {list(turns.shape)} do not fit")
    if storage.shape[1] != (width + 4 if fp8 else width):
        raise ValueError(f"projected {list(projected.shape)} and storage {list(storage.shape)} do not fit")
    if fp8 and (page_size * width % 4 or not storage.is_contiguous()):
        raise ValueError(
            f"FP8 index rows need pages whose values are a multiple of 4, not {page_size} x {width}"
        )
    projected = projected if projected.stride(1) == 1 else projected.contiguous()
    _index_kernel[(tokens,)](
        projected,
        norm_weight.contiguous(),
        norm_bias.contiguous(),
        turns.contiguous(),
        storage,
        places.contiguous(),
        eps,
        row_stride(projected),
        storage.stride(0),
        WIDTH=width,
        ROPE=turns.shape[2],
        BLOCK=triton.next_power_of_2(width),
        PAGE=page_size,
        STAGES=hadamard_stages(width, rotate),
        FP8=fp8,
        num_warps=1,
        enable_fp_fusion=False,
    )


def _require_fit(projected: Tensor, norm_weight: Tensor, turns: Tensor, places: Tensor) -> None:
    tokens = len(projected)
    if turns.shape[:2] != (tokens, 2) or turns.dtype != torch.float32 or places.shape != (tokens,):
        raise ValueError(
            f"turns {list(turns.shape)} or places {list(places.shape)} do not fit {tokens} tokens"
        )
    if norm_weight.dtype != projected.dtype:
        raise ValueError(f"projected is {projected.dtype}, but the norm's weight {norm_weight.dtype}")


@triton.jit
def _latent_kernel(
    projected_ptr,
    weight_ptr,
    turns_ptr,
    storage_ptr,
    places_ptr,
    eps,
    projected_stride,
    storage_stride,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    FP8: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(places_ptr + token)
    column, rope_column = tl.arange(0, RANK_BLOCK), tl.arange(0, ROPE_BLOCK)
    inside, rope_inside = column < RANK, rope_column < ROPE
    projected_ptr += token * projected_stride
    latent = tl.load(projected_ptr + column, mask=inside, other=0.0).to(tl.float32)
    rope = tl.load(projected_ptr + RANK + rope_column, mask=rope_inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)

    latent = rms_normed(latent, weight, eps, RANK)
    rope = rotated(tl.reshape(rope, [1, ROPE_BLOCK]), turns_ptr, token, ROPE, 1, ROPE_BLOCK)
    rope = rounded(tl.reshape(rope, [ROPE_BLOCK]), weight.dtype)

    # Stored in two dimensions, so that the width of the stores does not decide how the sum is spread.
    groups = tl.reshape(latent, [RANK_BLOCK // GROUP_, GROUP_])
    group = tl.arange(0, RANK_BLOCK // GROUP_)
    group_column = group[:, None] * GROUP_ + tl.arange(0, GROUP_)[None, :]
    row_ptr = storage_ptr + place * storage_stride
    if FP8:
        values, scale = latent_quantized(groups)
        tl.store(row_ptr + group_column, values.to(tl.uint8, bitcast=True), mask=group_column < RANK)
        rope_ptr = (row_ptr + RANK + 4 * GROUPS).to(tl.pointer_type(tl.bfloat16), bitcast=True)
        tl.store(rope_ptr + rope_column, rope, mask=rope_inside)
        scales_ptr = (row_ptr + RANK).to(tl.pointer_type(tl.float32), bitcast=True)
        tl.store(scales_ptr + group, scale, mask=group < GROUPS)
    else:
        tl.store(row_ptr + group_column, groups, mask=group_column < RANK)
        tl.store(row_ptr + RANK + rope_column, rope, mask=rope_inside)


@triton.jit
def _index_kernel(
    projected_ptr,
    weight_ptr,
    bias_ptr,
    turns_ptr,
    storage_ptr,
    places_ptr,
    eps,
    projected_stride,
    storage_stride,
    WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    STAGES: tl.constexpr,
    FP8: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(places_ptr + token)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    key = tl.load(projected_ptr + token * projected_stride + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    bias = tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)

    centred = tl.where(inside, key - tl.sum(key, 0) / WIDTH, 0.0)
    variance = tl.sum(centred * centred, 0) / WIDTH
    key = centred * tl.rsqrt(variance + eps) * weight.to(tl.float32) + bias
    key = tl.reshape(rounded(key, weight.dtype), [1, BLOCK])
    key = rounded(rotated(key, turns_ptr, token, ROPE, 1, BLOCK), weight.dtype)

    if FP8:
        values, scale = index_quantized(key, 1, BLOCK, STAGES)
        page, row = place // PAGE, place % PAGE
        page_ptr = storage_ptr + page * (PAGE * (WIDTH + 4))
        tl.store(
            page_ptr + row * WIDTH + column[None, :], values.to(tl.uint8, bitcast=True), mask=inside[None, :]
        )
        scales_ptr = (page_ptr + PAGE * WIDTH).to(tl.pointer_type(tl.float32), bitcast=True)
        tl.store(scales_ptr + row + tl.arange(0, 1), scale)
    else:
        tl.store(storage_ptr + place * storage_stride + column[None, :], key, mask=inside[None, :])
