"""The part of a forward pass whose time grows with the context, run alone on the operands of the pass.

That is, layer by layer: index scores and top-k where a layer selects, row numbers, sparse attention. The
projections around them are the same whichever layers select.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megaspan.cache.paged import PagedCache
from megaspan.model.attention import Attention
from megaspan.model.batch import Batch
from megaspan.model.observe import AttentionSeen, RoutingSeen
from megaspan.model.transformer import Transformer
from megaspan.ops.budget import working_memory
from megaspan.ops.index_topk import index_topk
from megaspan.ops.quant import quantize_index_queries
from megaspan.ops.rows import RowTable
from megaspan.ops.sparse_mla import sparse_mla


@dataclass(frozen=True)
class LayerPart:
    """One layer's operands. index: queries, their weights and the keys, where the layer selects."""

    attention: Attention
    query: Tensor  # [T, H, W], absorbed
    rows: Tensor
    index: tuple[Tensor, Tensor, Tensor] | None


@torch.inference_mode()
def attention_alone(model: Transformer, cache: PagedCache, batch: Batch) -> Callable[[], list[Tensor]]:
    """Run the batch once; return a call that does its attention again and gives each layer's output."""
    parts: list[LayerPart] = []
    table = cache.table(batch)

    def observe(seen: AttentionSeen | RoutingSeen) -> None:
        if isinstance(seen, AttentionSeen):
            parts.append(_part(seen, cache))

    model(batch, cache, observe=observe)
    return lambda: _attend(parts, table, batch)


def _part(seen: AttentionSeen, cache: PagedCache) -> LayerPart:
    attention, index = seen.attention, None
    if attention.indexer is not None:
        keys = cache.rows("index", attention.layer)
        query, weights = attention.indexer.queries(seen.hidden, seen.query_latent, seen.rotation)
        if keys.dtype == torch.uint8:
            query, weights = quantize_index_queries(query, weights, cache.rotates_index)
        index = query, weights, keys
    return LayerPart(attention, attention.absorb(seen.query_nope, seen.query_rope), seen.rows, index)


@torch.inference_mode()
def _attend(parts: list[LayerPart], table: RowTable, batch: Batch) -> list[Tensor]:
    outputs, numbers = [], None
    for part in parts:
        budget = working_memory(part.rows.device)
        if part.index is not None:
            topk = part.attention.indexer.topk  # pyright: ignore[reportOptionalMemberAccess]
            places = table, batch.sequence_ids, batch.visible, topk, budget
            known = {"query_lengths": batch.query_lengths, "longest": batch.longest}
            positions = index_topk(*part.index, *places, **known)
            numbers = table.rows(batch.sequence_ids, positions)
        assert numbers is not None  # the first layer selects
        attention = part.attention
        operands = part.query, part.rows, numbers, attention.latent_rank, attention.scale, budget
        outputs.append(sparse_mla(*operands))
    return outputs
