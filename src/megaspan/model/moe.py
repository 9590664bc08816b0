"""Mixture of experts with sigmoid routing and a bias that balances the load (DeepSeek-V3, section 2.1.2)."""

import torch
from torch import Tensor, nn

from megaspan.config import ModelConfig
from megaspan.model.layers import MLP
from megaspan.model.observe import Observer, RoutingSeen
from megaspan.ops.moe import moe
from megaspan.ops.router import route


class Router(nn.Module):
    """Chooses experts by sigmoid(W x) + bias, weighs them by sigmoid(W x). All in float32."""

    invariant = False

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.topk, self.scaling = config.num_experts_per_tok, config.routed_scaling_factor
        self.normalise = config.norm_topk_prob
        self.weight = nn.Parameter(
            torch.zeros(config.n_routed_experts, config.hidden_size, dtype=torch.float32)
        )
        self.e_score_correction_bias = nn.Buffer(torch.zeros(config.n_routed_experts, dtype=torch.float32))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [T, D] → expert ids [T, k] int64, expert weights [T, k] float32."""
        bias = self.e_score_correction_bias
        return route(
            hidden, self.weight, bias, self.topk, self.normalise, self.scaling, invariant=self.invariant
        )


class Experts(nn.Module):
    """The routed experts' weights, stacked: gate_up_proj [E, 2I, D], down_proj [E, D, I]."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        experts, hidden, inner = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, inner))


class MoE(nn.Module):
    """Routed experts plus a shared expert that every token passes through."""

    invariant = False

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config)
        self.shared_experts = MLP(config.hidden_size, config.moe_intermediate_size * config.n_shared_experts)

    def forward(self, hidden: Tensor, observe: Observer | None = None) -> Tensor:
        expert_ids, weights = self.gate(hidden)
        if observe is not None:
            observe(RoutingSeen(self.gate, expert_ids))
        projections = self.experts.gate_up_proj, self.experts.down_proj
        routed = moe(hidden, expert_ids, weights, *projections, invariant=self.invariant)
        return routed + self.shared_experts(hidden)
