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
    if not len(query):
        return torch.empty(0, topk, dtype=torch.int32, device=query.device)
    if query_lengths is None:
        query_lengths = [len(list(run)) for _, run in itertools.groupby(sequence_ids.tolist())]
    if longest is None:
        longest = int(visible.max())
    prefill, decode = gpu_prefill, gpu_decode
    if cuda.supports(query, keys, table, longest):
        prefill = decode = cuda
    few = [length <= FEW_QUERIES for length in query_lengths]
    selected = torch.empty(len(query), topk, dtype=torch.int32, device=query.device)
    if any(few):
        members = min(MEMBERS, max(itertools.compress(query_lengths, few)))
        uniform = set(query_lengths) == {members} and decode is cuda
        groups = members if uniform else query_groups(query_lengths, few, MEMBERS, query.device)
        tokens = members, sequence_ids, visible, selected
        decode.index_topk_decode(query, weights, keys, table, groups, *tokens, longest, budget_bytes)
    if not all(few):
        groups = query_groups(query_lengths, [not less for less in few], prefill.GROUP, query.device)
        tokens = sequence_ids, visible, selected
        void = prefill.index_topk_prefill(query, weights, keys, table, groups, *tokens, longest)
        if len(void):
            groups = query_groups([1] * len(void), [True] * len(void), MEMBERS, query.device)
            tokens = sequence_ids[void], visible[void], torch.empty_like(selected[void])
            rest = groups, 1, *tokens, longest, budget_bytes
            decode.index_topk_decode(query[void], weights[void], keys, table, *rest)
            selected[void] = tokens[-1]
    return selected


def query_groups(
    query_lengths: Sequence[int], chosen: Sequence[bool], size: int, device: torch.device
) -> Tensor:
    """[G, 2] int32: first query and number of queries of each group, up to `size` of a chosen sequence."""
    length = query_lengths[0]
    if length <= size and set(query_lengths) == {length}:  # on the device alone, for a graph to hold
        first = torch.arange(0, length * len(query_lengths), length, dtype=torch.int32, device=device)
        return torch.stack((first, torch.full_like(first, length)), 1)
    ends = np.cumsum(query_lengths)
    spans = [(end - length, end) for length, end in zip(query_lengths, ends, strict=True)]
    spans = list(itertools.compress(spans, chosen))
    first = np.concatenate([np.arange(start, end, size) for start, end in spans])
    last = np.concatenate([np.minimum(np.arange(start, end, size) + size, end) for start, end in spans])
    groups = np.stack((first, last - first), 1).astype(np.int32)
    return torch.from_numpy(groups).to(device, non_blocking=True)
