"""The compiled versions of the FP8 rows: the bytes of the PyTorch versions without their many small steps."""

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from megaspan.ops import native
from megaspan.ops.quant import index_rows
from megaspan.ops.quant.latent_rows import latent_row_bytes

# With fewer values, waking a second thread takes longer than it saves.
WORTH_THREADS = 50_000
OUTSIDE = 2  # what store_index_rows returns for a place that the storage does not have


class _Call(ctypes.Structure):
    """Mirror of Call in kernel.c."""

    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("rows", "packed", "places", "weights", "folded")],
        *[(name, ctypes.c_int64) for name in ("count", "width", "latent_rank", "page_size", "storage_rows")],
        *[(name, ctypes.c_int32) for name in ("is_bf16", "rotates", "threads")],
    )


@functools.cache
def _library() -> ctypes.CDLL | None:
    return native.load(Path(__file__).with_name("kernel.c"))


def supports(rows: Tensor) -> bool:
    """Whether rows of this kind can go through the compiled version here."""
    return rows.is_cpu and rows.dtype in (torch.float32, torch.bfloat16) and _library() is not None


def encode_latent_rows(rows: Tensor, latent_rank: int) -> Tensor:
    """As `latent_rows.encode_latent_rows`, on the CPU."""
    count, width = rows.shape
    packed = torch.empty(count, latent_row_bytes(latent_rank, width - latent_rank), dtype=torch.uint8)
    _run("encode_latent_rows", rows, packed, latent_rank=latent_rank)
    return packed


def store_index_rows(
    keys: Tensor, storage: Tensor, places: Tensor, page_size: int, rotate: bool = True
) -> None:
    """As `index_rows.store_index_rows`, on the CPU."""
    index_rows.require_pages(storage, page_size)
    places = places.contiguous()
    sizes = {"page_size": page_size, "storage_rows": len(storage)}
    _run(
        "store_index_rows",
        keys,
        storage,
        places=places.data_ptr(),
        rotates=_rotates(keys, rotate),
        **sizes,
    )


def quantize_index_queries(query: Tensor, weights: Tensor, rotate: bool = True) -> tuple[Tensor, Tensor]:
    """As `index_rows.quantize_index_queries`, on the CPU."""
    rounded = torch.empty(query.shape, dtype=torch.bfloat16)
    weights = weights.detach().float().contiguous()
    folded = torch.empty_like(weights)
    pointers = {"weights": weights.data_ptr(), "folded": folded.data_ptr()}
    _run("quantize_index_queries", query.flatten(0, 1), rounded, rotates=_rotates(query, rotate), **pointers)
    return rounded, folded


def _rotates(states: Tensor, rotate: bool) -> bool:
    return rotate and states.shape[-1].bit_count() == 1


def _run(name: str, rows: Tensor, packed: Tensor, **others: int) -> None:
    library = _library()
    if library is None:
        raise RuntimeError("the compiled versions of the FP8 rows are not available here")
    rows = rows.detach().contiguous()
    count, width = rows.shape
    call = _Call(
        rows=rows.data_ptr(),
        packed=packed.data_ptr(),
        count=count,
        width=width,
        is_bf16=rows.dtype == torch.bfloat16,
        threads=torch.get_num_threads() if rows.numel() > WORTH_THREADS else 1,
        **others,
    )
    failure = getattr(library, name)(ctypes.byref(call))
    if failure == OUTSIDE:
        raise IndexError("a row is to be stored outside the storage")
    if failure:
        raise MemoryError(f"no memory for the scratch space of {name}")
