"""What a caller may watch during a forward pass: losses and statistics that look inside the layers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from megaspan.model.layers import Rotation

if TYPE_CHECKING:
    from megaspan.model.attention import Attention
    from megaspan.model.moe import Router


@dataclass(frozen=True)
class AttentionSeen:
    """One attention layer's inputs."""

    attention: "Attention"
    hidden: Tensor  # [T, D], normalised
    query_latent: Tensor  # [T, q_lora_rank]
    query_nope: Tensor  # [T, H, nope]
    query_rope: Tensor  # [T, H, rope], rotated
    rows: Tensor  # [N, W], all the latent rows it can read
    rotation: Rotation


@dataclass(frozen=True)
class RoutingSeen:
    """One mixture-of-experts layer's choice."""

    router: "Router"
    expert_ids: Tensor  # [T, k]


Observer = Callable[[AttentionSeen | RoutingSeen], None]
