"""Binding of kernel.c, the lightning indexer's selection on a CPU."""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from megaspan.ops import native
from megaspan.ops.rows import RowTable

SOURCE = Path(__file__).parent / "kernel.c"
TILE = 32  # tokens that share a packed block of keys; packing costs about as much as scoring one token
BLOCK_BYTES = 192 << 10  # of packed keys, a part of a core's L2
BLOCK_BYTES_PER_TOKEN = 12 << 10  # with few tokens a small block, so that reading and scoring take turns
GROUP = 48  # keys; the kernel's own group is this or a divisor
CHUNK = 2048  # keys at least in a split
POINTERS = "query weights keys starts sequence_ids visible selected workspace"
SIZES = "tokens heads width rows key_stride sequences pages page_size topk is_bf16 is_fp8"
PLAN = "tile groups splits chunk threads"


class Problem(ctypes.Structure):
    """Mirror of Problem in kernel.c."""

    _fields_ = [(name, ctypes.c_void_p) for name in POINTERS.split()]
    _fields_ += [(name, ctypes.c_int64) for name in f"{SIZES} {PLAN}".split()]


def supports(query: Tensor, keys: Tensor) -> bool:
    """Whether the kernel takes these tensors and can be built here."""
    return (
        query.device.type == keys.device.type == "cpu"
        and query.dtype in (torch.float32, torch.bfloat16)
        and (keys.stride(-1) == 1 or keys.shape[-1] == 1)
        and native.load(SOURCE) is not None
    )


def index_topk_native(
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    table: RowTable,
    sequence_ids: Tensor,
    visible: Tensor,
    topk: int,
    budget_bytes: int,
) -> Tensor:
    """Same arguments and result as `megaspan.ops.index_topk.index_topk`; `supports` must hold."""
    library = native.load(SOURCE)
    assert library is not None
    tokens, heads, width = query.shape
    selected_TK = torch.empty(tokens, topk, dtype=torch.int32)
    if selected_TK.numel() == 0:
        return selected_TK
    inputs = {
        "query": query.detach().contiguous(),
        "weights": weights.detach().float().contiguous(),
        "starts": table.starts.contiguous(),
        "sequence_ids": sequence_ids.long().contiguous(),
        "visible": visible.long().contiguous(),
    }
    problem = Problem(
        **{name: tensor.data_ptr() for name, tensor in inputs.items()},
        keys=keys.data_ptr(),
        selected=selected_TK.data_ptr(),
        tokens=tokens,
        heads=heads,
        width=width,
        rows=len(keys),
        key_stride=keys.stride(0) * keys.element_size(),
        sequences=table.starts.shape[0],
        pages=table.starts.shape[1],
        page_size=table.page_size,
        topk=topk,
        is_bf16=query.dtype == torch.bfloat16,
        is_fp8=keys.dtype == torch.uint8,
    )
    workspace = torch.empty(plan(library, problem, int(visible.max()), budget_bytes), dtype=torch.uint8)
    problem.workspace = (workspace.data_ptr() + 63) // 64 * 64
    if library.index_topk(ctypes.byref(problem)):
        raise IndexError("a sequence id, a visible length or a row of the table is out of range")
    return selected_TK


def plan(library: ctypes.CDLL, problem: Problem, longest: int, budget_bytes: int) -> int:
    """Set the tile, block, splits and threads of `problem` within the budget; return the workspace's bytes.

    The answer does not depend on the plan. With few tokens the keys are split among the threads,
    each split keeping its own best; with many the tokens are.
    """
    library.index_topk_workspace.restype = ctypes.c_int64
    problem.threads = torch.get_num_threads()
    problem.tile = min(TILE, problem.tokens)
    block_bytes = min(BLOCK_BYTES, BLOCK_BYTES_PER_TOKEN * problem.tokens)
    problem.groups = max(1, min(block_bytes // (GROUP * problem.width * 4), -(-longest // GROUP)))
    while True:
        tiles = -(-problem.tokens // problem.tile)
        problem.splits = max(1, min(-(-4 * problem.threads // tiles), longest // CHUNK))
        problem.chunk = -(-longest // problem.splits)
        needed = library.index_topk_workspace(ctypes.byref(problem)) + 64
        if needed <= budget_bytes:
            return needed
        if problem.tile * problem.groups * problem.threads == 1:
            raise ValueError(f"index_topk needs a budget of at least {needed} bytes, not {budget_bytes}")
        if problem.tile > 1:
            problem.tile //= 2
        elif problem.groups > 1:
            problem.groups //= 2
        else:
            problem.threads -= 1
