"""The indexer's loss on a GPU, and the gradients of its queries and of the weights of their heads.

A program goes over the keys twice: for the sum of exp(I), then for the loss and the scores' gradient dI. The
product it keeps is u_j = Σ_s dI_s [q_j · k_s > 0] k_s: the query's gradient is w_j u_j, the weight's
q_j · u_j.
"""

import triton
import triton.language as tl
from torch import Tensor

from megaspan.ops.index_loss.gpu_target import seen_rows

KEYS = 64  # keys that meet the queries at once


def constants(query: Tensor) -> dict[str, int]:
    """Sizes that the kernels are compiled for."""
    _, heads, width = query.shape
    padded_heads = max(16, triton.next_power_of_2(heads))
    return {
        "ALL_HEADS": heads,
        "HEADS": padded_heads,
        "WIDTH": width,
        "PADDED": max(16, triton.next_power_of_2(width)),
        "KEYS": KEYS,
    }


def loss_and_query_gradients(
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    seen: Tensor,
    target: Tensor,
    losses: Tensor,
    grad_query: Tensor,
    grad_weights: Tensor,
) -> None:
    """Fill the losses [Q] and gradients; put dI [Q, L] in place of the target."""
    shape, (queries, slots) = constants(query), target.shape
    at_once = 1 if seen.ndim == 2 else 2
    _query_kernel[(triton.cdiv(queries, at_once),)](
        query,
        weights,
        keys,
        seen,
        target,
        losses,
        grad_query,
        grad_weights,
        queries,
        slots,
        **shape,
        QUERIES=at_once,
        SELECTED=seen.ndim == 2,
        num_warps=4 * at_once,
        num_stages=3,
    )


