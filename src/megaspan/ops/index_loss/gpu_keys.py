"""The gradients of an indexer's keys on a GPU, from those of its scores."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megaspan.ops.index_loss.gpu_queries import KEYS, constants, load_keys, load_queries, where_positive
from megaspan.ops.index_loss.gpu_target import seen_rows


def key_contributions(query: Tensor, weights: Tensor, keys: Tensor, seen: Tensor, target: Tensor) -> Tensor:
    """[Q, K, D] fp32: what each slot of a selection adds to its key's gradient; dI is in `target`."""
    queries, slots = target.shape
    result = torch.empty(queries, slots, query.shape[2], dtype=torch.float32, device=query.device)
    _contribution_kernel[(queries, triton.cdiv(slots, KEYS))](
        query, weights, keys, seen, target, result, slots, **constants(query), num_warps=4
    )
    return result


def add_key_gradients(
    query: Tensor, weights: Tensor, keys: Tensor, seen: Tensor, target: Tensor, grad_keys: Tensor
) -> None:
    """Add to the keys' gradients [N, D] fp32 what the queries of a tile owe them; dI is in `target`."""
    shape, (queries, slots) = constants(query), target.shape
    _key_kernel[(triton.cdiv(slots, KEYS),)](
        query,
        weights,
        keys,
        seen,
        target,
        grad_keys,
        queries,
        slots,
        **shape,
        QUERIES=max(1, 128 // shape["HEADS"]),
        num_warps=8,
        num_stages=3,
    )


@triton.jit
def _contribution_kernel(
    query_ptr,
    weights_ptr,
    keys_ptr,
    seen_ptr,
    target_ptr,
    result_ptr,
    slots,
    ALL_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    KEYS: tl.constexpr,
):
    """KEYS slots of one query's selection."""
    member = tl.program_id(0).to(tl.int64)
    query, weight = load_queries(
        query_ptr, weights_ptr, member, member + 1, ALL_HEADS, HEADS, WIDTH, PADDED, 1
    )
    slot = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    number, is_seen = seen_rows(seen_ptr, member, slot, slots, True)
    keys = load_keys(keys_ptr, number, is_seen, WIDTH, PADDED)
    grad_scores = tl.load(target_ptr + member * slots + slot, mask=is_seen, other=0.0)[:, None]
    active = where_positive(grad_scores, tl.dot(keys, query.T), HEADS, KEYS, 1) * weight[None]
    column = tl.arange(0, PADDED)
    tl.store(
        result_ptr + (member * slots + slot)[:, None] * WIDTH + column[None],
        tl.dot(active.to(keys.dtype), query),
        mask=is_seen[:, None] & (column < WIDTH)[None],
    )


@triton.jit
def _key_kernel(
    query_ptr,
    weights_ptr,
    keys_ptr,
    seen_ptr,
    target_ptr,
    grad_keys_ptr,
    queries,
    slots,
    ALL_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    KEYS: tl.constexpr,
    QUERIES: tl.constexpr,
):
    """KEYS keys, over all queries of the tile, QUERIES at a time."""
    start = tl.program_id(0) * KEYS
    slot = start + tl.arange(0, KEYS)
    is_key = slot < slots
    number = slot.to(tl.int64)
    gradient = tl.zeros((KEYS, PADDED), tl.float32)
    for turn in range(0, queries, QUERIES):
        member = turn + tl.arange(0, QUERIES).to(tl.int64)
        length = tl.load(seen_ptr + member, mask=member < queries, other=0)
        if tl.max(length, 0) > start:
            query, weight = load_queries(
                query_ptr,
                weights_ptr,
                turn,
                queries,
                ALL_HEADS,
                HEADS,
                WIDTH,
                PADDED,
                QUERIES,
            )
            keys = load_keys(keys_ptr, number, is_key, WIDTH, PADDED)
            is_there = is_key[:, None] & (slot[:, None] < length[None])
            grad_scores = tl.load(target_ptr + member[None] * slots + slot[:, None], mask=is_there, other=0.0)
            products = tl.dot(keys, query.T)
            active = where_positive(grad_scores, products, HEADS, KEYS, QUERIES) * weight[None]
            gradient = tl.dot(active.to(keys.dtype), query, gradient)
    column = tl.arange(0, PADDED)
    at = grad_keys_ptr + number[:, None] * WIDTH + column[None]
    mask = is_key[:, None] & (column < WIDTH)[None]
    tl.store(at, tl.load(at, mask=mask, other=0.0) + gradient, mask=mask)
