"""The lightning indexer's selection in PyTorch, on any device, within a budget of working memory.

Keys pass by in blocks. Each score and its position are packed into one int64 whose order is (higher
score, lower position), so no two candidates are ever equal: `torch.topk`, which breaks ties as it
likes, becomes exact and deterministic, and merging a block into the best so far is one more topk.
"""

import itertools

import torch
from torch import Tensor

from megaspan.ops.quant import load_index_rows
from megaspan.ops.rows import RowTable

LOWEST = torch.iinfo(torch.int64).min  # ranks below every packed score, -inf included
LAST = torch.iinfo(torch.int32).max
PAIR_BYTES = 48  # of temporaries for one (token, key) pair: products, score, packed, concatenated, topk's own
CPU_PAIRS = 1 << 18  # a larger tile would leave the cache


@torch.no_grad()
def index_topk_blocked(
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    table: RowTable,
    sequence_ids: Tensor,
    visible: Tensor,
    topk: int,
    budget_bytes: int,
) -> Tensor:
    """Same arguments and result as `megaspan.ops.index_topk.index_topk`."""
    visible = visible.to(query.device)
    selected_TK = torch.empty(len(query), topk, dtype=torch.int32, device=query.device)
    ends = visible.tolist()
    heads, width = query.shape[1:]
    for first, last, sequence in _runs(sequence_ids.tolist()):
        # Where all that is visible is chosen nothing is scored, but the steps stay as small.
        longest = max(max(ends[first:last]), topk + 1)
        tokens, block = tile_shape(longest, heads, width, topk, budget_bytes, query.is_cuda)
        for start in range(first, last, tokens):
            tile = slice(start, min(start + tokens, last))
            longest = max(ends[tile])
            visible_R1 = visible[tile, None]
            if longest <= topk:
                positions_K = torch.arange(topk, dtype=torch.int32, device=query.device)
                selected_TK[tile] = positions_K.where(positions_K < visible_R1, -1)
                continue
            best_RK = visible.new_full((tile.stop - start, topk), LOWEST, dtype=torch.int64)
            for begin in range(0, longest, block):
                positions_B = torch.arange(begin, min(begin + block, longest), device=query.device)
                rows_B = table.rows(torch.full_like(positions_B[:1], sequence), positions_B[None])[0]
                keys_BD, scale_B = _gather(keys, rows_B, table.page_size)
                scores_RB = _scores(query[tile], weights[tile], keys_BD)
                packed_RB = _pack(scores_RB if scale_B is None else scores_RB.mul_(scale_B), positions_B)
                packed_RB.masked_fill_(positions_B >= visible_R1, LOWEST)
                best_RK = torch.cat((best_RK, packed_RB), 1).topk(topk, dim=1, sorted=False).values
            selected_TK[tile] = _positions(best_RK)
    return selected_TK


def tile_shape(
    length: int, heads: int, width: int, topk: int, budget_bytes: int, cuda: bool
) -> tuple[int, int]:
    """Return (tokens, keys) of a tile whose temporaries fit `budget_bytes`.

    The heads pass one by one through the same buffer: only the query's own fp32 copy grows with them.
    """
    key_bytes = 12 * width + 64  # the gathered key, its fp32 copy, its position and row
    token_bytes = PAIR_BYTES * topk + 4 * heads * (width + 1)
    # A block several times topk long keeps the merge cheap; on a GPU few launches matter more.
    block = max(4 * topk, 4096, budget_bytes // 4 // (256 * PAIR_BYTES) if cuda else 0)
    block = min(length, block, budget_bytes // 4 // (key_bytes + PAIR_BYTES))
    tokens = (budget_bytes - block * key_bytes) // (PAIR_BYTES * block + token_bytes)
    if block < 1 or tokens < 1:
        raise ValueError(f"index_topk cannot hold one token's candidates in a budget of {budget_bytes} bytes")
    return (tokens if cuda else max(1, min(tokens, CPU_PAIRS // block))), block


def _runs(sequence_ids: list[int]) -> list[tuple[int, int, int]]:
    """Cut the tokens into (first, last + 1, sequence) where the sequence changes."""
    cuts = [t for t in range(1, len(sequence_ids)) if sequence_ids[t] != sequence_ids[t - 1]]
    bounds = [0, *cuts, len(sequence_ids)] if sequence_ids else []
    return [(a, b, sequence_ids[a]) for a, b in itertools.pairwise(bounds)]


def _gather(keys: Tensor, rows_B: Tensor, page_size: int) -> tuple[Tensor, Tensor | None]:
    """Some keys [B, D], and of FP8 keys, which are then in bf16, the scales [B]."""
    if keys.dtype != torch.uint8:
        return keys[rows_B], None
    values_BD, scale_B = load_index_rows(keys, rows_B, page_size)
    return values_BD.bfloat16(), scale_B


def _scores(query_RHD: Tensor, weights_RH: Tensor, keys_BD: Tensor) -> Tensor:
    """sum over heads of weight * relu(query . key), [R, B] fp32, one head at a time."""
    exact_bf16 = query_RHD.is_cuda and query_RHD.dtype == torch.bfloat16
    if not exact_bf16:
        query_RHD, keys_BD = query_RHD.float(), keys_BD.float()
    scores_RB = torch.zeros(len(query_RHD), len(keys_BD), device=query_RHD.device)
    products_RB = torch.empty_like(scores_RB)
    for head in range(query_RHD.shape[1]):
        if exact_bf16:
            torch.mm(query_RHD[:, head], keys_BD.T, out_dtype=torch.float32, out=products_RB)
        else:
            torch.mm(query_RHD[:, head], keys_BD.T, out=products_RB)
        scores_RB.addcmul_(products_RB.relu_(), weights_RH[:, head, None].float())
    return scores_RB


def _pack(scores_RB: Tensor, positions_B: Tensor) -> Tensor:
    """Pack (score, position) into int64 ordered by higher score, then lower position. NaN counts as -inf."""
    scores_RB = scores_RB.masked_fill_(scores_RB.isnan(), -torch.inf).add_(0.0)  # -0.0 + 0.0 is 0.0
    bits_RB = scores_RB.view(torch.int32)
    ordered_RB = bits_RB ^ ((bits_RB >> 31) & LAST)  # two's complement order of a float's bits
    return (ordered_RB.long() << 32).bitwise_or_(LAST - positions_B)


def _positions(packed_RK: Tensor) -> Tensor:
    """Unpack the positions, ascending, -1 at the end where there was no candidate."""
    positions_RK = (LAST - (packed_RK & LAST)).sort(1).values
    return positions_RK.masked_fill(positions_RK == LAST, -1).int()
