"""Products with weight matrices, and the norm between them: PyTorch's, on a CPU compiled ones for few tokens.

`invariant` asks for numbers of a token that have the same bits whatever the other tokens of the call are and
however many. The compiled versions are like that for any number of tokens; where there is none, PyTorch's own
operation, which is the reference, gets one token at a time.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megaspan.ops.linear import native

__all__ = [
    "add_rms_norm",
    "each_token",
    "gate_up",
    "head_combine",
    "head_linear",
    "linear",
    "linear_float32",
    "rms_norm",
]


def linear(states: Tensor, weight: Tensor, *, invariant: bool = False) -> Tensor:
    """states [T, I] times weight [O, I] transposed → [T, O], fp32 or bf16, summed in fp32."""
    if invariant and _on_gpu(states, weight):
        from megaspan.ops.linear import gpu

        return gpu.linear_gpu(states, weight)
    if native.can_take(states, weight) if invariant else native.supports(states, weight):
        return native.linear_native(states, weight)
    return each_token(F.linear, states, weight) if invariant else F.linear(states, weight)


def linear_float32(states: Tensor, weight: Tensor, *, invariant: bool = False) -> Tensor:
    """As `linear`, but [T, O] in fp32: the sums are not rounded to bf16."""
    if _on_gpu(states, weight):
        from megaspan.ops.linear import gpu

        if invariant:
            return gpu.linear_gpu(states, weight, torch.float32)
        return torch.mm(states, weight.T, out_dtype=torch.float32)
    return linear(states.float(), weight.float(), invariant=invariant)


def gate_up(states: Tensor, gate: Tensor, up: Tensor, *, invariant: bool = False) -> Tensor:
    """silu of states [T, D] times gate [I, D] transposed, times those of up [I, D] → [T, I]."""
    if invariant and _on_gpu(states, gate, up):
        from megaspan.ops.linear import gpu

        return gpu.gate_up_gpu(states, gate, up)
    return F.silu(linear(states, gate, invariant=invariant)) * linear(states, up, invariant=invariant)


def head_linear(states: Tensor, weights: Tensor, *, invariant: bool = False) -> Tensor:
    """For each head: states [T, H, I] times weights [H, O, I] transposed → [T, H, O]."""
    if invariant and _on_gpu(states, weights):
        from megaspan.ops.linear import gpu

        return gpu.head_linear_gpu(states, weights)
    if native.can_take(states, weights) if invariant else native.supports(states, weights):
        return native.head_linear_native(states, weights)
    return each_token(_bmm, states, weights.mT) if invariant else _bmm(states, weights.mT)


def head_combine(states: Tensor, weights: Tensor, *, invariant: bool = False) -> Tensor:
    """For each head: states [T, H, I] times weights [H, I, O] → [T, H, O]."""
    if invariant and _on_gpu(states, weights):
        from megaspan.ops.linear import gpu

        return gpu.head_combine_gpu(states, weights)
    if native.can_take(states, weights) if invariant else native.supports(states, weights):
        return native.head_combine_native(states, weights)
    return each_token(_bmm, states, weights) if invariant else _bmm(states, weights)


def rms_norm(states: Tensor, weight: Tensor, eps: float, *, invariant: bool = False) -> Tensor:
    """states [T, D] / rms * weight [D]; the root mean square in fp32, its quotient rounded before the weight.

    Weighing apart from the norm is what transformers does, and the fused backward pass is slower.
    """
    if states.is_cuda:
        from megaspan.ops.linear import gpu_norm

        if gpu_norm.can_take(states, weight):
            return gpu_norm.rms_norm_gpu(states, weight, eps)
    if (invariant or states.shape[0] <= native.FEW_TOKENS) and native.can_take(states, weight):
        return native.rms_norm_native(states, weight, eps)

    def norm(states: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(states, weight.shape, eps=eps) * weight

    return each_token(norm, states, weight) if invariant else norm(states, weight)


def add_rms_norm(
    states: Tensor, addend: Tensor, weight: Tensor, eps: float, *, invariant: bool = False
) -> tuple[Tensor, Tensor]:
    """states [T, D] + addend [T, D], and the `rms_norm` of that: on a GPU in one pass, with the same bits."""
    if states.is_cuda:
        from megaspan.ops.linear import gpu_norm

        if gpu_norm.can_take(states, addend, weight):
            return gpu_norm.add_rms_norm_gpu(states, addend, weight, eps)
    total = states + addend
    return total, rms_norm(total, weight, eps, invariant=invariant)


def each_token(operation: Callable[..., Tensor], states: Tensor, *operands: Tensor) -> Tensor:
    """operation(states [T, ...], *operands) computed for one token at a time, so that all have one shape.

    Each token is copied to fresh memory: kernels choose by alignment as well as by shape.
    """
    if not len(states):
        return operation(states, *operands)
    return torch.cat([operation(token.clone(), *operands) for token in states.split(1)])


def _on_gpu(states: Tensor, *weights: Tensor) -> bool:
    """Whether the kernels for a GPU take these operands."""
    if not states.is_cuda:
        return False
    from megaspan.ops.linear import gpu

    return gpu.can_take(states, *weights)


def _bmm(states: Tensor, matrices: Tensor) -> Tensor:
    """states [T, H, I], matrices [H, I, O] → [T, H, O]."""
    return torch.bmm(states.transpose(0, 1), matrices).transpose(0, 1)
