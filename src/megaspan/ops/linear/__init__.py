"""Products with weight matrices, and the norm between them: PyTorch's for many tokens, compiled for few.

`invariant` asks for numbers of a token that have the same bits whatever the other tokens of the call are and
however many. The compiled versions are like that for any number of tokens; where there is none, PyTorch's own
operation, which is the reference, gets one token at a time.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megaspan.ops.linear import native

__all__ = ["each_token", "head_combine", "head_linear", "linear", "rms_norm"]


def linear(states: Tensor, weight: Tensor, *, invariant: bool = False) -> Tensor:
    """states [T, I] times weight [O, I] transposed → [T, O], fp32 or bf16, summed in fp32."""
    if native.can_take(states, weight) if invariant else native.supports(states, weight):
        return native.linear_native(states, weight)
    return each_token(F.linear, states, weight) if invariant else F.linear(states, weight)


def head_linear(states: Tensor, weights: Tensor, *, invariant: bool = False) -> Tensor:
    """For each head: states [T, H, I] times weights [H, O, I] transposed → [T, H, O]."""
    if native.can_take(states, weights) if invariant else native.supports(states, weights):
        return native.head_linear_native(states, weights)
    return each_token(_bmm, states, weights.mT) if invariant else _bmm(states, weights.mT)


def head_combine(states: Tensor, weights: Tensor, *, invariant: bool = False) -> Tensor:
    """For each head: states [T, H, I] times weights [H, I, O] → [T, H, O]."""
    if native.can_take(states, weights) if invariant else native.supports(states, weights):
        return native.head_combine_native(states, weights)
    return each_token(_bmm, states, weights) if invariant else _bmm(states, weights)


def rms_norm(states: Tensor, weight: Tensor, eps: float, *, invariant: bool = False) -> Tensor:
    """states [T, D] / rms * weight [D]; the root mean square in fp32, its quotient rounded before the weight.

    Weighing apart from the norm is what transformers does, and the fused backward pass is slower.
    """
    if (invariant or states.shape[0] <= native.FEW_TOKENS) and native.can_take(states, weight):
        return native.rms_norm_native(states, weight, eps)

    def norm(states: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(states, weight.shape, eps=eps) * weight

    return each_token(norm, states, weight) if invariant else norm(states, weight)


def each_token(operation: Callable[..., Tensor], states: Tensor, *operands: Tensor) -> Tensor:
    """operation(states [T, ...], *operands) computed for one token at a time, so that all have one shape.

    Each token is copied to fresh memory: kernels choose by alignment as well as by shape.
    """
    if not len(states):
        return operation(states, *operands)
    return torch.cat([operation(token.clone(), *operands) for token in states.split(1)])


def _bmm(states: Tensor, matrices: Tensor) -> Tensor:
    """states [T, H, I], matrices [H, I, O] → [T, H, O]."""
    return torch.bmm(states.transpose(0, 1), matrices).transpose(0, 1)
