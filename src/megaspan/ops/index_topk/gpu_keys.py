"""What the GPU's selections share: where cached keys lie, their scores, and the order of scores."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megaspan.ops.rows import RowTable

KEYS = 64  # keys that are scored at once: a page of the serving cache
TILE = tl.constexpr(KEYS)


def values_and_scales(keys: Tensor, table: RowTable) -> tuple[Tensor, Tensor]:
    """The storage seen as numbers, and as the fp32 words among which are the scales of FP8 keys.

    Where sequences have one page, of any size, the words begin with the first page's scales.
    """
    if keys.dtype != torch.uint8:
        return keys, keys
    words = keys.flatten().view(torch.float32)
    values = table.page_size * (keys.shape[1] - 4) if table.starts.shape[1] == 1 else 0
    return keys.view(torch.float8_e4m3fn), words[values // 4 :]


@triton.jit
def tile_rows(starts_ptr, sequence, tile, seen, pages, PAGE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Where a tile is: the first row of its page; where pages are smaller than tiles, of each position's.

    PAGE 0: a sequence has one page, however long. Positions from `seen` on are not looked up.
    """
    if PAGE % 64 == 0:
        place = starts_ptr + sequence * pages
        if PAGE > 0:
            place += tile * TILE // PAGE
        if ASSEMBLY:  # not a load of Triton's own, which a pipelined loop would wait for
            return tl.inline_asm_elementwise(
                "ld.global.nc.b64 $0, [$1];", "=l,l", [place], dtype=tl.int64, is_pure=True, pack=1
            )
        else:
            return tl.load(place)
    else:
        position = tile * TILE + tl.arange(0, TILE)
        place = starts_ptr + sequence * pages + position // PAGE
        return tl.load(place, mask=position < seen, other=0)


@triton.jit
def tile_scores(
    query,
    weights,
    keys_ptr,
    scales_ptr,
    page_rows,
    tile,
    left,
    MASKED: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    FP8: tl.constexpr,
    QUERIES: tl.constexpr,
):
    """Scores fp32 [TILE, QUERIES] of a tile's keys, whose pages begin at `page_rows` (see `tile_rows`).

    query [N, D] and weights [N] hold the heads of QUERIES queries in the order of `query_columns`. FP8 keys
    lie page by page, the values of PAGE rows and then their scales. MASKED: only `left` keys are read.
    """
    key = tl.arange(0, TILE)
    if PAGE == 64:
        inside = key
    elif PAGE > 0:
        inside = (tile * TILE + key) % PAGE
    else:
        inside = tile * TILE + key
    width = D + 4 if FP8 else D
    if PAGE % 64 == 0:
        page = page_rows * width
        if PAGE > 0:
            page = tl.multiple_of(page, 16)  # bytes, so that loads can be as wide
        places = keys_ptr + page + tl.expand_dims(inside * D, 1)
    else:
        places = keys_ptr + tl.expand_dims(page_rows * width + inside * D, 1)
    places = places + tl.expand_dims(tl.arange(0, D), 0)
    keys = tl.load(places, mask=(key < left)[:, None], other=0.0) if MASKED else tl.load(places)
    products = tl.dot(keys, query.T)
    if FP8:  # which has no infinity: twice ReLU is quick to have, and NaN of NaN
        products = (products + tl.abs(products)) * (0.5 * weights)[None, :]
    else:
        products = tl.maximum(products, 0.0, tl.PropagateNan.ALL) * weights[None, :]
    if QUERIES == 4:
        # Column pairs of every eighth belong to one query: the fragment that a thread holds of a product.
        scores = tl.sum(tl.sum(tl.reshape(products, [TILE, query.shape[0] // 8, 4, 2]), 3), 1)
    else:
        scores = tl.expand_dims(tl.sum(products, 1), 1)
    if FP8:
        places = scales_ptr + (page_rows * (D + 4) + PAGE * D) // 4 + inside
        scale = tl.load(places, mask=key < left, other=0.0) if MASKED else tl.load(places)
        scores *= scale[:, None]
    return scores


@triton.jit
def query_columns(H: tl.constexpr, QUERIES: tl.constexpr):
    """For each column of a product: which of the queries it belongs to, and which head it is."""
    column = tl.arange(0, H * QUERIES)
    if QUERIES == 4:
        return column // 2 % 4, column // 8 * 2 + column % 2
    else:
        return column // H, column % H


@triton.jit
def ordered(score):
    """fp32 → uint32 in the order of the scores; -0.0 is 0.0, and no score is NaN."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def score_of(rank):
    """The inverse of `ordered`."""
    bits = (rank ^ 0x80000000).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def with_bit(rank, bit):
    """The rank uint32 with the bit set that is `bit` places below the highest."""
    return rank | (tl.full([], 1, tl.uint32) << (31 - bit))


@triton.jit
def ranks(entries_ptr, place, there):
    """The order of the scores of entries int64 (score in the upper half), 0 where there is none."""
    score = tl.load(entries_ptr.to(tl.pointer_type(tl.float32)) + place * 2 + 1, mask=there, other=0.0)
    return tl.where(there, ordered(score), 0)


@triton.jit
def lows(entries_ptr, place, there):
    """The lower halves of entries, -1 where there is none."""
    return tl.load(entries_ptr.to(tl.pointer_type(tl.int32)) + place * 2, mask=there, other=-1)
