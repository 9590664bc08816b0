"""What others offer for the same operations, where their packages can be imported.

Each function gives calls on the operands of ours, by the peer's name; none where there is no peer here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megaspan.bench.device_time import Calls
from megaspan.ops.quant import index_row_views

if TYPE_CHECKING:
    from megaspan.bench.kernels.index_topk import Selecting
    from megaspan.bench.kernels.sparse_mla import Attending

LOGITS_BYTES = 20 << 30  # that a peer may hold for scores; ours never does


def module(name: str, device: torch.device) -> ModuleType | None:
    """A package of kernels for this device, or None."""
    if device.type != "cuda":
        return None
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def index_topk(made: list[Selecting]) -> dict[str, Calls]:
    """DeepGEMM's scores, then PyTorch's choice."""
    first = made[0]
    deep_gemm = module("deep_gemm", first.query.device)
    found: dict[str, Calls] = {}
    if deep_gemm is None or 4 * len(first.query) * first.length > LOGITS_BYTES:
        return found
    scores = _paged_scores if first.queries == 1 else _contiguous_scores
    found["deep_gemm + torch.topk"] = [_best_of(scores(deep_gemm, one), one.topk) for one in made]
    return found


def _best_of(scores: Callable[[], Tensor], topk: int) -> Callable[[], Any]:
    return lambda: scores().topk(topk, 1)


def _contiguous_scores(deep_gemm: ModuleType, one: Selecting) -> Callable[[], Tensor]:
    """Its prefill takes keys that lie one after the other, so it is spared the pages."""
    values, scales = (part.flatten(0, 1) for part in index_row_views(one.keys, one.table.page_size))
    starts = torch.zeros_like(one.visible, dtype=torch.int32)
    query = one.query.to(torch.float8_e4m3fn)
    score = getattr(deep_gemm, "fp8_mqa_logits", None) or deep_gemm.fp8_fp4_mqa_logits
    operands = query, (values, scales), one.weights, starts, one.visible.int()
    return lambda: score(*operands, clean_logits=True)


def _paged_scores(deep_gemm: ModuleType, one: Selecting) -> Callable[[], Tensor]:
    page_size = one.table.page_size
    keys = one.keys.view(-1, page_size, 1, one.keys.shape[1])
    lengths, pages = one.visible.int(), (one.table.starts // page_size).int()
    processors = torch.cuda.get_device_properties(one.keys.device).multi_processor_count
    schedule = deep_gemm.get_paged_mqa_logits_metadata(lengths, page_size, processors)
    score = getattr(deep_gemm, "fp8_paged_mqa_logits", None) or deep_gemm.fp8_fp4_paged_mqa_logits
    query = one.query.to(torch.float8_e4m3fn)[:, None]
    operands = query, keys, one.weights, lengths, pages, schedule, one.length
    return lambda: score(*operands, clean_logits=True)


def sparse_mla(made: list[Attending]) -> dict[str, Calls]:
    """FlashMLA: sparse prefill for bf16 rows, sparse decoding for FP8 rows."""
    first = made[0]
    flash_mla = module("flash_mla", first.query.device)
    if flash_mla is None or (first.fp8 and not first.decode):  # it has no prefill with FP8 rows
        return {}
    call = _flash_decode if first.fp8 else _flash_prefill
    return {"flash_mla": [call(flash_mla, one) for one in made]}


def _flash_prefill(flash_mla: ModuleType, one: Attending) -> Callable[[], Any]:
    rows, selected = one.rows[:, None], one.selected[:, None].int()
    return lambda: flash_mla.flash_mla_sparse_fwd(one.query, rows, selected, one.scale, one.value_width)


def _flash_decode(flash_mla: ModuleType, one: Attending) -> Callable[[], Any]:
    tokens, heads, _ = one.query.shape
    rows, selected = one.rows.view(-1, 64, 1, one.rows.shape[1]), one.selected[:, None].int()
    lengths = torch.full((tokens,), one.selected.shape[1], dtype=torch.int32, device=one.query.device)
    metadata, splits = flash_mla.get_mla_metadata(
        lengths, heads, 1, num_heads_q=heads, is_fp8_kvcache=True, topk=one.selected.shape[1]
    )
    table = torch.zeros(tokens, 1, dtype=torch.int32, device=one.query.device)
    return lambda: flash_mla.flash_mla_with_kvcache(
        one.query[:, None], rows, table, lengths, one.value_width, metadata, splits,
        softmax_scale=one.scale, is_fp8_kvcache=True, indices=selected,
    )  # fmt: skip


def linear(states: list[Tensor], weights: list[Tensor]) -> dict[str, Calls]:
    """cuBLAS, on a GPU."""
    if not states[0].is_cuda:
        return {}
    pairs = zip(states, weights, strict=True)
    return {"cuBLAS": [lambda x=x, w=w: torch.nn.functional.linear(x, w) for x, w in pairs]}
