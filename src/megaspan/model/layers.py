"""Small layers: RMS norm, rotary embedding, SwiGLU.

A layer whose `invariant` is set gives a token the same bits whatever tokens share the call.
"""

import torch
from torch import Tensor, nn

from megaspan.ops.linear import add_rms_norm, linear, rms_norm
from megaspan.ops.moe import swiglu
from megaspan.ops.rotation import rotate, turns


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension; the root mean square in float32."""

    invariant = False

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        return rms_norm(hidden, self.weight, self.eps, invariant=self.invariant)

    def after_adding(self, hidden: Tensor, addend: Tensor) -> tuple[Tensor, Tensor]:
        """hidden + addend, and the norm of that."""
        return add_rms_norm(hidden, addend, self.weight, self.eps, invariant=self.invariant)


class Linear(nn.Linear):
    """A linear layer without bias on states [T, inputs]."""

    invariant = False

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, invariant=self.invariant)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    invariant = False

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size)
        self.up_proj = Linear(hidden_size, intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        projections = self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight
        return swiglu(hidden, *projections, invariant=self.invariant)


class Rotation:
    """Rotary position embedding of the positions of one batch; see `megaspan.ops.rotation`."""

    def __init__(self, positions: Tensor, width: int, theta: float, invariant: bool = False):
        self.turns, self.invariant = turns(positions, width, theta, invariant=invariant), invariant

    def __call__(self, states: Tensor) -> Tensor:
        """Rotate the first `width` dimensions of [T, W] or [T, heads, W]; keep the others and the dtype."""
        return rotate(states, self.turns, invariant=self.invariant)
