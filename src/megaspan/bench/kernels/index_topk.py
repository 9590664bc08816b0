"""Index scores and the exact choice of the best positions, with FP8 keys in shuffled pages."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from megaspan.bench.kernels import inputs, peers
from megaspan.bench.kernels.registry import Case, Scale, Trial, WrongResult, operation, size
from megaspan.ops.budget import working_memory
from megaspan.ops.index_topk import index_topk, index_topk_reference
from megaspan.ops.quant import decode_index_rows, quantize_index_queries


@operation("index_topk")
def index_topk_cases(scale: Scale) -> Iterator[Case]:
    for length in reversed(scale.contexts):
        queries = min(scale.queries, length)
        name = f"index_topk prefill, {queries} queries x {size(length)}"
        yield _case(scale, name, 1, queries, length)
    for length in scale.contexts:
        for batch in scale.batches:
            yield _case(scale, f"index_topk decode, batch {batch} at {size(length)}", batch, 1, length)


def _case(scale: Scale, name: str, sequences: int, queries: int, length: int) -> Case:
    config, decode = scale.config, queries == 1
    nbytes = sequences * (length * (config.index_head_dim + 4) + 4 * queries * config.index_topk)
    pairs = sequences * (queries * length - queries * (queries - 1) // 2)
    return Case(
        name=name,
        make=partial(_make, scale, sequences, queries, length),
        unit="µs" if decode else "ms",
        flops=2 * config.index_n_heads * config.index_head_dim * pairs,
        kind="fp8",
        nbytes=nbytes,
        decode=decode,
        shows_memory=not decode,
    )


def _make(scale: Scale, sequences: int, queries: int, length: int, device: torch.device) -> Trial:
    copies = scale.copies(sequences * length * (scale.config.index_head_dim + 4)) if queries == 1 else 1
    made = [Selecting(scale, sequences, queries, length, device) for _ in range(copies)]
    first = made[0]
    return Trial([one.select for one in made], partial(first.check, scale.sampled), peers.index_topk(made))


class Selecting:
    """The last `queries` tokens of each of some sequences choose among `length` positions, causally."""

    def __init__(self, scale: Scale, sequences: int, queries: int, length: int, device: torch.device):
        config, tokens = scale.config, sequences * queries
        self.queries, self.length, self.topk = queries, length, config.index_topk
        self.query_lengths = (queries,) * sequences
        self.table = inputs.shuffled_pages(sequences, length, scale.page_size, device)
        self.keys = inputs.index_keys(self.table, config.index_head_dim, device)
        query = inputs.normal((tokens, config.index_n_heads, config.index_head_dim), device)
        weights = inputs.normal((tokens, config.index_n_heads), device, torch.float32)
        self.query, self.weights = quantize_index_queries(query, weights)
        self.sequence_ids = torch.arange(sequences, device=device).repeat_interleave(queries)
        self.visible = torch.arange(length - queries + 1, length + 1, device=device).repeat(sequences)
        self.budget = working_memory(device)

    def select(self) -> Tensor:
        """[T, K] int32 positions."""
        operands = self.query, self.weights, self.keys, self.table, self.sequence_ids, self.visible
        lengths = {"query_lengths": self.query_lengths, "longest": self.length}
        return index_topk(*operands, self.topk, self.budget, **lengths)

    def check(self, count: int) -> None:
        """Some tokens' choices against the reference's. Sums have other orders, so scores are compared."""
        tokens = torch.linspace(0, len(self.query) - 1, count, device=self.query.device).long().unique()
        chosen = self.select()[tokens]
        operands = self.query[tokens], self.weights[tokens], self.keys, self.table
        expected = index_topk_reference(*operands, self.sequence_ids[tokens], self.visible[tokens], self.topk)
        for token, ours, best in zip(tokens, chosen, expected, strict=True):
            if not torch.equal(ours >= 0, best >= 0):
                raise WrongResult(f"token {int(token)} has another number of positions than it should")
            ours, best = ours[ours >= 0], best[best >= 0]
            if not ((ours.diff() > 0).all() and (ours < self.visible[token]).all()):
                raise WrongResult(f"token {int(token)} has positions out of order or out of its sight")
            scores, wanted = (self._scores(token, positions).sort().values for positions in (ours, best))
            if not torch.allclose(scores, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max())):
                raise WrongResult(f"token {int(token)} has positions whose scores are not the best")

    def _scores(self, token: Tensor, positions: Tensor) -> Tensor:
        """The scores of some positions in float32."""
        rows = self.table.rows(self.sequence_ids[token, None], positions[None])[0]
        products = self.query[token].float() @ decode_index_rows(self.keys, rows, self.table.page_size).T
        return self.weights[token] @ products.relu()
