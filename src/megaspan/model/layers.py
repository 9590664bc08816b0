"""Small layers: RMS norm, rotary embedding, SwiGLU."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension; the root mean square in float32."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        # Apart from the norm: the fused backward of the weight is slow, and transformers rounds here too.
        return F.rms_norm(hidden, self.weight.shape, eps=self.eps) * self.weight


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class Rotation:
    """Rotary position embedding (RoFormer, section 3.2) of the positions of one batch.

    Interleaved: dimensions 2j and 2j + 1 form a pair. Angles are taken in float64, because a float32
    product is off by 0.01 rad at position 1,000,000.
    """

    def __init__(self, positions: Tensor, width: int, theta: float):
        exponents = torch.arange(0, width, 2, dtype=torch.float32, device=positions.device) / width
        angles = positions.double()[:, None] * (1.0 / theta**exponents).double()  # [T, width / 2]
        self.cos, self.sin = angles.cos().float(), angles.sin().float()

    def __call__(self, states: Tensor) -> Tensor:
        """Rotate [T, width] or [T, heads, width], keeping its dtype."""
        shape = (len(self.cos), *(1,) * (states.dim() - 2), -1)
        cos, sin = self.cos.view(shape), self.sin.view(shape)
        even, odd = states.float().unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2).to(states.dtype)
