"""Bits per byte of held-out projects: how well a model predicts code that it never saw."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from megaspan.cache.growing import GrowingCache
from megaspan.errors import UserError
from megaspan.model.batch import Batch
from megaspan.model.folder import LanguageModel
from megaspan.train.data import TokenFile
from megaspan.train.losses import IGNORED


@torch.inference_mode()
def bits_per_byte(
    model: LanguageModel,
    corpus: str,
    context: int = 4096,
    windows: int | None = None,
    chunk: int = 4096,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, float]:
    """Predict every token of held-out windows of `context` tokens, each from nothing but its own window.

    windows: how many, evenly spread over the held-out projects; all by default. A window that reaches
    into the next project is read as two sequences. Bytes are those of the predicted tokens' text.
    Returns bits_per_byte, nats_per_token, tokens, bytes and context. Raises UserError when the model has
    no tokenizer, or another than the corpus was made with, or the corpus has no window of text.
    """
    if model.tokenizer is None:
        raise UserError("the model has no tokenizer.json, so the bytes of its tokens are unknown")
    if context > model.config.max_position_embeddings:
        limit = model.config.max_position_embeddings
        raise UserError(f"a context of {context} is more than the model's {limit} positions")
    data = TokenFile.open(corpus, "heldout")
    data.require_vocabulary(model.tokenizer.vocab_size)
    special = set(model.tokenizer.special_tokens.values())
    byte_lengths = torch.tensor(
        [0 if number in special else len(text) for number, text in enumerate(model.tokenizer.token_bytes)]
    )
    available = (len(data.tokens) - 1) // context
    if available < 1:
        raise UserError(
            f"{corpus} has {len(data.tokens)} held-out tokens, too few for a context of {context}"
        )
    count = min(windows or available, available)
    nats, tokens, size = 0.0, 0, 0
    for number in range(count):
        inputs, targets, lengths = data.window(number * available // count * context, context)
        counted = targets != IGNORED
        nats += float(_losses(model, inputs, targets, lengths, chunk)[counted].double().sum())
        tokens += int(counted.sum())
        size += int(byte_lengths[targets[counted]].sum())
        if on_progress is not None:
            on_progress(number + 1, count)
    if not size:
        raise UserError(f"the held-out windows of {corpus} hold no text to predict: give a longer context")
    return {
        "bits_per_byte": nats / math.log(2) / size,
        "nats_per_token": nats / tokens,
        "tokens": tokens,
        "bytes": size,
        "context": context,
    }


def _losses(model: LanguageModel, inputs: Tensor, targets: Tensor, lengths: list[int], chunk: int) -> Tensor:
    """Cross-entropy [T] of the targets, read a chunk at a time through the cache as in serving."""
    weight, losses = model.lm_head.weight, []
    for sequence, wanted in zip(inputs.split(lengths), targets.split(lengths), strict=True):
        cache = GrowingCache(model.config, 1, len(sequence), weight.dtype, device=weight.device)
        for start in range(0, len(sequence), chunk):
            piece = sequence[start : start + chunk]
            hidden = model(Batch.of([piece], cache.lengths, device=str(weight.device)), cache)
            log_probabilities = model.unembed(hidden).log_softmax(-1).cpu()
            aim = wanted[start : start + chunk].clamp(min=0)
            losses.append(-log_probabilities.gather(1, aim[:, None])[:, 0])
    return torch.cat(losses)
