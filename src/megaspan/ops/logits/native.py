"""The compiled summary of logits."""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megaspan.ops import native
from megaspan.ops.logits.reference import LogitSummary

# Below this many logits, waking a second thread takes longer than it saves.
WORTH_THREADS = 100_000


class _Call(ctypes.Structure):
    """The arguments of the C function, in its order."""

    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("logits", "best_ids", "best", "log_totals", "failed")],
        *[(name, ctypes.c_int64) for name in ("rows", "width", "stride", "vocabulary")],
        ("threads", ctypes.c_int32),
    )


@functools.cache
def _function() -> Callable[..., None] | None:
    library = native.load(Path(__file__).with_name("kernel.c"))
    if library is None:
        return None
    library.summarise_logits.restype = None
    return library.summarise_logits


def supports(logits: Tensor) -> bool:
    """Whether the compiled version takes these logits and can be built here."""
    contiguous = logits.stride(-1) == 1 or logits.shape[-1] == 1
    return logits.is_cpu and logits.dtype == torch.float32 and contiguous and _function() is not None


def logit_summary_native(logits: Tensor, vocabulary: int) -> LogitSummary:
    """As `logit_summary`, on the CPU; `supports` must hold."""
    function = _function()
    assert function is not None
    rows, width = logits.shape
    if not 1 <= vocabulary <= width:
        raise ValueError(f"the vocabulary is {vocabulary}, but a row has {width} logits")
    summary = LogitSummary(
        np.empty(rows, dtype=np.int64), np.empty(rows), np.empty(rows), np.empty(rows, dtype=bool)
    )
    call = _Call(
        logits.data_ptr(),
        summary.best_ids.ctypes.data,
        summary.best.ctypes.data,
        summary.log_totals.ctypes.data,
        summary.failed.ctypes.data,
        rows,
        width,
        logits.stride(0),
        vocabulary,
        min(torch.get_num_threads(), rows) if rows * width > WORTH_THREADS else 1,
    )
    function(ctypes.byref(call))
    return summary
