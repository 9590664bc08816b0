"""New rows of the cache, from a projection of the hidden states to where they are kept, in any row format."""

import torch
from torch import Tensor

from megaspan.ops.write_rows.projections import IndexProjection, LatentProjection
from megaspan.ops.write_rows.reference import write_index_rows_reference, write_latent_rows_reference

__all__ = ["IndexProjection", "LatentProjection", "write_index_rows", "write_latent_rows"]


def write_latent_rows(new: LatentProjection, storage: Tensor, places: Tensor) -> None:
    """Write T latent rows to the rows `places` [T] int64 of `storage`; on a GPU in one kernel.

    storage: [N, R + P] fp32 or bf16, or uint8 [N, latent_row_bytes(R, P)], FP8 rows of `ops.quant`. Nothing
    flows back to `new` from what is stored. `new.rows` is not computed on a GPU.
    """
    if storage.is_cuda and _can_take(new):
        from megaspan.ops.write_rows.gpu import write_latent_rows_gpu

        write_latent_rows_gpu(new.projected, new.norm_weight, new.eps, new.turns, storage, places)
    else:
        write_latent_rows_reference(new, storage, places)


def write_index_rows(
    new: IndexProjection, storage: Tensor, places: Tensor, page_size: int, rotate: bool = True
) -> None:
    """Write T index keys to the rows `places` [T] int64 of `storage`; on a GPU in one kernel.

    storage: [N, D] fp32 or bf16, or uint8 [N, D + 4], FP8 rows of `ops.quant` in pages of `page_size`.
    rotate: FP8 keys by the Hadamard matrix, as the queries must then be. See `write_latent_rows`.
    """
    if storage.is_cuda and _can_take(new):
        from megaspan.ops.write_rows.gpu import write_index_rows_gpu

        norm = new.norm_weight, new.norm_bias, new.eps
        write_index_rows_gpu(new.projected, *norm, new.turns, storage, places, page_size, rotate)
    else:
        write_index_rows_reference(new, storage, places, page_size, rotate)


def _can_take(new: LatentProjection | IndexProjection) -> bool:
    """Whether the kernels take a projection and a norm of these dtypes."""
    return new.projected.dtype == new.norm_weight.dtype in (torch.float32, torch.bfloat16)
