"""Random operands at the shapes of a scale, made where they are used."""

from collections.abc import Iterator

import torch
from torch import Tensor

from megaspan.ops.quant import encode_latent_rows, index_row_views
from megaspan.ops.rows import RowTable

CHUNK_ROWS = 1 << 16  # rows that are drawn at once: random numbers take four bytes each


def normal(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=device, dtype=dtype)


def weight(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A matrix [..., outputs, inputs] that keeps the size of what it is multiplied with."""
    return torch.empty(shape, device=device, dtype=dtype).normal_(0.0, shape[-1] ** -0.5)


def shuffled_pages(sequences: int, length: int, page_size: int, device: torch.device) -> RowTable:
    """A table of sequences whose pages lie anywhere among each other's."""
    pages = -(-length // page_size)
    order = torch.randperm(sequences * pages, device=device)
    return RowTable((order * page_size).view(sequences, pages), page_size)


def row_count(table: RowTable) -> int:
    return table.starts.numel() * table.page_size


def index_keys(table: RowTable, width: int, device: torch.device, fp8: bool = True) -> Tensor:
    """Keys for the rows of a table: bf16 [N, D], or FP8 rows uint8 [N, D + 4] in the pages' own layout."""
    count, page_size = row_count(table), table.page_size
    if not fp8:
        return normal((count, width), device)
    storage = torch.empty(count, width + 4, dtype=torch.uint8, device=device)
    values, scales = index_row_views(storage, page_size)
    for chunk in _chunks(len(values), CHUNK_ROWS // page_size):
        drawn = torch.randn(values[chunk].shape, device=device)
        values[chunk] = drawn.to(torch.float8_e4m3fn)
        scales[chunk] = torch.exp2(torch.randint(-1, 2, drawn.shape[:2], device=device).float())
    return storage


def latent_rows(count: int, latent_rank: int, rope_width: int, device: torch.device, fp8: bool) -> Tensor:
    """Latent rows: bf16 [N, latent + rope], or FP8 rows of `ops.quant.encode_latent_rows`."""
    width = latent_rank + rope_width
    if not fp8:
        return normal((count, width), device)
    encoded = [
        encode_latent_rows(normal((chunk.stop - chunk.start, width), device), latent_rank)
        for chunk in _chunks(count, CHUNK_ROWS)
    ]
    return torch.cat(encoded)


def selected_rows(queries: int, rows: int, topk: int, device: torch.device) -> Tensor:
    """[T, K] int64, distinct row numbers in ascending order, drawn evenly."""
    topk = min(topk, rows)
    drawn = torch.randint(0, rows - topk + 1, (queries, topk), device=device).sort(1).values
    return drawn + torch.arange(topk, device=device)


def _chunks(count: int, step: int) -> Iterator[slice]:
    step = max(1, step)
    return (slice(start, min(start + step, count)) for start in range(0, count, step))
