"""The compiled version of routing: a token's numbers never depend on the other tokens."""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from megaspan.ops import native

# Below this many multiplications, waking a second thread takes longer than it saves.
WORTH_THREADS = 200_000


class _Call(ctypes.Structure):
    """The arguments of the C function, in its order."""

    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("hidden", "weight", "bias", "expert_ids", "expert_weights")],
        *[(name, ctypes.c_int64) for name in ("tokens", "width", "experts", "topk", "token_stride")],
        ("scaling", ctypes.c_float),
        *[(name, ctypes.c_int32) for name in ("normalise", "is_bf16", "threads")],
    )


@functools.cache
def _function() -> Callable[..., int] | None:
    library = native.load(Path(__file__).with_name("kernel.c"))
    return None if library is None else library.route


def can_take(hidden: Tensor, weight: Tensor) -> bool:
    """Whether the compiled version takes these operands, without gradients."""
    return (
        hidden.is_cpu
        and hidden.dtype in (torch.float32, torch.bfloat16)
        and (hidden.stride(-1) == 1 or hidden.shape[-1] == 1)
        and not (torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad))
        and _function() is not None
    )


def route_native(
    hidden: Tensor, weight: Tensor, bias: Tensor, topk: int, normalise: bool, scaling: float
) -> tuple[Tensor, Tensor]:
    """As `route`, on the CPU, without gradients; raises ValueError where the shapes do not fit."""
    function = _function()
    if function is None:
        raise RuntimeError("the compiled version of route is not available here")
    (tokens, width), experts = hidden.shape, len(weight)
    if weight.shape != (experts, width) or bias.shape != (experts,) or not 0 <= topk <= experts:
        raise ValueError("hidden [T, D], weight [E, D], bias [E] and topk <= E do not fit")
    weight, bias = weight.float().contiguous(), bias.float().contiguous()
    expert_ids = torch.empty(tokens, topk, dtype=torch.int64)
    expert_weights = torch.empty(tokens, topk)
    call = _Call(
        hidden.data_ptr(),
        weight.data_ptr(),
        bias.data_ptr(),
        expert_ids.data_ptr(),
        expert_weights.data_ptr(),
        tokens,
        width,
        experts,
        topk,
        hidden.stride(0) * hidden.element_size(),
        scaling,
        normalise,
        hidden.dtype == torch.bfloat16,
        torch.get_num_threads() if tokens * width * experts > WORTH_THREADS else 1,
    )
    if function(ctypes.byref(call)):
        raise MemoryError("no memory for the scratch space of route")
    return expert_ids, expert_weights
