"""The compiled version of rotary embedding: a token's numbers never depend on the other tokens."""

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from megaspan.ops import native

WORTH_THREADS = 60_000  # with fewer numbers, waking a second thread takes longer than it saves


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = native.load(Path(__file__).with_name("kernel.c"))
    if library is not None:
        address, number, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
        library.turns.argtypes = [*[address] * 3, *[number] * 2]
        library.rotate.argtypes = [*[address] * 3, *[number] * 6, flag, flag]
        library.turns.restype = library.rotate.restype = None
    return library


def available(positions: Tensor) -> bool:
    """Whether the compiled version is here, and takes tensors where `positions` are."""
    return positions.is_cpu and _library() is not None


def can_take(states: Tensor) -> bool:
    """Whether the compiled version rotates these states, without gradients."""
    return (
        states.is_cpu
        and states.dtype in (torch.float32, torch.bfloat16)
        and states.stride(-1) == 1
        and _library() is not None
    )


def turns_native(positions: Tensor, frequencies: Tensor) -> Tensor:
    """positions [T] int64, frequencies [width / 2] fp64 → [T, 2, width] fp32."""
    library = _library()
    assert library is not None
    positions = positions.long().contiguous()
    tokens, pairs = len(positions), len(frequencies)
    output = torch.empty(tokens, 2, 2 * pairs)
    library.turns(positions.data_ptr(), frequencies.data_ptr(), output.data_ptr(), tokens, pairs)
    return output


def rotate_native(states: Tensor, turns: Tensor) -> Tensor:
    """states [T, W] or [T, H, W], turns [T, 2, rotary width] → the shape and dtype of `states`."""
    library = _library()
    assert library is not None
    heads = 1 if states.dim() == 2 else states.shape[1]
    tokens, width, rotary = states.shape[0], states.shape[-1], turns.shape[-1]
    if turns.shape != (tokens, 2, rotary) or rotary > width or turns.dtype != torch.float32:
        raise ValueError(f"states {list(states.shape)} and turns {list(turns.shape)} do not fit")
    turns, number = turns.contiguous(), states.element_size()
    output = torch.empty(states.shape, dtype=states.dtype)
    library.rotate(
        states.data_ptr(),
        turns.data_ptr(),
        output.data_ptr(),
        tokens,
        heads,
        width,
        rotary,
        states.stride(0) * number,
        states.stride(-2) * number,
        states.dtype == torch.bfloat16,
        torch.get_num_threads() if states.numel() > WORTH_THREADS else 1,
    )
    return output
