"""Small layers: RMS norm, rotary embedding, SwiGLU."""

import torch
from torch import Tensor, nn

from megaspan.ops.linear import linear, rms_norm
from megaspan.ops.moe import swiglu


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension; the root mean square in float32."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        return rms_norm(hidden, self.weight, self.eps)


class Linear(nn.Linear):
    """A linear layer without bias on states [T, inputs]."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size)
        self.up_proj = Linear(hidden_size, intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        return swiglu(hidden, self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight)


class Rotation:
    """Rotary position embedding (RoFormer, section 3.2) of the positions of one batch.

    Interleaved: dimensions 2j and 2j + 1 are a complex number, turned by position · theta^(-2j / width).
    Angles are taken in float64, because a float32 product is off by 0.01 rad at position 1,000,000.
    """

    def __init__(self, positions: Tensor, width: int, theta: float):
        exponents = torch.arange(0, width, 2, dtype=torch.float32, device=positions.device) / width
        angles = positions.double()[:, None] * (1.0 / theta**exponents).double()  # [T, width / 2]
        self.turn = torch.complex(angles.cos().float(), angles.sin().float())
        self.turn_heads = self.turn[:, None]

    def __call__(self, states: Tensor) -> Tensor:
        """Rotate [T, width] or [T, heads, width], keeping its dtype."""
        pairs = states.float().contiguous()
        if pairs.storage_offset() % 2:  # a complex number begins on an even place
            pairs = pairs.clone()
        pairs = torch.view_as_complex(pairs.view(*states.shape[:-1], -1, 2))
        turned = pairs * (self.turn if states.dim() == 2 else self.turn_heads)
        return torch.view_as_real(turned).view(states.shape).to(states.dtype)
