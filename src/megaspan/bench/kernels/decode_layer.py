"""What one full layer does with the cache in a decoding step: scores, choice, row numbers, attention."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from megaspan.bench.kernels import inputs
from megaspan.bench.kernels.index_topk import Selecting
from megaspan.bench.kernels.registry import Case, Scale, Trial, operation, require_close, size
from megaspan.bench.kernels.sparse_mla import TOLERANCE
from megaspan.costs.memory import index_row_bytes, latent_row_bytes
from megaspan.ops.sparse_mla import sparse_mla, sparse_mla_reference


@operation("decode_layer")
def decode_layer_cases(scale: Scale) -> Iterator[Case]:
    config = scale.config
    for length in scale.contexts:
        for batch in scale.batches:
            index, latent = index_row_bytes(config, "fp8"), latent_row_bytes(config, "fp8")
            yield Case(
                name=f"one full layer's decode, batch {batch} at {size(length)}",
                make=partial(_make, scale, batch, length),
                unit="µs",
                nbytes=batch * (length * index + min(length, config.index_topk) * latent),
                decode=True,
            )


class Layer:
    """A token of each of some sequences selects among its keys, then attends to what it selected."""

    def __init__(self, scale: Scale, selecting: Selecting, rows: Tensor):
        config = scale.config
        self.selecting, self.rows = selecting, rows
        self.value_width, self.scale = config.kv_lora_rank, config.qk_head_dim**-0.5
        shape = len(selecting.query), config.num_attention_heads, config.latent_width
        self.query = inputs.normal(shape, rows.device)

    def selected(self) -> Tensor:
        """[T, K] int64 row numbers."""
        one = self.selecting
        return one.table.rows(one.sequence_ids, one.select())

    def step(self) -> Tensor:
        operands = self.query, self.rows, self.selected()
        return sparse_mla(*operands, self.value_width, self.scale, self.selecting.budget)

    def check(self, count: int) -> None:
        self.selecting.check(count)
        numbers = self.selected()[:count]
        places = torch.arange(numbers.numel(), device=numbers.device).view(numbers.shape)
        places = places.where(numbers >= 0, -1)
        rows = self.rows[numbers.clamp(min=0).flatten()]
        expected = sparse_mla_reference(
            self.query[:count].float(), rows, places, self.value_width, self.scale
        )
        require_close(self.step()[:count], expected, TOLERANCE)


def _make(scale: Scale, batch: int, length: int, device: torch.device) -> Trial:
    config = scale.config
    copies = scale.copies(batch * length * index_row_bytes(config, "fp8"))
    made = []
    for _ in range(copies):
        selecting = Selecting(scale, batch, 1, length, device)
        count = inputs.row_count(selecting.table)
        ranks = config.kv_lora_rank, config.qk_rope_head_dim
        made.append(Layer(scale, selecting, inputs.latent_rows(count, *ranks, device, fp8=True)))
    return Trial([one.step for one in made], partial(made[0].check, scale.sampled))
