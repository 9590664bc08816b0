"""Even out the experts' load by moving the routers' bias (DeepSeek-V3, section 2.1.2), without a loss."""

import torch
from torch import Tensor

from megaspan.model.moe import Router
from megaspan.model.observe import AttentionSeen, RoutingSeen


class LoadBalance:
    """Watches forward passes (as their observer) and counts the tokens that each expert was given."""

    def __init__(self, rate: float):
        self.rate = rate
        self.counts: dict[Router, Tensor] = {}

    def __call__(self, seen: AttentionSeen | RoutingSeen) -> None:
        if isinstance(seen, RoutingSeen):
            experts = len(seen.router.e_score_correction_bias)
            counted = torch.bincount(seen.expert_ids.flatten(), minlength=experts)
            self.counts[seen.router] = self.counts.get(seen.router, torch.zeros_like(counted)) + counted

    @torch.no_grad()
    def step(self) -> Tensor:
        """Raise the bias of experts below the mean load, lower it above; return the largest load ÷ mean."""
        worst = torch.ones(())
        for router, count in self.counts.items():
            load = count.float()
            router.e_score_correction_bias.add_(self.rate * (load.mean() - load).sign())
            worst = torch.maximum(worst.to(load.device), load.max() / load.mean())
        self.counts.clear()
        return worst
