"""Generate from one sequence: read the prompt in chunks, then one token at a time."""

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor

from megaspan.cache.growing import GrowingCache
from megaspan.cache.solo import SoloCache
from megaspan.config import ModelConfig
from megaspan.costs.memory import Format
from megaspan.engine.decode_graph import Decode, DecodeGraphs
from megaspan.errors import BadPrompt, UserError
from megaspan.model.batch import Batch
from megaspan.model.transformer import Transformer

Progress = Callable[[int, int], None]
CHUNKS = {"cpu": 512, "cuda": 4096}  # prompt tokens that are read at a time


class Generation:
    """One sequence in a cache of its own, which grows on a CPU; on a GPU it decodes as a CUDA graph.

    capacity: tokens to reserve room for, on a GPU the most there may be. chunk: tokens read per forward pass
    of the prompt, by default the device's CHUNKS. index_dtype: of the cached index keys, by default the
    model's; bf16 keys halve what the index scan reads.
    """

    def __init__(
        self,
        model: Transformer,
        capacity: int,
        chunk: int | None = None,
        index_dtype: torch.dtype | None = None,
    ):
        if chunk is not None and chunk < 1:
            raise UserError(f"chunk is {chunk}: read at least 1 token at a time")
        weight = model.lm_head.weight
        self.model, self.chunk = model, chunk or CHUNKS["cuda" if weight.is_cuda else "cpu"]
        self.cache: GrowingCache | SoloCache
        self._decoder: DecodeGraphs | None = None
        if weight.is_cuda:
            formats = _format(weight.dtype), _format(index_dtype or weight.dtype)
            self.cache = SoloCache(model.config, capacity, *formats, weight.device)
            self._decoder = DecodeGraphs(model, self.cache, most=1)
        else:
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
        token_ids = check_prompt(self.model.config, token_ids, self.length)
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
        if not 0 <= token_id < self.model.config.vocab_size:
            raise UserError(_outside(token_id, self.model.config))
        if self._decoder is None:
            return self.model.unembed(self._read([token_id]))[0]
        logits = self._decoder(Decode([token_id], [self.length], [0]))[0]
        self.cache.lengths = [self.length + 1]
        return logits.clone()  # the next step overwrites the graph's

    def _read(self, token_ids: Sequence[int] | Tensor) -> Tensor:
        device = self.model.lm_head.weight.device
        return self.model(Batch.of([token_ids], [self.length], device=str(device)), self.cache)


def _format(dtype: torch.dtype) -> Format:
    return cast(Format, str(dtype).removeprefix("torch."))


def check_prompt(config: ModelConfig, token_ids: Sequence[int] | Tensor, past: int = 0) -> Tensor:
    """The prompt as int64 [T], checked: a UserError says what the model cannot read after `past` tokens."""
    if len(token_ids) == 0:
        raise BadPrompt("the prompt is empty: give at least one token")
    try:
        ids = torch.as_tensor(token_ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadPrompt(f"the prompt must be a list of token ids: {error}") from None
    if ids.dim() != 1 or ids.is_floating_point() or ids.is_complex():
        raise BadPrompt(f"the prompt must be a list of token ids, not {ids.dtype} of shape {list(ids.shape)}")
    limit = config.max_position_embeddings
    if past + len(ids) > limit:
        after = f" after {past} others" if past else ""
        raise BadPrompt(f"the prompt has {len(ids)} tokens{after}, more than the model's {limit}: shorten it")
    outside = (ids < 0) | (ids >= config.vocab_size)
    if outside.any():
        raise BadPrompt(_outside(int(ids[outside][0]), config))
    return ids.long()


def _outside(token_id: int, config: ModelConfig) -> str:
    return (
        f"token id {token_id} is outside the model's vocabulary of {config.vocab_size}: "
        "encode the text with the model's own tokenizer"
    )


def generate(
    model: Transformer,
    token_ids: Sequence[int] | Tensor,
    max_tokens: int,
    temperature: float = 0.0,
    seed: int | None = None,
    chunk: int | None = None,
    vocabulary: int | None = None,
) -> Iterator[int]:
    """Yield up to `max_tokens` sampled token ids, the end-of-sequence id included if it comes.

    vocabulary: draw from the first so many ids only, where the model's vocabulary is padded.

    Fewer come where the model's `max_position_embeddings` are full. Raises UserError at once for what it
    cannot do, before the first token is asked for.
    """
    prompt = check_prompt(model.config, token_ids)
    if max_tokens < 1:
        raise UserError(f"max_tokens is {max_tokens}: ask for at least 1")
    _check_temperature(temperature)
    generator = torch.Generator()
    generator.manual_seed(seed) if seed is not None else generator.seed()
    readable = model.config.max_position_embeddings - len(prompt)
    max_tokens = min(max_tokens, readable + 1)  # the last one is not read
    generation = Generation(model, len(prompt) + max_tokens, chunk)

    def tokens() -> Iterator[int]:
        logits = generation.prefill(prompt)
        for produced in range(1, max_tokens + 1):
            token_id = sample(logits[:vocabulary], temperature, generator)
            yield token_id
            if token_id in model.config.eos_token_id or produced == max_tokens:
                return
            logits = generation.step(token_id)

    return tokens()


def sample(logits: Tensor, temperature: float, generator: torch.Generator | None = None) -> int:
    """Draw a token id from logits [V]; temperature 0 takes the best, the lowest id among equals."""
    _check_temperature(temperature)
    if logits.isnan().any():
        raise UserError("the model's logits are not numbers: its weights are damaged, fetch them again")
    if temperature == 0:
        return int(logits.argmax())
    below_best = logits.cpu().double() - logits.max().item()  # so that no quotient overflows
    probabilities = (below_best / temperature).softmax(-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def _check_temperature(temperature: float) -> None:
    if not temperature >= 0:
        raise UserError(f"temperature is {temperature}: it must be 0 or more")
