"""The indexer's loss and its gradients, over all the rows that queries see and over their selections."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from megaspan.bench.kernels import inputs
from megaspan.bench.kernels.registry import Case, Scale, Trial, operation, require_close, size
from megaspan.ops.index_loss import index_loss, index_loss_reference

TOLERANCE = 2e-2
SERVED = 4  # layers that share an indexer's selection


@operation("index_loss")
def index_loss_cases(scale: Scale) -> Iterator[Case]:
    config, length = scale.config, scale.contexts[0]
    queries = scale.queries // 2
    index = config.index_n_heads * config.index_head_dim
    attention = SERVED * config.num_attention_heads * config.latent_width
    operands = queries * (index + attention) + length * (config.index_head_dim + SERVED * config.latent_width)
    for slots in (None, config.index_topk):
        seen = queries * length - queries * (queries - 1) // 2 if slots is None else queries * slots
        where = f"{size(length)} rows" if slots is None else f"selections in {size(length)} rows"
        yield Case(
            name=f"index_loss with gradients, {queries} queries, {where}",
            make=partial(_make, scale, queries, length, slots),
            unit="TFLOP/s",
            flops=2 * seen * (3 * index + attention),  # the scores, and the gradients of queries and keys
            nbytes=2 * operands,
            shows_memory=True,
        )


class Learning:
    """An indexer and the layers that it serves, for the last `queries` tokens of a sequence."""

    def __init__(self, scale: Scale, queries: int, length: int, slots: int | None, device: torch.device):
        config, heads = scale.config, scale.config.num_attention_heads
        index = config.index_n_heads, config.index_head_dim
        self.query, self.keys = (
            inputs.normal((queries, *index), device),
            inputs.normal((length, index[1]), device),
        )
        self.weights = (
            inputs.normal((queries, index[0]), device, torch.float32) * (index[0] * index[1]) ** -0.5
        )
        self.layers = [
            (
                inputs.normal((queries, heads, config.latent_width), device),
                inputs.normal((length, config.latent_width), device),
            )
            for _ in range(SERVED)
        ]
        self.scale = config.qk_head_dim**-0.5
        self.seen = torch.arange(length - queries + 1, length + 1, device=device)
        if slots is not None:
            self.seen = inputs.selected_rows(queries, length, slots, device)

    def learn(self) -> tuple[Tensor, ...]:
        """The loss, and its gradients with regard to queries, weights and keys."""
        return self._learn(index_loss, self.query, self.weights, self.keys, self.layers, self.seen)

    def check(self, count: int) -> None:
        """The loss and the gradients of some queries alone, in float32."""
        some = torch.linspace(0, len(self.query) - 1, count, device=self.query.device).long().unique()
        layers = [(query[some], rows) for query, rows in self.layers]
        operands = self.query[some], self.weights[some], self.keys, layers, self.seen[some]
        exact = [(query.float(), rows.float()) for query, rows in layers]
        in_float32 = self.query[some].float(), self.weights[some], self.keys.float(), exact, self.seen[some]
        expected = self._learn(index_loss_reference, *in_float32)
        for actual, wanted in zip(self._learn(index_loss, *operands), expected, strict=True):
            require_close(actual, wanted, TOLERANCE)
        whole = self.learn()[1]  # a query's gradient does not depend on the others
        require_close(whole[some], expected[1], TOLERANCE)

    def _learn(self, loss, query, weights, keys, layers, seen) -> tuple[Tensor, ...]:
        learnt = [part.detach().requires_grad_() for part in (query, weights, keys)]
        value = loss(*learnt, layers, self.scale, seen)
        return value.detach(), *torch.autograd.grad(value, learnt)


def _make(scale: Scale, queries: int, length: int, slots: int | None, device: torch.device) -> Trial:
    made = Learning(scale, queries, length, slots, device)
    return Trial([made.learn], partial(made.check, scale.sampled))
