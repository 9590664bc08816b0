"""Routed experts on a GPU: the outputs of all pairs of token and expert, then each token's weighted sum.

Three launches for few tokens, five for many, and one more with FP8 weights, to round the states.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from megaspan.ops.moe.gpu_few import FEW_PAIRS, is_chained, pair_outputs_few
from megaspan.ops.moe.gpu_many import pair_outputs_many
from megaspan.ops.moe.gpu_product import GROUP, Operand
from megaspan.ops.quant.gpu_rows import latent_quantized

ALIGNMENT = 16  # bytes: where the copies of tiles of weights may start


def can_take(hidden: Tensor, gate_up_proj: Tensor, down_proj: Tensor) -> bool:
    """Whether these bf16 operands, without gradients, are ones that `moe_gpu` computes."""
    weights = gate_up_proj, down_proj
    return (
        all(operand.is_cuda and operand.dtype == torch.bfloat16 for operand in (hidden, *weights))
        and all(map(_is_aligned, weights))
        and torch.cuda.get_device_capability(hidden.device) >= (9, 0)
    )


def can_take_fp8(hidden: Tensor, gate_up: Tensor, down: Tensor) -> bool:
    """The same for `moe_fp8_gpu`: each expert's gate and up projections must start at a block's edge."""
    weights = gate_up, down
    return (
        hidden.is_cuda
        and hidden.dtype == torch.bfloat16
        and all(weight.is_cuda and weight.dtype == torch.float8_e4m3fn for weight in weights)
        and all(map(_is_aligned, weights))
        and down.shape[2] % GROUP == 0
        and torch.cuda.get_device_capability(hidden.device) >= (9, 0)
    )


def _is_aligned(weights: Tensor) -> bool:
    row = weights.shape[-1] * weights.element_size()
    return weights.is_contiguous() and row % ALIGNMENT == 0 and weights.data_ptr() % ALIGNMENT == 0


def moe_gpu(
    hidden: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    *,
    invariant: bool = False,
) -> Tensor:
    """As `moe`, in bf16; a pair whose expert does not exist adds nothing.

    Where `invariant` is set all numbers of tokens take the way of many, in which each number is one chain of
    products along the width, however its tile is shaped, and each token's sum is over its slots in order.
    """
    projections = Operand(gate_up_proj), Operand(down_proj)
    return _moe(Operand(_rows(hidden)), expert_ids, expert_weights, *projections, invariant)


def moe_fp8_gpu(
    hidden: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    down: Tensor,
    down_scales: Tensor,
    *,
    invariant: bool = False,
) -> Tensor:
    """As `moe_fp8`; the rest as `moe_gpu`."""
    projections = Operand(gate_up, gate_up_scales.contiguous()), Operand(down, down_scales.contiguous())
    return _moe(quantize_states(_rows(hidden)), expert_ids, expert_weights, *projections, invariant)


def _moe(
    states: Operand,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Operand,
    down: Operand,
    invariant: bool,
) -> Tensor:
    (experts, width, inner), (tokens, slots) = down.values.shape, expert_ids.shape
    fitting = states.values.shape == (tokens, width) and expert_weights.shape == expert_ids.shape
    if not fitting or gate_up.values.shape != (experts, 2 * inner, width):
        raise ValueError("hidden [T, D], experts and weights [T, k] and projections of E experts do not fit")
    if not tokens * slots:
        return torch.zeros(tokens, width, dtype=torch.bfloat16, device=expert_ids.device)
    expert_ids, expert_weights = expert_ids.contiguous(), expert_weights.contiguous()
    few = tokens * slots <= FEW_PAIRS and not invariant
    outputs = (pair_outputs_few if few else pair_outputs_many)(states, expert_ids, gate_up, down)
    chained = few and is_chained(expert_ids)
    combined = torch.empty(tokens, width, dtype=torch.bfloat16, device=expert_ids.device)
    block = 512 if few else 1024
    _combine_kernel[(tokens, triton.cdiv(width, block))](
        outputs,
        expert_ids,
        expert_weights,
        combined,
        WIDTH=width,
        SLOTS=slots,
        EXPERTS=experts,
        CHAINED=chained,
        BLOCK=block,
        num_warps=block // 256,
        launch_pdl=chained,
    )
    return combined


def _rows(hidden: Tensor) -> Tensor:
    return hidden if hidden.stride(1) == 1 else hidden.contiguous()


@triton.jit
def _combine_kernel(
    outputs_ptr,
    ids_ptr,
    weights_ptr,
    combined_ptr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHAINED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """combined [T, D] = the sum over k of weights [T, k] times outputs [T, k, D], in fp32."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    if CHAINED:
        gdc_wait()
    for slot in tl.static_range(SLOTS):
        pair = token * SLOTS + slot
        expert = tl.load(ids_ptr + pair)
        there = (column < WIDTH) & (expert >= 0) & (expert < EXPERTS)
        output = tl.load(outputs_ptr + pair * WIDTH + column, mask=there, other=0.0)
        total += tl.load(weights_ptr + pair).to(tl.float32) * output.to(tl.float32)
    tl.store(combined_ptr + token * WIDTH + column, total, mask=column < WIDTH)


def quantize_states(states: Tensor) -> Operand:
    """states [T, D] of any float dtype → e4m3 [T, D] and fp32 scales [T, ceil(D/128)], as a latent row's."""
    tokens, width = states.shape
    groups = triton.cdiv(width, GROUP)
    quantized = torch.empty(states.shape, dtype=torch.float8_e4m3fn, device=states.device)
    scales = torch.empty(tokens, groups, device=states.device)
    block = 16  # groups
    _quantize_kernel[(tokens, triton.cdiv(groups, block))](
        states, quantized, scales, states.stride(0), WIDTH=width, GROUPS=groups, BLOCK=block, num_warps=4
    )
    return Operand(quantized, scales)


@triton.jit
def _quantize_kernel(
    states_ptr,
    quantized_ptr,
    scales_ptr,
    states_stride,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1) * BLOCK * 128 + tl.arange(0, BLOCK * 128)
    states = tl.load(states_ptr + token * states_stride + column, mask=column < WIDTH, other=0.0)
    values, scale = latent_quantized(tl.reshape(states.to(tl.float32), [BLOCK, 128]))
    tl.store(quantized_ptr + token * WIDTH + column, tl.reshape(values, [BLOCK * 128]), mask=column < WIDTH)
    tl.store(scales_ptr + token * GROUPS + group, scale, mask=group < GROUPS)
