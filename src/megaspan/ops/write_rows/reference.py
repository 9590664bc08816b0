"""Cache rows step by step: norm and rotation, then rounding to the storage's format, then the store."""

import torch
from torch import Tensor

from megaspan.ops.quant import encode_latent_rows, store_index_rows
from megaspan.ops.write_rows.projections import IndexProjection, LatentProjection


def write_latent_rows_reference(new: LatentProjection, storage: Tensor, places: Tensor) -> None:
    """Same arguments and effect as `megaspan.ops.write_rows.write_latent_rows`."""
    rows = new.rows.detach()
    if storage.dtype == torch.uint8:
        rows = encode_latent_rows(rows, len(new.norm_weight))
    storage.index_copy_(0, places, rows.to(storage.dtype))


def write_index_rows_reference(
    new: IndexProjection, storage: Tensor, places: Tensor, page_size: int, rotate: bool
) -> None:
    """Same arguments and effect as `megaspan.ops.write_rows.write_index_rows`."""
    keys = new.rows.detach()
    if storage.dtype == torch.uint8:
        store_index_rows(keys, storage, places, page_size, rotate)
    else:
        storage.index_copy_(0, places, keys.to(storage.dtype))
