"""Cases of index_topk: what its tests are made of."""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from megaspan.ops.index_topk import index_topk_reference
from megaspan.ops.quant import quantize_index_queries, store_index_rows
from megaspan.ops.rows import RowTable

MIB = 1 << 20


@dataclass(frozen=True)
class Case:
    query: Tensor
    weights: Tensor
    keys: Tensor
    table: RowTable
    sequence_ids: Tensor
    visible: Tensor
    topk: int

    def arguments(self) -> tuple:
        return tuple(getattr(self, field.name) for field in fields(self))

    def to(self, device: str) -> "Case":
        tensors = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, table=RowTable(self.table.starts.to(device), self.table.page_size), **tensors)

    def reference(self) -> Tensor:
        return index_topk_reference(*self.arguments())

    def at(self, tokens: slice | Tensor) -> "Case":
        """The same with these tokens only, in this order."""
        names = ("query", "weights", "sequence_ids", "visible")
        return replace(self, **{name: getattr(self, name)[tokens] for name in names})

    def in_fp8(self, rotate: bool = False) -> "Case":
        """The same with FP8 index rows; small whole numbers stay exact if they are not rotated."""
        query, weights = quantize_index_queries(self.query, self.weights, rotate)
        keys = in_fp8_pages(self.keys, self.table.page_size, rotate)
        return replace(self, query=query, weights=weights, keys=keys)


def in_fp8_pages(keys: Tensor, page_size: int, rotate: bool = False) -> Tensor:
    """Keys [N, D] as FP8 index rows uint8 [N, D + 4]; what of the last page is not filled is NaN."""
    count = -(-len(keys) // page_size) * page_size
    storage = torch.full((count, keys.shape[1] + 4), 255, dtype=torch.uint8)
    store_index_rows(keys, storage, torch.arange(len(keys)), page_size, rotate)
    return storage


def make(
    visible: list[list[int]], heads=3, width=8, topk=8, page_size=0, whole=True, dtype=torch.float32, seed=0
) -> Case:
    """Tokens of sequence s see visible[s]; page 0 means contiguous; whole numbers make every sum exact.

    Contiguous keys are a multiple of 4, so that their scales are aligned in FP8.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator)
        return (values * 1.5).round() if whole else values

    longest = max(1, *(length for row in visible for length in row))
    page = page_size or -(-longest // 4) * 4
    pages = -(-longest // page)
    order = torch.randperm(len(visible) * pages, generator=generator)
    lengths = torch.tensor([length for row in visible for length in row])
    return Case(
        query=draw(len(lengths), heads, width).to(dtype),
        weights=draw(len(lengths), heads),
        keys=draw(len(visible) * pages * page, width).to(dtype),
        table=RowTable((order * page).view(len(visible), pages), page),
        sequence_ids=torch.tensor([s for s, row in enumerate(visible) for _ in row]),
        visible=lengths,
        topk=topk,
    )
