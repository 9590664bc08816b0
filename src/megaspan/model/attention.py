"""Multi-head latent attention in its absorbed form: query, rows, selection (DeepSeek-V2, section 2.1)."""

import torch
from torch import Tensor, nn

from megaspan.config import ModelConfig
from megaspan.model.batch import Batch
from megaspan.model.forward_pass import ForwardPass
from megaspan.model.indexer import Indexer
from megaspan.model.layers import Linear, RMSNorm, Rotation
from megaspan.model.observe import AttentionSeen
from megaspan.model.selection import Everything, Selection
from megaspan.ops.budget import working_memory
from megaspan.ops.dense_attention import dense_attention
from megaspan.ops.linear import head_combine, head_linear
from megaspan.ops.quant import decode_latent_rows
from megaspan.ops.rows import RowTable
from megaspan.ops.sparse_mla import sparse_mla, visible_mla
from megaspan.ops.write_rows import LatentProjection


class Attention(nn.Module):
    """Reads the rows that a selection names. A full layer makes the selection, a shared one is handed it."""

    invariant = False

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.heads, self.nope_width, self.rope_width = (
            config.num_attention_heads,
            config.qk_nope_head_dim,
            config.qk_rope_head_dim,
        )
        self.value_width, self.latent_rank = config.v_head_dim, config.kv_lora_rank
        self.scale = config.qk_head_dim**-0.5
        self.q_a_proj = Linear(config.hidden_size, config.q_lora_rank)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.rms_norm_eps)
        self.q_b_proj = Linear(config.q_lora_rank, self.heads * config.qk_head_dim)
        self.kv_a_proj_with_mqa = Linear(config.hidden_size, config.latent_width)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, config.rms_norm_eps)
        self.kv_b_proj = Linear(config.kv_lora_rank, self.heads * (self.nope_width + self.value_width))
        self.o_proj = Linear(self.heads * self.value_width, config.hidden_size)
        self.indexer = Indexer(config) if config.indexer_types[layer] == "full" else None

    def forward(
        self,
        hidden: Tensor,
        selection: Selection | Everything | None,
        forward_pass: ForwardPass,
    ) -> tuple[Tensor, Selection | Everything | None]:
        """hidden [T, D] → output [T, D] and the selection that the next shared layer is handed."""
        batch, cache, rotation = forward_pass.batch, forward_pass.cache, forward_pass.rotation
        query_latent = self.q_a_layernorm(self.q_a_proj(hidden))
        query_nope, query_rope = (
            self.q_b_proj(query_latent)
            .view(-1, self.heads, self.nope_width + self.rope_width)
            .split((self.nope_width, self.rope_width), dim=-1)
        )
        query_rope = rotation(query_rope)
        new = self.new_rows(hidden, rotation)
        rows = cache.write_latent(self.layer, batch, new)
        if self.indexer is not None:
            # Keys are written even when nothing is scored: a later token may look back at them.
            keys = cache.write_index(self.layer, batch, self.indexer.new_keys(hidden, rotation))
            if not isinstance(selection, Everything):
                selection = self.indexer(hidden, query_latent, keys, forward_pass)
        if forward_pass.observe is not None:
            forward_pass.observe(
                AttentionSeen(self, hidden, query_latent, query_nope, query_rope, rows, rotation)
            )
        if isinstance(selection, Everything) and not self.invariant:
            query = torch.cat((query_nope, query_rope), dim=-1)
            in_order = rows if rows is new.rows else self._visible(rows, forward_pass.table, batch, query)
            values = self._attend_everything(query, in_order, batch)
        elif selection is not None:
            latent = self._attend(self.absorb(query_nope, query_rope), rows, selection, forward_pass)
            values = head_linear(latent, self._kv_b()[:, self.nope_width :], invariant=self.invariant)
        else:
            raise ValueError(f"layer {self.layer} is shared, but no selection was handed to it")
        return self.o_proj(values.flatten(1)), selection

    def new_rows(self, hidden: Tensor, rotation: Rotation) -> LatentProjection:
        """hidden [T, D] → latent rows [T, W]: the normed latent, then the rotated key shared by the heads."""
        norm = self.kv_a_layernorm
        projected = self.kv_a_proj_with_mqa(hidden)
        return LatentProjection(projected, norm.weight, norm.eps, rotation.turns, self.invariant)

    def absorb(self, query_nope: Tensor, query_rope: Tensor) -> Tensor:
        """[T, H, nope], [T, H, rope] → [T, H, W]: queries that meet the latent rows directly."""
        latent = head_combine(query_nope, self._kv_b()[:, : self.nope_width], invariant=self.invariant)
        return torch.cat((latent, query_rope), dim=-1)

    def expand(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Latent rows [N, W] → keys [N, H, nope + rope] and values [N, H, v] of every head."""
        latent, key_rope = rows.split((self.latent_rank, self.rope_width), dim=-1)
        keys_values = self.kv_b_proj(latent).unflatten(-1, (self.heads, -1))
        key_nope, values = keys_values.split((self.nope_width, self.value_width), dim=-1)
        return torch.cat((key_nope, key_rope[:, None].expand(-1, self.heads, -1)), dim=-1), values

    def _visible(self, rows: Tensor, table: RowTable, batch: Batch, query: Tensor) -> Tensor:
        """Cached rows [N, ...] → [L, W] in the query's dtype: those of every sequence in order.

        A cache may keep them anywhere, and in FP8.
        """
        device = table.starts.device
        places = [
            table.rows(torch.full((1,), slot, device=device), torch.arange(length, device=device)[None])
            for slot, length in zip(batch.table_rows, batch.total_lengths, strict=True)
        ]
        in_order = rows[torch.cat(places, dim=1)[0]]
        if in_order.dtype == torch.uint8:
            return decode_latent_rows(in_order, self.latent_rank, self.rope_width, query.dtype)
        return in_order.to(query.dtype)

    def _attend(
        self, query: Tensor, rows: Tensor, selection: Selection | Everything, forward_pass: ForwardPass
    ) -> Tensor:
        """Absorbed queries [T, H, W] and cached rows → latent values [T, H, latent]."""
        budget = working_memory(rows.device)
        if isinstance(selection, Selection):
            operands = query, rows, selection.rows, self.latent_rank, self.scale, budget
            return sparse_mla(*operands, invariant=self.invariant)
        # In batch-invariant mode attention has to add in the same order, dense or not.
        batch, table = forward_pass.batch, forward_pass.table
        places = table, batch.sequence_ids, batch.visible
        return visible_mla(query, rows, *places, self.latent_rank, self.scale, budget)

    def _attend_everything(self, query: Tensor, rows: Tensor, batch: Batch) -> Tensor:
        """Dense attention, cheaper than a selection of everything and equal to it."""
        key, value = self.expand(rows)
        return dense_attention(query, key, value, batch.query_lengths, batch.total_lengths, self.scale)

    def _kv_b(self) -> Tensor:
        """kv_b_proj's weight as [H, nope + v, latent]."""
        return self.kv_b_proj.weight.view(self.heads, -1, self.latent_rank)
