"""Routing on a GPU in two launches: logits on tensor cores, then the choice.

A float32 weight is cut into three bf16 parts, which together hold it exactly; their products with bf16 states
are exact too, so the logits are float32's. They are added in stretches of the width, then over the stretches,
in an order that does not depend on the tokens: for few tokens each stretch is a program's own, so that all of
the GPU reads the weight. Both kernels treat a token alone, so these are the batch-invariant numbers too.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

STRETCH = 192  # of the width: 32 in GLM-5.2's 6144, and 4 tiles of experts each, for 132 multiprocessors
STEP = 64  # of the width, in one product
FEW_TOKENS = 512  # up to here the stretches are added by the second kernel
EXPERT_TILE = 64


def can_take(hidden: Tensor, weight: Tensor) -> bool:
    """Whether bf16 states meet a float32 weight on a GPU, without gradients."""
    return (
        hidden.is_cuda
        and (hidden.dtype, weight.dtype) == (torch.bfloat16, torch.float32)
        and not (torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad))
    )


def route_gpu(
    hidden: Tensor, weight: Tensor, bias: Tensor, topk: int, normalise: bool, scaling: float
) -> tuple[Tensor, Tensor]:
    """As `route`: hidden [T, D] bf16, weight [E, D] fp32, bias [E] → ids [T, k] int64, weights [T, k] fp32.

    Ties go to the lowest expert. Raises ValueError where the shapes do not fit.
    """
    (tokens, width), experts = hidden.shape, len(weight)
    if weight.shape != (experts, width) or bias.shape != (experts,) or not 0 < topk <= experts:
        raise ValueError("hidden [T, D], weight [E, D], bias [E] and topk <= E do not fit")
    hidden = hidden if hidden.stride(1) == 1 else hidden.contiguous()
    stretches = triton.cdiv(width, STRETCH)
    parts = stretches if tokens <= FEW_TOKENS else 1
    tile = 16 if tokens <= 64 else 64
    logits_PTE = torch.empty(parts, tokens, experts, device=hidden.device)
    _logits_kernel[(triton.cdiv(experts, EXPERT_TILE), triton.cdiv(tokens, tile), parts)](
        hidden,
        weight.contiguous(),
        logits_PTE,
        tokens,
        hidden.stride(0),
        EXPERTS=experts,
        WIDTH=width,
        STRETCHES=stretches // parts,
        STRETCH=STRETCH,
        STEP=STEP,
        EXPERT_TILE=EXPERT_TILE,
        TILE=tile,
        num_warps=4,
    )
    expert_ids = torch.empty(tokens, topk, dtype=torch.int64, device=hidden.device)
    expert_weights = torch.empty(tokens, topk, device=hidden.device)
    _choice_kernel[(tokens,)](
        logits_PTE,
        bias.contiguous(),
        expert_ids,
        expert_weights,
        scaling,
        PARTS=parts,
        EXPERTS=experts,
        EXPERT_BLOCK=triton.next_power_of_2(experts),
        TOPK=topk,
        TOPK_BLOCK=triton.next_power_of_2(topk),
        NORMALISE=normalise,
        num_warps=1,
    )
    return expert_ids, expert_weights


@triton.jit
def _logits_kernel(
    hidden_ptr,
    weight_ptr,
    logits_ptr,
    tokens,
    hidden_stride,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    STRETCHES: tl.constexpr,
    STRETCH: tl.constexpr,
    STEP: tl.constexpr,
    EXPERT_TILE: tl.constexpr,
    TILE: tl.constexpr,
):
    """The logits of a tile of experts and a tile of tokens, summed over STRETCHES stretches of the width."""
    expert = tl.program_id(0) * EXPERT_TILE + tl.arange(0, EXPERT_TILE)
    token = (tl.program_id(1) * TILE + tl.arange(0, TILE)).to(tl.int64)
    part = tl.program_id(2)
    column = tl.arange(0, STEP)
    weight_places = weight_ptr + expert[:, None] * WIDTH + column[None, :]
    hidden_places = hidden_ptr + token[None, :] * hidden_stride + column[:, None]
    total = tl.zeros([EXPERT_TILE, TILE], tl.float32)
    for stretch in range(part * STRETCHES, (part + 1) * STRETCHES):
        stretch_sum = tl.zeros([EXPERT_TILE, TILE], tl.float32)
        for start in range(stretch * STRETCH, (stretch + 1) * STRETCH, STEP):
            inside = column < WIDTH - start
            weight_there = (expert < EXPERTS)[:, None] & inside[None, :]
            weight = tl.load(weight_places + start, mask=weight_there, other=0.0)
            hidden_there = (token < tokens)[None, :] & inside[:, None]
            hidden = tl.load(hidden_places + start, mask=hidden_there, other=0.0)
            high = weight.to(tl.bfloat16)
            rest = weight - high.to(tl.float32)
            middle = rest.to(tl.bfloat16)
            low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
            stretch_sum = tl.dot(low, hidden, stretch_sum)
            stretch_sum = tl.dot(middle, hidden, stretch_sum)
            stretch_sum = tl.dot(high, hidden, stretch_sum)
        total += stretch_sum
    place = (part.to(tl.int64) * tokens + token[None, :]) * EXPERTS + expert[:, None]
    tl.store(logits_ptr + place, total, mask=(token < tokens)[None, :] & (expert < EXPERTS)[:, None])


@triton.jit
def _choice_kernel(
    logits_ptr,
    bias_ptr,
    expert_ids_ptr,
    expert_weights_ptr,
    scaling,
    PARTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    TOPK: tl.constexpr,
    TOPK_BLOCK: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    """The best TOPK experts of one token, one after the other."""
    token, tokens = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    expert = tl.arange(0, EXPERT_BLOCK)
    real = expert < EXPERTS
    logits = tl.zeros([EXPERT_BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        place = (part * tokens + token) * EXPERTS + expert
        logits += tl.load(logits_ptr + place, mask=real, other=0.0)
    scores = 1 / (1 + tl.exp(-logits))

    # One number for each expert that orders by score, then by the lower expert. NaN is above infinity.
    choice = scores + tl.load(bias_ptr + expert, mask=real, other=0.0).to(tl.float32)
    bits = choice.to(tl.int32, bitcast=True)
    rank = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) * 65536 - expert
    rank = tl.where(real, rank, -(1 << 62))

    slot = tl.arange(0, TOPK_BLOCK)
    ids, weights = tl.zeros([TOPK_BLOCK], tl.int64), tl.zeros([TOPK_BLOCK], tl.float32)
    for i in tl.static_range(TOPK):
        best = rank == tl.max(rank, 0)
        ids = tl.where(slot == i, tl.sum(tl.where(best, expert, 0), 0), ids)
        weights = tl.where(slot == i, tl.sum(tl.where(best, scores, 0.0), 0), weights)
        rank = tl.where(best, -(1 << 62), rank)
    if NORMALISE:
        weights = weights / (tl.sum(weights, 0) + 1e-20)
    chosen = token * TOPK + slot
    tl.store(expert_ids_ptr + chosen, ids, mask=slot < TOPK)
    tl.store(expert_weights_ptr + chosen, weights * scaling, mask=slot < TOPK)
