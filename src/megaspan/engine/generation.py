"""Generate from one sequence: read the prompt in chunks, then one token at a time."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from megaspan.cache.growing import GrowingCache
from megaspan.errors import UserError
from megaspan.model.batch import Batch
from megaspan.model.transformer import Transformer

Progress = Callable[[int, int], None]


class Generation:
    """One sequence in a growing cache.

    capacity: tokens to reserve room for. chunk: tokens read per forward pass of the prompt.
    index_dtype: of the cached index keys; default bf16 where the processor multiplies bf16, else the model's.
    """

    def __init__(
        self, model: Transformer, capacity: int, chunk: int = 512, index_dtype: torch.dtype | None = None
    ):
        self.model, self.chunk = model, chunk
        weight = model.lm_head.weight
        self.cache = GrowingCache(
            model.config, 1, capacity, dtype=weight.dtype, index_dtype=index_dtype, device=weight.device
        )

    @property
    def length(self) -> int:
        """Tokens read so far."""
        return self.cache.lengths[0]

    @torch.inference_mode()
    def prefill(self, token_ids: Sequence[int] | Tensor, on_progress: Progress | None = None) -> Tensor:
        """Read the prompt [T]; return the float32 logits [V] after its last token."""
        if len(token_ids) == 0:
            raise UserError("the prompt is empty: give at least one token")
        limit = self.model.config.max_position_embeddings
        if self.length + len(token_ids) > limit:
            raise UserError(
                f"the prompt has {len(token_ids)} tokens, more than the model's {limit}: shorten it"
            )
        hidden = None
        for start in range(0, len(token_ids), self.chunk):
            piece = token_ids[start : start + self.chunk]
            hidden = self._read(piece)
            if on_progress is not None:
                on_progress(start + len(piece), len(token_ids))
        assert hidden is not None
        return self.model.unembed(hidden[-1:])[0]

    @torch.inference_mode()
    def step(self, token_id: int) -> Tensor:
        """Read one more token; return the float32 logits [V] after it."""
        if self.length >= self.model.config.max_position_embeddings:
            raise UserError(f"the context is full: the model reads {self.length} tokens at most")
        return self.model.unembed(self._read([token_id]))[0]

    def _read(self, token_ids: Sequence[int] | Tensor) -> Tensor:
        device = self.model.lm_head.weight.device
        return self.model(Batch.of([token_ids], [self.length], device=str(device)), self.cache)


def generate(
    model: Transformer,
    token_ids: Sequence[int] | Tensor,
    max_tokens: int,
    temperature: float = 0.0,
    seed: int | None = None,
    chunk: int = 512,
) -> Iterator[int]:
    """Yield up to `max_tokens` sampled token ids, the end-of-sequence id included if it comes."""
    if max_tokens < 1:
        raise UserError(f"max_tokens is {max_tokens}: ask for at least 1")
    generator = torch.Generator()
    generator.manual_seed(seed) if seed is not None else generator.seed()
    generation = Generation(model, len(token_ids) + max_tokens, chunk)
    logits = generation.prefill(token_ids)
    for produced in range(1, max_tokens + 1):
        token_id = sample(logits, temperature, generator)
        yield token_id
        if token_id in model.config.eos_token_id or produced == max_tokens:
            return
        logits = generation.step(token_id)


def sample(logits: Tensor, temperature: float, generator: torch.Generator | None = None) -> int:
    """Draw a token id from logits [V]; temperature 0 takes the best, the lowest id among equals."""
    if temperature < 0:
        raise UserError(f"temperature is {temperature}: it must be 0 or more")
    if temperature == 0:
        return int(logits.argmax())
    probabilities = (logits.cpu().double() / temperature).softmax(-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))
