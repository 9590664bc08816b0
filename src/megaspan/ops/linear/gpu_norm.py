"""The RMS norm on a GPU, with or without the addition before it: one program a token.

A token's sum is taken over its own numbers in an order that only the width decides, so these are also the
batch-invariant versions. Products are rounded before they are added (no fused multiply-add): the kernels that
share `rms_normed` then have the same bits, whatever else they do.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megaspan.ops.quant.latent_rows import GROUP

WIDTH_OF_WARP = 1024  # numbers that one warp holds: four 16-byte loads of bf16 by each thread


def can_take(states: Tensor, *others: Tensor) -> bool:
    """Whether states [T, D] and what meets them are on a GPU, of one dtype and without gradients."""
    return (
        states.is_cuda
        and states.dim() == 2
        and states.dtype in (torch.float32, torch.bfloat16)
        and all(other.dtype == states.dtype and other.device == states.device for other in others)
        and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (states, *others)))
    )


def rms_norm_gpu(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `rms_norm`: states [T, D], rows any distance apart, and weight [D] → [T, D]."""
    output = torch.empty(states.shape, dtype=states.dtype, device=states.device)
    _launch(states, None, weight, eps, None, output)
    return output


def add_rms_norm_gpu(states: Tensor, addend: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """states + addend [T, D], rounded to their dtype, and the norm of that: the bits of `rms_norm_gpu`."""
    if addend.shape != states.shape:
        raise ValueError(f"states {list(states.shape)} and addend {list(addend.shape)} do not fit")
    total, output = (torch.empty(states.shape, dtype=states.dtype, device=states.device) for _ in range(2))
    _launch(states, addend, weight, eps, total, output)
    return total, output


def _launch(
    states: Tensor, addend: Tensor | None, weight: Tensor, eps: float, total: Tensor | None, output: Tensor
) -> None:
    tokens, width = states.shape
    if weight.shape != (width,):
        raise ValueError(f"states {list(states.shape)} and weight {list(weight.shape)} do not fit")
    states = states if states.stride(1) == 1 else states.contiguous()
    if addend is not None and addend.stride(1) != 1:
        addend = addend.contiguous()
    block = norm_block(width)
    _rms_norm_kernel[(tokens,)](
        states,
        addend,
        weight.contiguous(),
        total,
        output,
        eps,
        row_stride(states),
        0 if addend is None else row_stride(addend),
        WIDTH=width,
        BLOCK=block,
        num_warps=norm_warps(block),
        enable_fp_fusion=False,
    )


def row_stride(states: Tensor) -> int:
    """How far the rows of [T, D] are apart; a row alone may claim any distance.

    Whether it keeps rows aligned decides how a row is spread over threads, and so the order of additions.
    """
    return states.stride(0) if len(states) > 1 else max(states.stride(0), states.shape[1])


def norm_block(width: int) -> int:
    """How many numbers a row of `width` is padded to: at least a group of FP8 latent rows."""
    return max(triton.next_power_of_2(width), GROUP)


def norm_warps(block: int) -> int:
    """How many warps take a row of `block` numbers; a power of two."""
    return min(max(block // WIDTH_OF_WARP, 1), 16)


@triton.jit
def rms_normed(states, weight, eps, WIDTH: tl.constexpr):
    """fp32 states [BLOCK], 0 from WIDTH on, times weight → fp32 that the weight's dtype holds."""
    scale = tl.rsqrt(tl.sum(states * states, 0) / WIDTH + eps)
    return rounded(rounded(states * scale, weight.dtype) * weight.to(tl.float32), weight.dtype)


@triton.jit
def rounded(values, dtype: tl.constexpr):
    """fp32 values as near as `dtype` has them, in fp32."""
    return values.to(dtype).to(tl.float32)


@triton.jit
def _rms_norm_kernel(
    states_ptr,
    addend_ptr,  # None: nothing is added, and no total written
    weight_ptr,
    total_ptr,
    output_ptr,
    eps,
    states_stride,
    addend_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    states = tl.load(states_ptr + token * states_stride + column, mask=inside, other=0.0).to(tl.float32)
    if addend_ptr is not None:
        states += tl.load(addend_ptr + token * addend_stride + column, mask=inside, other=0.0).to(tl.float32)
        states = rounded(states, weight.dtype)
        tl.store(total_ptr + token * WIDTH + column, states, mask=inside)
    tl.store(output_ptr + token * WIDTH + column, rms_normed(states, weight, eps, WIDTH), mask=inside)
