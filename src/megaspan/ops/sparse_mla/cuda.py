"""Binding of kernel.cu, sparse latent attention on Hopper."""

import math
from pathlib import Path

import torch
from torch import Tensor

from megaspan.ops import cuda

SOURCE = Path(__file__).parent / "kernel.cu"
HEADS, VALUES, WIDTH, PACKED_ROW, KEYS = 64, 512, 576, 656, 64  # of kernel.cu
THREADS, SHARED_BYTES = 384, 227 << 10
BLOCKS = 128  # at once; fewer are made more by splitting the selections
MOST_SPLITS = 32
PARTIAL_BYTES = 256 << 20  # of the splits' results at once


def supports(query: Tensor, rows: Tensor, value_width: int) -> bool:
    """Whether the kernels take these tensors, in the widths that GLM-5.2 has, and can be built here."""
    stored = (torch.bfloat16, WIDTH) if rows.dtype == torch.bfloat16 else (torch.uint8, PACKED_ROW)
    return (
        query.dtype == torch.bfloat16
        and query.shape[1] % HEADS == 0
        and (query.shape[2], value_width) == (WIDTH, VALUES)
        and (rows.dtype, rows.shape[1]) == stored
        and rows.is_contiguous()
        and rows.data_ptr() % 16 == 0
        and cuda.can_run(query.device, SOURCE)
    )


def sparse_mla_cuda(
    query: Tensor, rows: Tensor, selected: Tensor, scale: float, splits: int | None = None
) -> tuple[Tensor, Tensor]:
    """As `gpu.sparse_mla_gpu`; `supports` must hold."""
    tokens, heads, _ = query.shape
    output = torch.empty(tokens, heads, VALUES, dtype=torch.bfloat16, device=query.device)
    lse = torch.empty(tokens, heads, device=query.device)
    query, selected = query.contiguous(), selected.long().contiguous()
    splits = splits or splits_for(tokens * heads // HEADS, selected.shape[1])
    turn = tokens if splits == 1 else max(1, PARTIAL_BYTES // (splits * heads * VALUES * 4))
    for start in range(0, tokens, max(1, turn)):
        some = slice(start, start + turn)
        _attend(query[some], rows, selected[some], scale, splits, output[some], lse[some])
    return output, lse


def _attend(
    query: Tensor, rows: Tensor, selected: Tensor, scale: float, splits: int, output: Tensor, lse: Tensor
) -> None:
    tokens, heads, _ = query.shape
    attend = cuda.kernel(SOURCE, "attend_packed" if rows.dtype == torch.uint8 else "attend_wide")
    grid = tokens * heads // HEADS, splits
    sizes = selected.shape[1], heads // HEADS, scale * math.log2(math.e)
    if splits == 1:
        attend(grid, THREADS, SHARED_BYTES, query, rows, selected, output, None, lse, *sizes)
        return
    partial = torch.empty(tokens, splits, heads, VALUES, device=query.device)
    partial_lse = torch.empty(tokens, splits, heads, device=query.device)
    attend(grid, THREADS, SHARED_BYTES, query, rows, selected, None, partial, partial_lse, *sizes)
    combine = cuda.kernel(SOURCE, "combine_few" if splits <= 4 else "combine_many")
    combine((tokens * heads,), 128, 0, partial, partial_lse, output, lse, heads, splits)


def splits_for(groups: int, slots: int) -> int:
    """Parts of a selection, in as many blocks: enough that most processors have one, and none has two."""
    steps = -(-slots // KEYS)
    wanted = min(MOST_SPLITS, max(1, BLOCKS // max(1, groups)))
    return -(-steps // -(-steps // wanted)) if steps else 1
