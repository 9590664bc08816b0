"""Sparse latent attention, written as plainly as it can be."""

import torch
from torch import Tensor

from megaspan.ops.quant import decode_latent_rows


def sparse_mla_reference(
    query: Tensor, rows: Tensor, selected: Tensor, value_width: int, scale: float
) -> Tensor:
    """One softmax per token and head over the rows that the token selected; see `sparse_mla`."""
    if rows.dtype == torch.uint8:
        rows = decode_latent_rows(rows, value_width, query.shape[2] - value_width)
    output = query.new_empty(*query.shape[:2], value_width)
    for token, (query_HW, numbers_K) in enumerate(zip(query, selected, strict=True)):
        chosen_KW = rows[numbers_K[numbers_K >= 0]].float()
        scores_HK = scale * query_HW.float() @ chosen_KW.T
        output[token] = (scores_HK.softmax(-1) @ chosen_KW[:, :value_width]).to(query.dtype)
    return output
