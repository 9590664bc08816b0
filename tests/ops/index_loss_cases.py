"""Operands of the indexer's loss."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


@dataclass
class Case:
    query: Tensor
    weights: Tensor
    keys: Tensor
    layers: list[tuple[Tensor, Tensor]]
    seen: Tensor
    scale: float = field(default=0.3)

    @property
    def operands(self) -> tuple:
        return self.query, self.weights, self.keys, self.layers, self.scale, self.seen

    def to(self, device: str = "cpu", dtype: torch.dtype | None = None) -> "Case":
        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device, dtype)

        layers = [(moved(query), moved(rows)) for query, rows in self.layers]
        weights = self.weights.to(device, torch.float64 if dtype == torch.float64 else None)
        tensors = moved(self.query), weights, moved(self.keys), layers, self.seen.to(device)
        return replace(
            self, **dict(zip(("query", "weights", "keys", "layers", "seen"), tensors, strict=True))
        )


def make_case(
    queries: int = 5,
    index_heads: int = 4,
    index_width: int = 16,
    heads: int = 3,
    width: int = 24,
    length: int = 70,
    served: int = 2,
    slots: int | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """Some queries see nothing; rows that nobody sees are NaN. With `slots`, the queries have selections."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(dtype)

    keys, rows = normal(length, index_width), [normal(length, width) for _ in range(served)]
    if slots is None:
        seen = torch.randint(0, length, (queries,), generator=random)
        unseen = torch.arange(length) >= seen.max()
    else:
        seen = torch.full((queries, slots), -1)
        for query in range(queries):
            used = int(torch.randint(0, min(slots, length) + 1, (), generator=random))
            seen[query, :used] = torch.randperm(length, generator=random)[:used]
        unseen = torch.ones(length, dtype=torch.bool)
        unseen[seen[seen >= 0]] = False
    for tensor in (keys, *rows):
        tensor[unseen] = torch.nan
    layers = [(2 * normal(queries, heads, width), one) for one in rows]
    weights = torch.randn(queries, index_heads, generator=random) * index_heads**-0.5
    return Case(normal(queries, index_heads, index_width), weights, keys, layers, seen)


def gradients(loss: Tensor, operands: tuple[Tensor, ...]) -> list[Tensor]:
    """Gradients of twice the loss: backward must heed what is above it."""
    return list(torch.autograd.grad(2 * loss, operands))