@triton.jit
def load_queries(
    query_ptr,
    weights_ptr,
    first,
    queries,
    ALL_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    QUERIES: tl.constexpr,
):
    """All heads of QUERIES queries [QUERIES * HEADS, PADDED] and their weights; zeros beyond the last."""
    line, column = tl.arange(0, QUERIES * HEADS), tl.arange(0, PADDED)
    head, query = line % HEADS, first + (line // HEADS).to(tl.int64)
    is_line = (head < ALL_HEADS) & (query < queries)
    at = query * ALL_HEADS + head
    values = tl.load(
        query_ptr + at[:, None] * WIDTH + column[None],
        mask=is_line[:, None] & (column < WIDTH)[None],
        other=0.0,
    )
    return values, tl.load(weights_ptr + at, mask=is_line, other=0.0)


@triton.jit
def load_keys(keys_ptr, number, is_key, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    column = tl.arange(0, PADDED)
    mask = is_key[:, None] & (column < WIDTH)[None]
    return tl.load(keys_ptr + number[:, None] * WIDTH + column[None], mask=mask, other=0.0)


@triton.jit
def where_positive(values, products, HEADS: tl.constexpr, KEYS: tl.constexpr, QUERIES: tl.constexpr):
    """Spread [KEYS, QUERIES] over the heads whose product with the key is positive."""
    spread = tl.broadcast_to(values[:, :, None], (KEYS, QUERIES, HEADS))
    return tl.where(products > 0.0, spread.reshape(KEYS, QUERIES * HEADS), 0.0)


@triton.jit
def _index_scores(
    query,
    weight,
    keys_ptr,
    seen_ptr,
    member,
    start,
    slots,
    length,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    KEYS: tl.constexpr,
    QUERIES: tl.constexpr,
    SELECTED: tl.constexpr,
):
    """Keys, their products with every head, scores [KEYS, QUERIES], and which of these are seen."""
    slot = start + tl.arange(0, KEYS)
    if SELECTED:
        number, is_key = seen_rows(seen_ptr, tl.max(member, 0), slot, slots, True)
        is_seen = is_key[:, None]
    else:
        number, is_key = slot.to(tl.int64), slot < tl.max(length, 0)
        is_seen = slot[:, None] < length[None]
    keys = load_keys(keys_ptr, number, is_key, WIDTH, PADDED)
    products = tl.dot(keys, query.T)
    weighted = tl.maximum(products, 0.0) * weight[None]
    return keys, products, tl.sum(weighted.reshape(KEYS, QUERIES, HEADS), 2), is_seen


@triton.jit
def _query_kernel(
    query_ptr,
    weights_ptr,
    keys_ptr,
    seen_ptr,
    target_ptr,
    losses_ptr,
    grad_query_ptr,
    grad_weights_ptr,
    queries,
    slots,
    ALL_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    KEYS: tl.constexpr,
    QUERIES: tl.constexpr,
    SELECTED: tl.constexpr,
):
    """QUERIES queries: loss, gradients of the queries and weights, and dI in place of the target."""
    first = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * QUERIES
    query, weight = load_queries(
        query_ptr, weights_ptr, first, queries, ALL_HEADS, HEADS, WIDTH, PADDED, QUERIES
    )
    member = first + tl.arange(0, QUERIES)
    is_member = member < queries
    if SELECTED:
        length = tl.where(is_member, slots, 0)
    else:
        length = tl.minimum(tl.load(seen_ptr + member, mask=is_member, other=0), slots).to(tl.int32)
    last = tl.max(length, 0)

    largest = tl.full((KEYS, QUERIES), float("-inf"), tl.float32)  # of every KEYS-th key, merged at the end
    total = tl.zeros((KEYS, QUERIES), tl.float32)
    for start in range(0, last, KEYS):
        _, _, scores, is_seen = _index_scores(
            query,
            weight,
            keys_ptr,
            seen_ptr,
            member,
            start,
            slots,
            length,
            HEADS,
            WIDTH,
            PADDED,
            KEYS,
            QUERIES,
            SELECTED,
        )
        scores = tl.where(is_seen, scores, float("-inf"))
        before, largest = largest, tl.maximum(largest, scores)
        finite = tl.where(largest == float("-inf"), 0.0, largest)
        total = total * tl.exp(before - finite) + tl.exp(scores - finite)
    top = tl.max(largest, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total_of_all = tl.sum(total * tl.exp(largest - top[None]), 0)
    log_sum = top + tl.log(tl.maximum(total_of_all, 1.0))  # the largest adds 1, unless nothing is seen

    loss = tl.zeros((KEYS, QUERIES), tl.float32)
    gradient = tl.zeros((QUERIES * HEADS, PADDED), tl.float32)
    for start in range(0, last, KEYS):
        keys, products, scores, is_seen = _index_scores(
            query,
            weight,
            keys_ptr,
            seen_ptr,
            member,
            start,
            slots,
            length,
            HEADS,
            WIDTH,
            PADDED,
            KEYS,
            QUERIES,
            SELECTED,
        )
        slot = start + tl.arange(0, KEYS)
        at_target = target_ptr + member[None] * slots + slot[:, None]
        is_there = is_seen & (slot[:, None] < length[None])
        target = tl.load(at_target, mask=is_there, other=0.0)
        log_guess = scores - log_sum[None]
        log_target = tl.log(tl.where(target > 0.0, target, 1.0))
        loss += tl.where(target > 0.0, target * (log_target - log_guess), 0.0)
        grad_scores = tl.where(is_there, tl.exp(log_guess) - target, 0.0)
        tl.store(at_target, grad_scores, mask=is_there)
        active = where_positive(grad_scores, products, HEADS, KEYS, QUERIES).to(keys.dtype)
        gradient = tl.dot(active.T, keys, gradient)

    tl.store(losses_ptr + member, tl.sum(loss, 0), mask=is_member)
    line, column = tl.arange(0, QUERIES * HEADS), tl.arange(0, PADDED)
    head, owner = line % HEADS, first + line // HEADS
    is_line = (head < ALL_HEADS) & (owner < queries)
    at = owner * ALL_HEADS + head
    tl.store(grad_weights_ptr + at, tl.sum(gradient * query.to(tl.float32), 1), mask=is_line)
    tl.store(
        grad_query_ptr + at[:, None] * WIDTH + column[None],
        (gradient * weight[:, None]).to(query.dtype),
        mask=is_line[:, None] & (column < WIDTH)[None],
    )
