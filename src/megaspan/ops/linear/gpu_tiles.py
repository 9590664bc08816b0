"""What the kernels of products share: how work is cut into tiles, and the chain of products of a tile.

Every number is one chain of matrix instructions along the whole width, 16 products at a time in ascending
order, added to one fp32 sum: the width is never split. Tiles decide only who computes a number, so a token's
numbers have the same bits in every call.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

PROCESSORS = 132  # of an H100 or H200; for another number only the choice of tiles is not the best


class Tile(NamedTuple):
    """What one program multiplies: tokens times columns (weight rows), `step` of the width at a time.

    stages: steps whose loads are under way; band: tiles of tokens that share columns while these are in L2.
    """

    tokens: int
    columns: int
    step: int
    stages: int
    warps: int
    band: int = 8

    def launch(self) -> dict[str, int]:
        """The tile as keyword arguments of a kernel's launch."""
        sizes = {"TOKENS": self.tokens, "COLUMNS": self.columns, "STEP": self.step, "BAND": self.band}
        return {**sizes, "num_stages": self.stages, "num_warps": self.warps}

    def programs(self, tokens: int, columns: int, heads: int = 1) -> int:
        """How many programs compute so many columns of each head."""
        return heads * triton.cdiv(tokens, self.tokens) * triton.cdiv(columns, self.columns)


def tile_of(tiles: Sequence[Tile], tokens: int, columns: int, heads: int = 1) -> Tile:
    """The first of the tiles, largest first, that keeps nearly all multiprocessors busy; else the last."""
    enough = (tile for tile in tiles if tile.programs(tokens, columns, heads) >= 0.95 * PROCESSORS)
    return next(enough, tiles[-1])


def is_aligned(tensor: Tensor) -> bool:
    """Whether rows of 16-bit numbers are in one piece and begin at multiples of 16 bytes."""
    in_order = tensor.stride(-1) == 1 and all(
        stride > 0 and stride % 8 == 0 for stride in tensor.stride()[:-1]
    )
    return in_order and tensor.data_ptr() % 16 == 0


def states_descriptor(states: Tensor, tile: Tile) -> TensorDescriptor:
    """[T, H, I] as [H, T, I]: past the last token and the width there are zeros. Moved if not aligned.

    Tokens that do not fill one tile are moved to memory that does: zeros from beyond a tensor take longer
    than numbers from within. Whatever the rows after them hold, it is in no number that is stored.
    """
    if len(states) < tile.tokens:
        room = torch.empty(tile.tokens, *states.shape[1:], dtype=states.dtype, device=states.device)
        room[: len(states)] = states
        states = room
    elif not is_aligned(states):
        states = states.clone(memory_format=torch.contiguous_format)
    return TensorDescriptor.from_tensor(states.transpose(0, 1), [1, tile.tokens, tile.step])


def weights_descriptor(weights: Tensor, tile: Tile, transposed: bool = False) -> TensorDescriptor:
    """[H, O, I], or transposed [H, I, O]: past the last of either there are zeros."""
    block = (tile.step, tile.columns) if transposed else (tile.columns, tile.step)
    return TensorDescriptor.from_tensor(weights, [1, *block])


@triton.jit
def place_of(tile, tokens, columns, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, BAND: tl.constexpr):
    """The first token and column of a tile; BAND tiles of tokens go through all columns together."""
    token_tiles, column_tiles = tl.cdiv(tokens, TOKENS), tl.cdiv(columns, COLUMNS)
    first = tile // (BAND * column_tiles) * BAND
    height = tl.minimum(token_tiles - first, BAND)
    place = tile % (BAND * column_tiles)
    return (first + place % height) * TOKENS, place // height * COLUMNS


@triton.jit
def product(
    states, weights, head, token, column,
    WIDTH: tl.constexpr, TRANSPOSED: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """fp32 sums [TOKENS, COLUMNS] over the whole width, in its order."""
    sums = tl.zeros([TOKENS, COLUMNS], tl.float32)
    for start in range(0, WIDTH, STEP):
        some = states.load([head, token, start]).reshape(TOKENS, STEP)
        if TRANSPOSED:
            sums = tl.dot(some, weights.load([head, start, column]).reshape(STEP, COLUMNS), sums)
        else:
            sums = tl.dot(some, weights.load([head, column, start]).reshape(COLUMNS, STEP).T, sums)
    return sums


@triton.jit
def store(
    output_ptr, sums, token, column, tokens, columns, row_stride,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the part of a tile that is inside, rounded to the output's dtype."""
    rows, places = token + tl.arange(0, TOKENS), column + tl.arange(0, COLUMNS)
    inside = (rows < tokens)[:, None] & (places < columns)[None, :]
    rows = rows.to(tl.int64) * row_stride
    tl.store(output_ptr + rows[:, None] + places[None, :], sums, mask=inside)
