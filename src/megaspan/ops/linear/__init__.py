"""Products with weight matrices, and the norm between them: PyTorch's for many tokens, compiled for few.

Beside each fast version the reference is PyTorch's own operation.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from megaspan.ops.linear import native

__all__ = ["head_combine", "head_linear", "linear", "rms_norm"]


def linear(states: Tensor, weight: Tensor) -> Tensor:
    """states [T, I] times weight [O, I] transposed → [T, O], fp32 or bf16, summed in fp32."""
    return (
        native.linear_native(states, weight) if native.supports(states, weight) else F.linear(states, weight)
    )


def head_linear(states: Tensor, weights: Tensor) -> Tensor:
    """For each head: states [T, H, I] times weights [H, O, I] transposed → [T, H, O]."""
    if native.supports(states, weights):
        return native.head_linear_native(states, weights)
    return torch.bmm(states.transpose(0, 1), weights.mT).transpose(0, 1)


def head_combine(states: Tensor, weights: Tensor) -> Tensor:
    """For each head: states [T, H, I] times weights [H, I, O] → [T, H, O]."""
    if weights.shape[2] <= native.WIDEST and native.supports(states, weights):
        return native.head_combine_native(states, weights)
    return torch.bmm(states.transpose(0, 1), weights).transpose(0, 1)


def rms_norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """states [T, D] / rms * weight [D]; the root mean square in fp32, its quotient rounded before the weight.

    Weighing apart from the norm is what transformers does, and the fused backward pass is slower.
    """
    if states.shape[0] <= native.FEW_TOKENS and native.can_take(states, weight):
        return native.rms_norm_native(states, weight, eps)
    return F.rms_norm(states, weight.shape, eps=eps) * weight
