"""Causal attention over every visible position of ragged sequences."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_lengths: Sequence[int],
    key_lengths: Sequence[int],
    scale: float,
) -> Tensor:
    """query [T, H, D], key [N, H, D], value [N, H, V] → [T, H, V]; differentiable.

    T and N hold the S sequences one after the other. The last query of a sequence sees all of its keys.
    """
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return _flash(query, key, value, query_lengths, key_lengths, scale)
    pieces = []
    for query_s, key_s, value_s in zip(
        query.split(list(query_lengths)),
        key.split(list(key_lengths)),
        value.split(list(key_lengths)),
        strict=True,
    ):
        hidden_keys = len(key_s) - len(query_s)
        mask = None  # without a past none is needed: it would be quadratic
        if hidden_keys:
            seen = torch.ones(len(query_s), len(key_s), dtype=torch.bool, device=query.device)
            mask = seen.tril(hidden_keys)
        query_H, key_H, value_H = (states.transpose(0, 1)[None] for states in (query_s, key_s, value_s))
        attended = F.scaled_dot_product_attention(
            query_H, key_H, value_H, attn_mask=mask, is_causal=mask is None, scale=scale
        )
        pieces.append(attended[0].transpose(0, 1))
    return torch.cat(pieces)


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_lengths: Sequence[int],
    key_lengths: Sequence[int],
    scale: float,
) -> Tensor:
    """The variable-length flash kernel, whose heads must be equally wide for keys and values."""
    width = query.shape[-1]
    padded = F.pad(value, (0, width - value.shape[-1])) if value.shape[-1] < width else value
    starts = [
        F.pad(torch.tensor(list(lengths), device=query.device).cumsum(0), (1, 0)).int()
        for lengths in (query_lengths, key_lengths)
    ]
    output = torch.ops.aten._flash_attention_forward(
        query, key, padded, *starts, max(query_lengths), max(key_lengths), 0.0, True, False, scale=scale
    )[0]
    return output[..., : value.shape[-1]]
