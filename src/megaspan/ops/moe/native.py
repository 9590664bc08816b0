"""The compiled version of routed experts: a token's numbers never depend on the other tokens."""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from megaspan.ops import native

FEW_TOKENS = 64  # to an expert; with more, PyTorch's matrix products are as fast
FEW_PLAIN_TOKENS = 16  # the same for the layer that every token goes through
# Below this many weights, waking a second thread takes longer than it saves.
WORTH_THREADS = 100_000


class _Call(ctypes.Structure):
    """The arguments of the C function, in its order."""

    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("hidden", "gate", "up", "down")],
        *[(name, ctypes.c_void_p) for name in ("expert_ids", "expert_weights", "output")],
        *[
            (name, ctypes.c_int64)
            for name in ("tokens", "slots", "experts", "width", "inner", "expert_stride")
        ],
        *[(name, ctypes.c_int32) for name in ("is_bf16", "threads")],
    )


@functools.cache
def _function() -> Callable[..., int] | None:
    library = native.load(Path(__file__).with_name("kernel.c"))
    return None if library is None else library.moe


def supports(hidden: Tensor, slots: int, experts: int) -> bool:
    """Whether these operands, without gradients, are better off in the compiled version, and it is here.

    slots: experts to each token; experts: all there are.
    """
    few = FEW_PLAIN_TOKENS if experts == 1 else FEW_TOKENS
    return hidden.shape[0] * slots <= few * experts and can_take(hidden)


def can_take(hidden: Tensor) -> bool:
    """Whether the compiled version computes these states, without gradients, for any number of tokens."""
    return hidden.is_cpu and hidden.dtype in (torch.float32, torch.bfloat16) and _function() is not None


def moe_native(
    hidden: Tensor, expert_ids: Tensor, expert_weights: Tensor, gate_up_proj: Tensor, down_proj: Tensor
) -> Tensor:
    """As `moe`, on the CPU, without gradients; raises IndexError for an expert that does not exist."""
    gate_up_proj = gate_up_proj.contiguous()
    inner = down_proj.shape[2]
    up = gate_up_proj.data_ptr() + gate_up_proj[0, :inner].nbytes
    return _run(hidden, expert_ids, expert_weights, gate_up_proj, up, down_proj)


def swiglu_native(hidden: Tensor, gate_proj: Tensor, up_proj: Tensor, down_proj: Tensor) -> Tensor:
    """As `swiglu`, on the CPU, without gradients: one expert that every token goes to."""
    expert_ids, expert_weights = _only_expert(hidden.shape[0])
    if up_proj.shape != gate_proj.shape or up_proj.dtype != gate_proj.dtype:
        raise ValueError("gate_proj and up_proj differ in shape or dtype")
    gate, up = gate_proj.contiguous()[None], up_proj.contiguous()
    return _run(hidden, expert_ids, expert_weights, gate, up.data_ptr(), down_proj[None])


@functools.lru_cache(maxsize=8)
def _only_expert(tokens: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(tokens, 1, dtype=torch.int64), torch.ones(tokens, 1)


def _run(
    hidden: Tensor, expert_ids: Tensor, expert_weights: Tensor, gate: Tensor, up: int, down: Tensor
) -> Tensor:
    """gate: [E, I or 2 I, D], contiguous; up: the address of the first expert's other projection."""
    function = _function()
    if function is None:
        raise RuntimeError("the compiled version of moe is not available here")
    if not hidden.dtype == gate.dtype == down.dtype or expert_weights.dtype != torch.float32:
        raise TypeError("moe needs hidden states and projections of one dtype, and fp32 expert weights")
    hidden, down, expert_ids, expert_weights = (
        tensor.contiguous() for tensor in (hidden, down, expert_ids.long(), expert_weights)
    )
    (tokens, slots), (experts, width, inner) = expert_ids.shape, down.shape
    fitting = hidden.shape == (tokens, width) and expert_weights.shape == expert_ids.shape
    if not fitting or gate.shape not in ((experts, inner, width), (experts, 2 * inner, width)):
        raise ValueError("hidden [T, D], experts and weights [T, k] and projections of E experts do not fit")
    output = torch.empty_like(hidden)
    call = _Call(
        hidden.data_ptr(),
        gate.data_ptr(),
        up,
        down.data_ptr(),
        expert_ids.data_ptr(),
        expert_weights.data_ptr(),
        output.data_ptr(),
        tokens,
        slots,
        experts,
        width,
        inner,
        gate.shape[1] * width,
        hidden.dtype == torch.bfloat16,
        torch.get_num_threads() if 3 * tokens * slots * width * inner > WORTH_THREADS else 1,
    )
    status = function(ctypes.byref(call))
    if status == 1:
        raise MemoryError("no memory for the scratch space of moe")
    if status:
        raise IndexError(f"expert_ids holds an expert outside 0..{experts - 1}")
    return output
