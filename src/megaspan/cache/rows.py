"""Row formats: how a pool keeps one token's row of one layer."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megaspan.config import ModelConfig
from megaspan.costs.memory import WIDTHS, Format, index_row_bytes, latent_row_bytes
from megaspan.errors import UserError
from megaspan.ops.quant import encode_index_rows, encode_latent_rows

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "fp8": torch.uint8}


@dataclass(frozen=True)
class RowFormat:
    """One pool's format: plain values of a float dtype, or packed FP8 bytes.

    width: values of a row as the model makes it. stored_width: elements of `dtype` as it is kept.
    latent_rank: how many leading values of a latent row are its latent; None for an index row.
    """

    name: Format
    width: int
    stored_width: int
    latent_rank: int | None = None

    @classmethod
    def latent(cls, config: ModelConfig, name: Format) -> "RowFormat":
        """Latent rows. FP8: values in e4m3 with a float32 scale for each 128, the rotary part in bf16."""
        nbytes = latent_row_bytes(config, _known(name))
        return cls(name, config.latent_width, nbytes // WIDTHS.get(name, 1), config.kv_lora_rank)

    @classmethod
    def index(cls, config: ModelConfig, name: Format) -> "RowFormat":
        """Index keys. FP8: rotated values in e4m3 and one float32 scale."""
        nbytes = index_row_bytes(config, _known(name))
        return cls(name, config.index_head_dim, nbytes // WIDTHS.get(name, 1))

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.name]

    @property
    def nbytes(self) -> int:
        """Bytes of one row."""
        return self.stored_width * self.dtype.itemsize

    def encode(self, rows: Tensor) -> Tensor:
        """Rows [T, width] of a float dtype → [T, stored_width] of `dtype`."""
        if self.name != "fp8":
            return rows.to(self.dtype)
        if self.latent_rank is None:
            return encode_index_rows(rows)
        return encode_latent_rows(rows, self.latent_rank)


def _known(name: Format) -> Format:
    if name not in DTYPES:
        raise UserError(f"there is no row format {name!r}; there are {', '.join(DTYPES)}")
    return name
