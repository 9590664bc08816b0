"""The lightning indexer's selection as one plain loop, the truth the fast versions are tested against."""

import torch
from torch import Tensor

from megaspan.ops.quant import decode_index_rows
from megaspan.ops.rows import RowTable


def index_topk_reference(
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    table: RowTable,
    sequence_ids: Tensor,
    visible: Tensor,
    topk: int,
) -> Tensor:
    """Same arguments and result as `megaspan.ops.index_topk.index_topk`, one token after the other."""
    selected_TK = torch.full((len(query), topk), -1, dtype=torch.int32, device=query.device)
    for token in range(len(query)):
        positions_L = torch.arange(int(visible[token]), device=query.device)
        rows_L = table.rows(sequence_ids[token, None], positions_L[None])[0]
        is_fp8 = keys.dtype == torch.uint8
        keys_LD = decode_index_rows(keys, rows_L, table.page_size) if is_fp8 else keys[rows_L].float()
        products_HL = query[token].float() @ keys_LD.T
        scores_L = (weights[token].float()[:, None] * products_HL.relu()).sum(0)
        scores_L = scores_L.where(~scores_L.isnan(), -torch.inf)
        # A stable sort leaves equal scores in position order: a tie at the cut goes to the lowest.
        best = scores_L.sort(descending=True, stable=True).indices[:topk].sort().values
        selected_TK[token, : len(best)] = best.int()
    return selected_TK
