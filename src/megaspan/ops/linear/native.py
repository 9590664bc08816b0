"""The compiled versions of the linear operations, for the few tokens of a decoding step."""

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from megaspan.ops import native

FEW_TOKENS = 4  # with more, matrix products that read each weight once are faster
WORTH_THREADS = 60_000  # with fewer weights, waking a second thread takes longer than it saves
WIDEST = 1024  # outputs of `head_combine`


class _Call(ctypes.Structure):
    """The arguments of the C functions, in their order."""

    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("states", "weights", "output")],
        *[(name, ctypes.c_int64) for name in ("tokens", "heads", "inputs", "outputs")],
        *[(name, ctypes.c_int64) for name in ("token_stride", "head_stride")],
        *[(name, ctypes.c_int64) for name in ("weight_head_stride", "weight_row_stride")],
        *[(name, ctypes.c_int32) for name in ("is_bf16", "threads")],
    )


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = native.load(Path(__file__).with_name("kernel.c"))
    if library is not None:
        address, number = ctypes.c_void_p, ctypes.c_int64
        library.rms_norm.argtypes = [*[address] * 3, *[number] * 3, ctypes.c_float, ctypes.c_int32]
        library.rms_norm.restype = library.head_linear.restype = library.head_combine.restype = None
    return library


def supports(states: Tensor, weights: Tensor) -> bool:
    """Whether these operands, without gradients, are better off in the compiled version, and it is here.

    PyTorch's float32 product is as fast for a matrix that one thread reads from its cache.
    """
    return (
        states.shape[0] <= FEW_TOKENS
        and (
            states.dtype == torch.bfloat16
            or (states.dtype == torch.float32 and weights.numel() > WORTH_THREADS)
        )
        and can_take(states, weights)
    )


def can_take(states: Tensor, weights: Tensor) -> bool:
    """Whether the compiled version computes these operands, without gradients."""
    return (
        states.dtype in (torch.float32, torch.bfloat16)
        and weights.dtype == states.dtype
        and not (torch.is_grad_enabled() and (states.requires_grad or weights.requires_grad))
        and states.is_cpu
        and weights.is_cpu
        and states.stride(-1) == 1
        and weights.stride(-1) == 1
        and _library() is not None
    )


def linear_native(states: Tensor, weight: Tensor) -> Tensor:
    """states [T, I], weight [O, I] → [T, O]."""
    output = states.new_empty(states.shape[0], weight.shape[0])
    _run("head_linear", states[:, None], weight[None], output, weight.shape[0])
    return output


def head_linear_native(states: Tensor, weights: Tensor) -> Tensor:
    """states [T, H, I], weights [H, O, I] → [T, H, O]."""
    output = states.new_empty(states.shape[0], weights.shape[0], weights.shape[1])
    _run("head_linear", states, weights, output, weights.shape[1])
    return output


def head_combine_native(states: Tensor, weights: Tensor) -> Tensor:
    """states [T, H, I], weights [H, I, O] → [T, H, O]; O at most WIDEST."""
    if weights.shape[2] > WIDEST:
        raise ValueError(f"head_combine sums at most {WIDEST} columns at once, not {weights.shape[2]}")
    output = states.new_empty(states.shape[0], weights.shape[0], weights.shape[2])
    _run("head_combine", states, weights, output, weights.shape[2])
    return output


def rms_norm_native(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """states [T, D], weight [D] → [T, D]."""
    library = _library()
    assert library is not None
    tokens, width = states.shape
    if len(weight) != width:
        raise ValueError(f"states {list(states.shape)} and weight {list(weight.shape)} do not fit")
    output = states.new_empty(tokens, width)
    library.rms_norm(
        states.data_ptr(),
        weight.data_ptr(),
        output.data_ptr(),
        tokens,
        width,
        states.stride(0),
        eps,
        states.dtype == torch.bfloat16,
    )
    return output


def _run(name: str, states: Tensor, weights: Tensor, output: Tensor, outputs: int) -> None:
    heads, rows, columns = weights.shape
    inputs = states.shape[2]
    if states.shape[1] != heads or rows * columns != inputs * outputs:
        raise ValueError(f"states {list(states.shape)} and weights {list(weights.shape)} do not fit")
    call = _Call(
        states.data_ptr(),
        weights.data_ptr(),
        output.data_ptr(),
        states.shape[0],
        heads,
        inputs,
        outputs,
        states.stride(0),
        states.stride(1),
        weights.stride(0),
        weights.stride(1),
        states.dtype == torch.bfloat16,
        torch.get_num_threads() if weights.numel() > WORTH_THREADS else 1,
    )
    getattr(_library(), name)(ctypes.byref(call))
