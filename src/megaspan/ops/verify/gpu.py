"""Rejection sampling in one launch.

The vocabulary of a sequence is cut into parts, one for each program. Every program finds out how many drafts
are accepted, which takes a few loads, and adds up the weights of its part in the row that is drawn from. The
last to arrive has all the sums: it finds the part that holds the draw, and the token in it. The sums are of
whole numbers, so the order in which programs arrive does not matter.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megaspan.ops.verify import reference

ONE = tl.constexpr(reference.ONE)
DRAFTS = tl.constexpr(16)  # that are looked at together
BLOCK = 2048  # tokens that a program reads at once
PROGRAMS = 132 * 3  # that an H200 runs at once
NONE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _whole(probability):
    """int64: in units of 2**-52, rounded down; 0 for NaN."""
    return tl.where(probability > 0, probability * ONE, 0.0).to(tl.int64)


@triton.jit
def _first_rejected(
    target_ptr,
    draft_ptr,
    tokens_ptr,
    accept_ptr,
    sequence,
    first,
    stop,
    vocabulary,
    target_stride,
    draft_stride,
):
    """The number of the first draft that is not accepted, or `stop`."""
    rejected_at = stop
    at = first
    while (at < stop) & (rejected_at == stop):
        draft = (at + tl.arange(0, DRAFTS)).to(tl.int64)
        is_draft = draft < stop
        token = tl.load(tokens_ptr + draft, mask=is_draft, other=-1)
        known = (token >= 0) & (token < vocabulary)
        p = tl.load(target_ptr + (draft + sequence) * target_stride + token, mask=known, other=0.0)
        q = tl.full((DRAFTS,), 1.0, tl.float32)
        if draft_ptr is not None:
            q = tl.load(draft_ptr + draft * draft_stride + token, mask=known, other=1.0)
        uniform = tl.load(accept_ptr + draft, mask=is_draft, other=0.0)
        accepted = uniform.to(tl.float64) * q.to(tl.float64) < p.to(tl.float64)
        rejected_at = tl.minimum(stop, tl.min(tl.where(accepted, NONE, draft.to(tl.int32))))
        at += DRAFTS
    return rejected_at


@triton.jit
def _weights(target_row, draft_row, ids, vocabulary, rejected, token):
    """int64 of each id, in the target's row and in what is left of it when the draft's is taken away."""
    inside = ids < vocabulary
    plain = _whole(tl.load(target_row + ids, mask=inside, other=0.0))
    if draft_row is not None:
        taken = _whole(tl.load(draft_row + ids, mask=inside & rejected, other=0.0))
        left = tl.maximum(plain - taken, 0)
    else:
        left = tl.where(ids == token, 0, plain)
    return plain, left


@triton.jit
def _draw(
    part_sums,
    uniform,
    target_row,
    draft_row,
    vocabulary,
    rejected,
    token,
    parts,
    blocks,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """int64: the id at which the running sum of weights exceeds `uniform` of the total, or -1 for 0."""
    numbers = tl.arange(0, PARTS)
    plain_sums = tl.load(part_sums + numbers, mask=numbers < parts, other=0, cache_modifier=".cg")
    left_sums = tl.load(part_sums + parts + numbers, mask=numbers < parts, other=0, cache_modifier=".cg")
    nothing_left = tl.sum(left_sums) == 0  # p is q but for rounding
    sums = tl.cumsum(tl.where(nothing_left, plain_sums, left_sums))
    total = tl.max(sums)
    wanted = tl.minimum((uniform.to(tl.float64) * total.to(tl.float64)).to(tl.int64), total - 1)
    part = tl.sum((sums <= wanted).to(tl.int32))
    reached = tl.max(tl.where(sums <= wanted, sums, 0))
    drawn = NONE
    for block in range(blocks):
        ids = (part * blocks + block) * BLOCK + tl.arange(0, BLOCK)
        plain, left = _weights(target_row, draft_row, ids, vocabulary, rejected, token)
        weights = tl.where(nothing_left, plain, left)
        exceeds = reached + tl.cumsum(weights) > wanted
        drawn = tl.minimum(drawn, tl.min(tl.where(exceeds, ids, NONE)))
        reached += tl.sum(weights)
    return tl.where(total > 0, drawn, -1).to(tl.int64)


@triton.jit(do_not_specialize=["parts", "blocks"])
def _verify(
    target_ptr,
    draft_ptr,
    tokens_ptr,
    starts_ptr,
    accept_ptr,
    draw_ptr,
    sums_ptr,
    arrived_ptr,
    accepted_ptr,
    next_ptr,
    vocabulary,
    target_stride,
    draft_stride,
    parts,
    blocks,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    part, sequence = tl.program_id(0), tl.program_id(1)
    first, stop = tl.load(starts_ptr + sequence), tl.load(starts_ptr + sequence + 1)
    at = _first_rejected(
        target_ptr,
        draft_ptr,
        tokens_ptr,
        accept_ptr,
        sequence,
        first,
        stop,
        vocabulary,
        target_stride,
        draft_stride,
    )
    token = tl.load(tokens_ptr + at, mask=at < stop, other=-1)
    rejected = (token >= 0) & (token < vocabulary)
    row = at.to(tl.int64) + sequence
    target_row = target_ptr + row * target_stride
    draft_row = None if draft_ptr is None else draft_ptr + at.to(tl.int64) * draft_stride

    plain = tl.zeros((BLOCK,), tl.int64)
    left = tl.zeros((BLOCK,), tl.int64)
    for block in range(blocks):
        ids = (part * blocks + block) * BLOCK + tl.arange(0, BLOCK)
        more_plain, more_left = _weights(target_row, draft_row, ids, vocabulary, rejected, token)
        plain += more_plain
        left += more_left
    part_sums = sums_ptr + sequence.to(tl.int64) * 2 * parts
    tl.store(part_sums + part, tl.sum(plain))
    tl.store(part_sums + parts + part, tl.sum(left))
    if tl.atomic_add(arrived_ptr + sequence, 1) == parts - 1:
        uniform = tl.load(draw_ptr + row)
        drawn = _draw(
            part_sums,
            uniform,
            target_row,
            draft_row,
            vocabulary,
            rejected,
            token,
            parts,
            blocks,
            BLOCK,
            PARTS,
        )
        tl.store(accepted_ptr + sequence, at - first)
        tl.store(next_ptr + sequence, drawn)


def blocks_of_part(sequences: int, blocks: int) -> int:
    """How many of a row's blocks one program reads: more than one only where there are enough programs."""
    return min(8, max(1, sequences * blocks // PROGRAMS))


def verify_gpu(
    target: Tensor,
    draft: Tensor | None,
    draft_tokens: Tensor,
    draft_starts: Tensor,
    accept_uniforms: Tensor,
    draw_uniforms: Tensor,
    *,
    block: int = BLOCK,
    blocks: int | None = None,
) -> tuple[Tensor, Tensor]:
    """See `verify`. block, blocks: a program reads `blocks` times `block` ids; this changes the time only."""
    sequences, vocabulary = len(draft_starts) - 1, target.shape[1]
    blocks = blocks or blocks_of_part(sequences, triton.cdiv(vocabulary, block))
    parts = max(1, triton.cdiv(vocabulary, block * blocks))
    accepted = torch.empty(sequences, dtype=torch.int32, device=target.device)
    next_tokens = torch.empty(sequences, dtype=torch.int64, device=target.device)
    if not sequences:
        return accepted, next_tokens
    target, draft = _rows(target), None if draft is None else _rows(draft)
    _verify[(parts, sequences)](
        target,
        draft,
        draft_tokens.contiguous(),
        draft_starts.contiguous(),
        accept_uniforms.contiguous(),
        draw_uniforms.contiguous(),
        torch.empty(sequences, 2, parts, dtype=torch.int64, device=target.device),
        torch.zeros(sequences, dtype=torch.int32, device=target.device),
        accepted,
        next_tokens,
        vocabulary,
        target.stride(0),
        0 if draft is None else draft.stride(0),
        parts,
        blocks,
        BLOCK=block,
        PARTS=triton.next_power_of_2(parts),
        num_warps=8,
    )
    return accepted, next_tokens


def _rows(probabilities: Tensor) -> Tensor:
    """The same [N, V], the ids of a row side by side."""
    return probabilities if probabilities.stride(1) == 1 else probabilities.contiguous()


@triton.jit
def _match_samples(samples_ptr, tokens_ptr, starts_ptr, accepted_ptr, next_ptr):
    sequence = tl.program_id(0)
    first, stop = tl.load(starts_ptr + sequence), tl.load(starts_ptr + sequence + 1)
    differs_at = stop
    at = first
    while (at < stop) & (differs_at == stop):
        draft = at + tl.arange(0, DRAFTS)
        token = tl.load(tokens_ptr + draft, mask=draft < stop, other=0)
        sample = tl.load(samples_ptr + draft + sequence, mask=draft < stop, other=0)
        differs_at = tl.minimum(stop, tl.min(tl.where(token == sample, NONE, draft)))
        at += DRAFTS
    tl.store(accepted_ptr + sequence, differs_at - first)
    tl.store(next_ptr + sequence, tl.load(samples_ptr + differs_at + sequence))


def match_samples_gpu(samples: Tensor, draft_tokens: Tensor, draft_starts: Tensor) -> tuple[Tensor, Tensor]:
    """See `match_samples`."""
    sequences = len(draft_starts) - 1
    accepted = torch.empty(sequences, dtype=torch.int32, device=samples.device)
    next_tokens = torch.empty(sequences, dtype=torch.int64, device=samples.device)
    if sequences:
        arguments = (
            samples.contiguous(),
            draft_tokens.contiguous(),
            draft_starts.contiguous(),
            accepted,
            next_tokens,
        )
        _match_samples[(sequences,)](*arguments, num_warps=1)
    return accepted, next_tokens
