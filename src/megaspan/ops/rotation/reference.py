"""Rotary embedding in PyTorch: a product of complex numbers."""

import torch
from torch import Tensor


def turns_reference(positions: Tensor, frequencies: Tensor) -> Tensor:
    """positions [T] int64, frequencies [width / 2] fp64 → [T, 2, width] fp32; see `turns`."""
    angles = positions.double()[:, None] * frequencies
    cos, sin = angles.cos().float(), angles.sin().float()
    rows = torch.stack((cos, cos), -1).flatten(1), torch.stack((-sin, sin), -1).flatten(1)
    return torch.stack(rows, 1)


def rotate_reference(states: Tensor, turns: Tensor) -> Tensor:
    """See `rotate`."""
    width = turns.shape[-1]
    rotated, plain = states.split((width, states.shape[-1] - width), dim=-1)
    pairs = rotated.float().contiguous()
    if pairs.storage_offset() % 2:  # a complex number begins on an even place
        pairs = pairs.clone()
    turn = torch.complex(turns[:, 0, ::2], turns[:, 1, 1::2])
    pairs = torch.view_as_complex(pairs.view(*rotated.shape[:-1], width // 2, 2))
    turned = torch.view_as_real(pairs * (turn if states.dim() == 2 else turn[:, None]))
    turned = turned.reshape(rotated.shape).to(states.dtype)
    return torch.cat((turned, plain), dim=-1) if plain.shape[-1] else turned
