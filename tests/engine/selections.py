"""Which rows every token attends to, through the engine and in one pass over the whole sequence."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from megaspan.cache.transient import TransientCache
from megaspan.engine.engine import Engine
from megaspan.model.batch import Batch
from megaspan.model.indexer import Indexer
from megaspan.model.transformer import Transformer

Selections = dict[tuple[str, int, int], tuple[int, ...]]  # by sequence, position and indexer


@contextmanager
def recording(model: Transformer, name_of: Callable[[int], str]) -> Iterator[Selections]:
    """The selections of the passes within; name_of: the sequence in a row of the cache's table."""
    selections: Selections = {}
    indexers = [module for module in model.modules() if isinstance(module, Indexer)]

    def record(module: Any, inputs: Any, selection: Any) -> None:
        batch, indexer = inputs[3].batch, indexers.index(module)
        tokens = zip(batch.sequence_ids.tolist(), batch.positions.tolist(), strict=True)
        for (row, position), chosen in zip(tokens, selection.positions.tolist(), strict=True):
            selections[name_of(row), position, indexer] = tuple(chosen)

    hooks = [module.register_forward_hook(record) for module in indexers]
    try:
        yield selections
    finally:
        for hook in hooks:
            hook.remove()


def seated(engine: Engine) -> Callable[[int], str]:
    """For `recording`: the requests that have the engine's slots."""

    def name_of(slot: int) -> str:
        request = engine.scheduler.slots.requests[slot]
        assert request is not None
        return request.id

    return name_of


class Flips:
    """Compares what was served with a pass over the whole sequence, as long as its selections are the same.

    flipped of `selections` differed; `tokens` were compared; largest: difference of two log-probabilities.
    """

    def __init__(self, served: Selections):
        self.served = served
        self.flipped = self.selections = self.tokens = 0
        self.largest = 0.0

    def compare(
        self, model: Transformer, name: str, prompt: Sequence[int], answer: tuple[list[int], list[float]]
    ) -> None:
        """answer: tokens and log-probabilities that were served. With gradients, where they are enabled."""
        tokens, logprobs = answer
        batch = Batch.of([torch.tensor([*prompt, *tokens[:-1]])])
        with recording(model, lambda _: name) as alone:
            hidden = model(batch, TransientCache())
        first = len(prompt) - 1  # the position at which the first token is drawn
        differing = [key for key, chosen in alone.items() if self.served[key] != chosen]
        agreeing = min((position for _, position, _ in differing), default=len(batch.token_ids)) - first
        self.flipped, self.selections = self.flipped + len(differing), self.selections + len(alone)
        for log_probs, token, logprob in zip(
            model.unembed(hidden[first:]).log_softmax(-1)[: max(agreeing, 0)], tokens, logprobs, strict=False
        ):
            self.tokens += 1
            self.largest = max(self.largest, abs(float(log_probs[token].detach()) - logprob))

    def __str__(self) -> str:
        share = self.flipped / self.selections
        return (
            f"{self.flipped} of {self.selections} selections flipped ({share:.2%}); log-probabilities of "
            f"{self.tokens} tokens before differ by {self.largest:.1e} at most"
        )
