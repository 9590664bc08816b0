"""The compiled version of sparse latent attention."""

import ctypes
import functools
import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from megaspan.ops import native
from megaspan.ops.quant import latent_row_bytes

# Below this many multiplications, waking a second thread takes longer than it saves.
WORTH_THREADS = 500_000


class _Call(ctypes.Structure):
    """The arguments of the C function, in its order."""

    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("query", "rows", "selected", "output")],
        *[
            (name, ctypes.c_int64)
            for name in ("tokens", "heads", "width", "row_count", "slots", "value_width", "row_bytes")
        ],
        ("scale", ctypes.c_float),
        *[(name, ctypes.c_int32) for name in ("is_bf16", "is_fp8", "threads")],
    )


@functools.cache
def _function() -> Callable[..., int] | None:
    library = native.load(Path(__file__).with_name("kernel.c"))
    return None if library is None else library.sparse_mla


def supports(query: Tensor, rows: Tensor) -> bool:
    """Whether these operands can go through the compiled version here, which has no gradients."""
    return (
        not (torch.is_grad_enabled() and (query.requires_grad or rows.requires_grad))
        and query.device.type == "cpu"
        and rows.device.type == "cpu"
        and rows.dtype in (query.dtype, torch.uint8)
        and query.dtype in (torch.float32, torch.bfloat16)
        and _function() is not None
    )


def sparse_mla_native(
    query: Tensor, rows: Tensor, selected: Tensor, value_width: int, scale: float
) -> Tensor:
    """As `sparse_mla`, on the CPU, without gradients; raises IndexError for a row number outside `rows`."""
    function = _function()
    if function is None:
        raise RuntimeError("the compiled version of sparse_mla is not available here")
    query, rows, selected = query.contiguous(), rows.contiguous(), selected.long().contiguous()
    (tokens, heads, width), slots = query.shape, selected.shape[1]
    if value_width > width or len(selected) != tokens or not _rows_fit(query, rows, value_width):
        raise ValueError("query [T, H, W], rows [N, W], selected [T, K] and value_width <= W do not fit")
    output = query.new_empty(tokens, heads, value_width)
    work = tokens * heads * slots * (width + value_width)
    call = _Call(
        query.data_ptr(),
        rows.data_ptr(),
        selected.data_ptr(),
        output.data_ptr(),
        tokens,
        heads,
        width,
        len(rows),
        slots,
        value_width,
        rows.shape[1] * rows.element_size(),
        scale / math.log(2),
        query.dtype == torch.bfloat16,
        rows.dtype == torch.uint8,
        torch.get_num_threads() if work > WORTH_THREADS else 1,
    )
    status = function(ctypes.byref(call))
    if status == 1:
        raise MemoryError("no memory for the scratch space of sparse_mla")
    if status:
        raise IndexError("selected holds a row number outside the rows, or a -1 before a valid slot")
    return output


def _rows_fit(query: Tensor, rows: Tensor, value_width: int) -> bool:
    width = query.shape[2]
    if rows.dtype == torch.uint8:
        return rows.shape[1] == latent_row_bytes(value_width, width - value_width)
    return rows.dtype == query.dtype and rows.shape[1] == width
