"""Attention over random selections of cached latent rows: prefill, decoding, and training."""

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch
from torch import Tensor

from megaspan.bench.kernels import inputs, peers
from megaspan.bench.kernels.registry import Case, Scale, Trial, operation, require_close, size
from megaspan.costs.memory import latent_row_bytes
from megaspan.ops.budget import working_memory
from megaspan.ops.sparse_mla import sparse_mla, sparse_mla_reference

TOLERANCE = 1e-2  # of bf16 operands against float32 arithmetic


@operation("sparse_mla")
def sparse_mla_cases(scale: Scale) -> Iterator[Case]:
    config, topk = scale.config, scale.config.index_topk
    both_products = config.latent_width + config.kv_lora_rank
    for length, fp8 in product(scale.contexts, (False, True)):
        name = f"sparse_mla prefill, {scale.queries} queries, {size(length)} {_rows(fp8)} rows"
        yield _case(scale, name, scale.queries, length, fp8, both_products)
    longest = scale.contexts[-1]
    for batch, tokens in (*((batch, 1) for batch in (*scale.batches, 2 * scale.batches[-1])), (1, 2)):
        name = f"sparse_mla decode, batch {batch}, FP8 rows" + (f", {tokens} tokens each" * (tokens > 1))
        yield _case(scale, name, batch * tokens, longest, True, both_products, decode=True)
    # Training: the scores and probabilities anew, then the gradients of probabilities, queries and rows.
    backward = 2 * config.latent_width + config.kv_lora_rank + both_products
    yield Case(
        name=f"sparse_mla forward and backward, {scale.queries} queries, {size(scale.contexts[0])} rows",
        make=partial(_make_training, scale, scale.queries, scale.contexts[0]),
        unit="TFLOP/s",
        flops=2 * scale.queries * config.num_attention_heads * topk * (both_products + backward),
        nbytes=4 * (scale.queries * config.num_attention_heads + scale.contexts[0]) * config.latent_width,
        shows_memory=True,
    )


def _case(
    scale: Scale, name: str, tokens: int, length: int, fp8: bool, products: int, decode: bool = False
) -> Case:
    config, heads = scale.config, scale.config.num_attention_heads
    row_bytes = latent_row_bytes(config, "fp8" if fp8 else "bfloat16")
    reads = min(length, tokens * config.index_topk) * row_bytes
    query_and_output = 2 * tokens * heads * products
    return Case(
        name=name,
        make=partial(_make, scale, tokens, length, fp8, decode),
        unit="µs" if decode else "ms",
        flops=2 * tokens * heads * config.index_topk * products,
        nbytes=reads + query_and_output + 8 * tokens * config.index_topk,
        decode=decode,
    )


def _rows(fp8: bool) -> str:
    return "FP8" if fp8 else "bf16"


class Attending:
    """Some tokens attend to random rows of a cache of `length`."""

    def __init__(
        self,
        scale: Scale,
        tokens: int,
        rows: Tensor,
        decode: bool = False,
        dtype: torch.dtype = torch.bfloat16,
    ):
        config = scale.config
        self.decode, self.fp8, self.rows = decode, rows.dtype == torch.uint8, rows
        self.scale, self.value_width = config.qk_head_dim**-0.5, config.kv_lora_rank
        shape = tokens, config.num_attention_heads, config.latent_width
        self.query = inputs.normal(shape, rows.device, dtype)
        self.selected = inputs.selected_rows(tokens, len(rows), config.index_topk, rows.device)
        self.budget = working_memory(rows.device)

    def attend(self) -> Tensor:
        operands = self.query, self.rows, self.selected
        return sparse_mla(*operands, self.value_width, self.scale, self.budget)

    def check(self, count: int) -> None:
        """Some tokens' outputs against the reference's."""
        tokens = torch.linspace(0, len(self.query) - 1, count, device=self.query.device).long().unique()
        numbers = self.selected[tokens]
        rows = self.rows[numbers.flatten()]  # only those: the reference decodes all it is given
        places = torch.arange(numbers.numel(), device=rows.device).view(numbers.shape)
        expected = sparse_mla_reference(
            self.query[tokens].float(), rows, places, self.value_width, self.scale
        )
        require_close(self.attend()[tokens], expected, TOLERANCE)

    def train(self) -> tuple[Tensor, ...]:
        """The output's gradients with regard to the queries and the rows."""
        output = self.attend()
        return torch.autograd.grad(output, (self.query, self.rows), self.upstream)

    def to_be_trained(self) -> "Attending":
        self.query.requires_grad_()
        self.rows.requires_grad_()
        shape = *self.query.shape[:2], self.value_width
        self.upstream = inputs.normal(shape, self.rows.device, self.query.dtype)
        return self


def _make(scale: Scale, tokens: int, length: int, fp8: bool, decode: bool, device: torch.device) -> Trial:
    config = scale.config
    rows = inputs.latent_rows(length, config.kv_lora_rank, config.qk_rope_head_dim, device, fp8)
    copies = scale.copies(tokens * config.index_topk * rows[0].nbytes) if decode else 1
    made = [Attending(scale, tokens, rows, decode) for _ in range(copies)]
    first = made[0]
    return Trial([one.attend for one in made], partial(first.check, scale.sampled), peers.sparse_mla(made))


def _make_training(scale: Scale, tokens: int, length: int, device: torch.device) -> Trial:
    config = scale.config
    rows = inputs.latent_rows(length, config.kv_lora_rank, config.qk_rope_head_dim, device, fp8=False)
    made = Attending(scale, tokens, rows).to_be_trained()
    return Trial([made.train], partial(_check_training, scale, device))


def _check_training(scale: Scale, device: torch.device) -> None:
    """Gradients at a size that can be held densely, in float32: through the scores of all the rows."""
    config, count = scale.config, 2 * scale.config.index_topk
    rows = inputs.latent_rows(count, config.kv_lora_rank, config.qk_rope_head_dim, device, fp8=False)
    made = Attending(scale, 8, rows).to_be_trained()
    query, all_rows = (part.detach().float().requires_grad_() for part in (made.query, made.rows))
    chosen = torch.zeros(len(query), count, dtype=torch.bool, device=device).scatter_(1, made.selected, True)
    scores = made.scale * torch.einsum("thw,nw->thn", query, all_rows)
    output = scores.masked_fill(~chosen[:, None], -torch.inf).softmax(-1) @ all_rows[:, : made.value_width]
    expected = torch.autograd.grad(output, (query, all_rows), made.upstream.float())
    for actual, wanted in zip(made.train(), expected, strict=True):
        require_close(actual, wanted, 3 * TOLERANCE)
