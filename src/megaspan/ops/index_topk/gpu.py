"""The lightning indexer's selection on a GPU: which of its two ways each query goes."""

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megaspan.ops.index_topk import cuda, gpu_decode, gpu_prefill
from megaspan.ops.rows import RowTable

FEW_QUERIES = 64  # of a sequence, up to which their scores are stored
MEMBERS = 4  # queries of a sequence that are scored together where there are few
MAX_HEADS, MAX_WIDTH = 64, 256


def supports(query: Tensor, keys: Tensor) -> bool:
    """Whether the kernels take these tensors: bf16 queries of as many heads and dimensions as tiles have."""
    heads, width = query.shape[1:]
    return (
        query.dtype == torch.bfloat16
        and keys.is_contiguous()
        and heads.bit_count() == width.bit_count() == 1
        and 4 <= heads <= MAX_HEADS
        and 32 <= width <= MAX_WIDTH
    )


def index_topk_gpu(
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    table: RowTable,
    sequence_ids: Tensor,
    visible: Tensor,
    topk: int,
    budget_bytes: int,
    query_lengths: Sequence[int] | None = None,
    longest: int | None = None,
) -> Tensor:
    """Same arguments and result as `megaspan.ops.index_topk.index_topk`; `supports` must hold.

    A sequence that is not in the table, or a length beyond it, is not noticed: that would take waiting for
    the GPU. Where all sequences have the same few queries nothing waits, so a CUDA graph can hold the call.
    """
    query, weights = query.detach().contiguous(), weights.detach().float().contiguous()
    tokens = sequence_ids.long().contiguous(), visible.long().contiguous()
    table = RowTable(table.starts.contiguous(), table.page_size)
    if not len(query):
        return torch.empty(0, topk, dtype=torch.int32, device=query.device)
    if query_lengths is None:
        query_lengths = run_lengths(sequence_ids)
    if longest is None:
        longest = int(visible.max())
    fast = cuda.supports(query, keys, table, topk, longest)
    prefill, decode = (cuda, cuda) if fast else (gpu_prefill, gpu_decode)
    few = [0 < length <= FEW_QUERIES for length in query_lengths]
    many = [length > FEW_QUERIES for length in query_lengths]
    selected = torch.empty(len(query), topk, dtype=torch.int32, device=query.device)
    if any(few):
        members = min(MEMBERS, max(itertools.compress(query_lengths, few)))
        uniform = fast and set(query_lengths) == {members}
        groups = members if uniform else query_groups(query_lengths, few, MEMBERS, query.device)
        operands = query, weights, keys, table, groups, members, *tokens, selected
        decode.index_topk_decode(*operands, longest, budget_bytes)
    if any(many):
        void = torch.zeros(len(query), dtype=torch.int32, device=query.device)
        groups = query_groups(query_lengths, many, prefill.GROUP, query.device)
        together = budget_bytes // prefill.group_bytes(topk)
        if not together:
            least = prefill.group_bytes(topk)
            raise ValueError(f"index_topk needs a budget of at least {least} bytes, not {budget_bytes}")
        for part in groups.split(together):
            prefill.index_topk_prefill(query, weights, keys, table, part, *tokens, selected, void, longest)
        if void.any():
            redone = void.nonzero()[:, 0]
            query, weights, *tokens = (operand[redone] for operand in (query, weights, *tokens))
            lengths, again = run_lengths(tokens[0]), torch.empty_like(selected[redone])
            groups = query_groups(lengths, [True] * len(lengths), MEMBERS, query.device)
            operands = query, weights, keys, table, groups, MEMBERS, *tokens, again
            decode.index_topk_decode(*operands, longest, budget_bytes)
            selected[redone] = again
    return selected


def run_lengths(sequence_ids: Tensor) -> list[int]:
    """How many tokens in a row have the same sequence; the host waits for the GPU to know."""
    return [len(list(run)) for _, run in itertools.groupby(sequence_ids.tolist())]


def query_groups(
    query_lengths: Sequence[int], chosen: Sequence[bool], size: int, device: torch.device
) -> Tensor:
    """[G, 2] int32: first query and number of queries of each group, up to `size` of a chosen sequence."""
    length = query_lengths[0]
    if set(query_lengths) == {length} and all(chosen):  # on the device alone, for a graph to hold
        start = torch.arange(0, length, size, dtype=torch.int32, device=device)
        first = torch.arange(0, length * len(query_lengths), length, dtype=torch.int32, device=device)
        number = (length - start).clamp(max=size).expand(len(query_lengths), -1)
        return torch.stack(((first[:, None] + start).flatten(), number.flatten()), 1)
    ends = np.cumsum(query_lengths)
    spans = [(end - length, end) for length, end in zip(query_lengths, ends, strict=True)]
    spans = list(itertools.compress(spans, chosen))
    first = np.concatenate([np.arange(start, end, size) for start, end in spans])
    last = np.concatenate([np.minimum(np.arange(start, end, size) + size, end) for start, end in spans])
    groups = np.stack((first, last - first), 1).astype(np.int32)
    return torch.from_numpy(groups).to(device, non_blocking=True)
