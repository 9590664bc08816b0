"""Rotary position embedding (RoFormer, section 3.2).

Interleaved: dimensions 2j and 2j + 1 are a complex number, turned by position · theta^(-2j / width).
Angles are taken in float64, because a float32 product is off by 0.01 rad at position 1,000,000.
"""

import functools

import torch
from torch import Tensor

from megaspan.ops.linear import each_token
from megaspan.ops.rotation import native
from megaspan.ops.rotation.reference import rotate_reference, turns_reference

__all__ = ["rotate", "rotate_reference", "turns", "turns_reference"]


def turns(positions: Tensor, width: int, theta: float, *, invariant: bool = False) -> Tensor:
    """positions [T] int64 → [T, 2, width] fp32: what `rotate` multiplies a token and its mirror image by.

    Of each pair of dimensions, the first row holds cos, cos and the second -sin, sin.
    invariant: a token's bits do not depend on the other tokens, as in `linear`.
    """
    frequencies = _frequencies(width, theta, positions.device)
    if positions.is_cuda:
        from megaspan.ops.rotation.gpu import turns_gpu

        return turns_gpu(positions, frequencies)
    if native.available(positions):
        return native.turns_native(positions, frequencies)
    if invariant:
        return each_token(turns_reference, positions, frequencies)
    return turns_reference(positions, frequencies)


def rotate(states: Tensor, turns: Tensor, *, invariant: bool = False) -> Tensor:
    """Rotate the first dimensions of states [T, W] or [T, H, W], as many as `turns` has; keep the others.

    fp32 or bf16, kept; computed in fp32. Differentiable in `states`.
    """
    tracked = torch.is_grad_enabled() and states.requires_grad
    if not tracked and states.is_cuda:
        from megaspan.ops.rotation import gpu

        if gpu.can_take(states):
            return gpu.rotate_gpu(states, turns)
    if not tracked and native.can_take(states):
        return native.rotate_native(states, turns)
    if not invariant or not len(states):
        return rotate_reference(states, turns)
    tokens = zip(states.split(1), turns.split(1), strict=True)
    return torch.cat([rotate_reference(token.clone(), turn) for token, turn in tokens])


@functools.cache  # and never forgotten: a CUDA graph may hold where it is
def _frequencies(width: int, theta: float, device: torch.device) -> Tensor:
    """[width / 2] fp64, of values that fp32 holds.

    From the CPU to any device: another power function's last bit is 0.03 rad at position 1,000,000.
    """
    exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
    return (1.0 / theta**exponents).double().to(device)
