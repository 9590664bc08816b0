"""A small model's sequence, read through a paged cache in chunks."""

from typing import Any

import torch
from hypothesis import strategies as st

from megaspan.cache.paged import PagedCache
from megaspan.cache.pool import PagePools
from megaspan.config import ModelConfig
from megaspan.model.batch import Batch
from tests.model.models import random_model, random_tokens

DEBUG = ModelConfig.preset("debug")
PAGE, LENGTH = 4, 41  # more than two pages, five times debug's top-k
MODEL, TOKENS = random_model(DEBUG), random_tokens(DEBUG, LENGTH)


def paged(
    pages: int = 24, slots: int = 1, latent: Any = "float32", index: Any = None, rotate_index: bool = True
) -> PagedCache:
    pools = PagePools(DEBUG, pages, PAGE, latent, index, rotate_index=rotate_index)
    return PagedCache(pools, slots, max_pages=pages)


@torch.no_grad()
def read(cache, tokens, chunks, slot=0, selection=None, model=MODEL):
    """Logits [T, V] of one sequence read in chunks of the given sizes."""
    pieces, start = [], 0
    for size in chunks:
        batch = Batch.of([tokens[start : start + size]], [start], slots=[slot])
        pieces.append(model.unembed(model(batch, cache, selection)))
        start += size
    return torch.cat(pieces)


def cuts(length: int):
    """Chunk sizes that sum to `length`."""
    return st.lists(st.integers(1, length - 1), max_size=4, unique=True).map(
        lambda at: [b - a for a, b in zip([0, *sorted(at)], [*sorted(at), length], strict=True)]
    )
