"""The lightning indexer: which positions are worth attending to (DeepSeek-V3.2, section 2.1)."""

import torch
from torch import Tensor, nn

from megaspan.config import ModelConfig
from megaspan.model.forward_pass import ForwardPass
from megaspan.model.layers import Linear, Rotation
from megaspan.model.selection import Selection
from megaspan.ops.budget import working_memory
from megaspan.ops.index_topk import index_topk
from megaspan.ops.linear import linear_float32
from megaspan.ops.quant import quantize_index_queries
from megaspan.ops.write_rows import IndexProjection

K_NORM_EPS = 1e-6  # fixed in every implementation, whatever rms_norm_eps says


class Indexer(nn.Module):
    """Scores s ≤ t by I(t, s) = Σ_j w(t, j) · ReLU(q(t, j) · k(s)) and keeps the `index_topk` best.

    Its inputs are cut from the graph: the indexer learns from its own loss only.
    """

    invariant = False

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.heads, self.width, self.rope_width = (
            config.index_n_heads,
            config.index_head_dim,
            config.qk_rope_head_dim,
        )
        self.topk = config.index_topk
        self.wq_b = Linear(config.q_lora_rank, self.heads * self.width)
        self.wk = Linear(config.hidden_size, self.width)
        self.k_norm = nn.LayerNorm(self.width, eps=K_NORM_EPS)
        self.weights_proj = Linear(config.hidden_size, self.heads)

    def new_keys(self, hidden: Tensor, rotation: Rotation) -> IndexProjection:
        """hidden [T, D] → index keys [T, index_head_dim], one for all heads."""
        norm = self.k_norm
        projected = self.wk(hidden.detach())
        return IndexProjection(projected, norm.weight, norm.bias, norm.eps, rotation.turns, self.invariant)

    def keys(self, hidden: Tensor, rotation: Rotation) -> Tensor:
        """The same as they are scored, [T, index_head_dim]."""
        return self.new_keys(hidden, rotation).rows

    def queries(self, hidden: Tensor, query_latent: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """hidden [T, D], query latent [T, q_lora_rank] → queries [T, heads, width], fp32 weights [T, heads].

        The scales of the heads and of the dot products are folded into the weights; ReLU commutes
        with them. bf16 weights would reorder near ties, so their sums stay in float32.
        """
        query = self.wq_b(query_latent.detach()).view(-1, self.heads, self.width)
        scale = self.heads**-0.5 * self.width**-0.5
        weights = linear_float32(hidden.detach(), self.weights_proj.weight, invariant=self.invariant)
        return rotation(query), weights * scale

    def forward(
        self,
        hidden: Tensor,
        query_latent: Tensor,
        keys: Tensor,
        forward_pass: ForwardPass,
    ) -> Selection:
        """Select for each of the T tokens among the cached index keys [N, width], or FP8 rows of them."""
        batch, table = forward_pass.batch, forward_pass.table
        with torch.no_grad():
            query, weights = self.queries(hidden, query_latent, forward_pass.rotation)
            if keys.dtype == torch.uint8:  # FP8 rows
                query, weights = quantize_index_queries(query, weights, forward_pass.cache.rotates_index)
            else:
                query = query.to(keys.dtype)
            positions = index_topk(
                query,
                weights,
                keys,
                table,
                batch.sequence_ids,
                batch.visible,
                self.topk,
                working_memory(keys.device),
                query_lengths=batch.query_lengths,
                longest=batch.longest,
            )
            return Selection(positions, table.rows(batch.sequence_ids, positions))
