"""Random models that the properties of the forward pass are tested on."""

import torch
from torch import Tensor

from megaspan.cache.growing import GrowingCache
from megaspan.cache.transient import TransientCache
from megaspan.config import ModelConfig
from megaspan.model.batch import Batch
from megaspan.model.selection import EVERYTHING
from megaspan.model.transformer import Transformer


def random_model(config: ModelConfig, seed: int = 0) -> Transformer:
    """Weights large enough that attention is far from uniform, norms far from 1."""
    model = Transformer(config)
    model.initialise(seed)
    random = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.empty_like(parameter).normal_(0.0, 0.3, generator=random))
            else:
                parameter.mul_(0.2 / config.initializer_range)
    return model.eval()


def random_tokens(config: ModelConfig, length: int, seed: int = 0) -> Tensor:
    return torch.randint(config.vocab_size, (length,), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def one_shot(model: Transformer, *sequences: Tensor, dense: bool = False) -> list[Tensor]:
    """Logits [T, V] of each sequence, all read in one batch."""
    batch = Batch.of(sequences)
    logits = model.unembed(model(batch, TransientCache(), EVERYTHING if dense else None))
    return list(logits.split(list(batch.query_lengths)))


@torch.no_grad()
def in_chunks(model: Transformer, tokens: Tensor, chunks: list[int], capacity: int = 4) -> Tensor:
    """Logits [T, V] of one sequence read in chunks of the given sizes through a growing cache."""
    cache = GrowingCache(model.config, 1, capacity)
    pieces, start = [], 0
    for size in chunks:
        batch = Batch.of([tokens[start : start + size]], [start])
        pieces.append(model.unembed(model(batch, cache)))
        start += size
    return torch.cat(pieces)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())
