"""The compiled versions of the linear operations: a token's numbers never depend on the other tokens."""

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from megaspan.ops import native

FEW_TOKENS = 16  # with more, PyTorch's matrix products are as fast or faster
WORTH_CALL = 100_000  # with fewer float32 weights, PyTorch's product is over before this one has begun
WORTH_THREADS = 60_000  # with fewer weights, waking a second thread takes longer than it saves


class _Call(ctypes.Structure):
    """The arguments of the C functions, in their order; strides in bytes."""

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
        address, number, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
        library.rms_norm.argtypes = [*[address] * 3, *[number] * 3, ctypes.c_float, flag, flag]
        library.rms_norm.restype = library.head_linear.restype = library.head_combine.restype = None
    return library


def supports(states: Tensor, weights: Tensor) -> bool:
    """Whether these operands, without gradients, are better off in the compiled version, and it is here."""
    return (
        states.shape[0] <= FEW_TOKENS
        and (states.dtype == torch.bfloat16 or weights.numel() > WORTH_CALL or weights.dim() == 3)
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
        and (states.stride(-1) == 1 or states.shape[-1] == 1)
        and (weights.stride(-1) == 1 or weights.shape[-1] == 1)
        and _library() is not None
    )


def linear_native(states: Tensor, weight: Tensor) -> Tensor:
    """states [T, I], weight [O, I] → [T, O]."""
    (tokens, inputs), (outputs, columns) = states.shape, weight.shape
    if inputs != columns:
        raise ValueError(f"states {list(states.shape)} and weight {list(weight.shape)} do not fit")
    output = states.new_empty(tokens, outputs)
    strides = states.stride(0), 0, 0, weight.stride(0)
    _run("head_linear", states, weight, output, (tokens, 1, inputs, outputs), strides)
    return output


def head_linear_native(states: Tensor, weights: Tensor) -> Tensor:
    """states [T, H, I], weights [H, O, I] → [T, H, O]."""
    return _run_heads("head_linear", states, weights, inputs=weights.shape[2], outputs=weights.shape[1])


def head_combine_native(states: Tensor, weights: Tensor) -> Tensor:
    """states [T, H, I], weights [H, I, O] → [T, H, O]."""
    return _run_heads("head_combine", states, weights, inputs=weights.shape[1], outputs=weights.shape[2])


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
        states.stride(0) * states.element_size(),
        eps,
        states.dtype == torch.bfloat16,
        torch.get_num_threads() if tokens * width > WORTH_THREADS else 1,
    )
    return output


def _run_heads(name: str, states: Tensor, weights: Tensor, inputs: int, outputs: int) -> Tensor:
    tokens, heads = states.shape[:2]
    if states.shape[2] != inputs or heads != weights.shape[0]:
        raise ValueError(f"states {list(states.shape)} and weights {list(weights.shape)} do not fit")
    output = states.new_empty(tokens, heads, outputs)
    strides = *states.stride()[:2], *weights.stride()[:2]
    _run(name, states, weights, output, (tokens, heads, inputs, outputs), strides)
    return output


def _run(
    name: str,
    states: Tensor,
    weights: Tensor,
    output: Tensor,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
) -> None:
    number = states.element_size()
    work = weights.numel() * max(1, sizes[0] // 4)  # a tile of 4 tokens reads a weight once
    call = _Call(
        states.data_ptr(),
        weights.data_ptr(),
        output.data_ptr(),
        *sizes,
        *(number * stride for stride in strides),
        states.dtype == torch.bfloat16,
        torch.get_num_threads() if work > WORTH_THREADS else 1,
    )
    getattr(_library(), name)(ctypes.byref(call))
