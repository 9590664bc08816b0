"""Row formats: how a pool keeps one token's row of one layer."""

from dataclasses import dataclass

import torch

from megaspan.config import ModelConfig
from megaspan.costs.memory import WIDTHS, Format, index_row_bytes, latent_row_bytes
from megaspan.errors import UserError

LAYOUT = (
    2  # of a page's bytes: a file with another is not read. 1 had each index row's scale behind its values
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "fp8": torch.uint8}


@dataclass(frozen=True)
class RowFormat:
    """One pool's format: plain values of a float dtype, or packed FP8 bytes.

    width: values of a row as the model makes it. stored_width: elements of `dtype` as it is kept. rotate: FP8
    index keys and the queries that meet them are multiplied by a Hadamard matrix first.
    """

    name: Format
    width: int
    stored_width: int
    rotate: bool = True

    @classmethod
    def latent(cls, config: ModelConfig, name: Format) -> "RowFormat":
        """Latent rows. FP8: values in e4m3 with a float32 scale for each 128, the rotary part in bf16."""
        nbytes = latent_row_bytes(config, _known(name))
        return cls(name, config.latent_width, nbytes // WIDTHS.get(name, 1))

    @classmethod
    def index(cls, config: ModelConfig, name: Format, rotate: bool = True) -> "RowFormat":
        """Index keys. FP8: values in e4m3 and one float32 scale a row, page by page."""
        nbytes = index_row_bytes(config, _known(name))
        return cls(name, config.index_head_dim, nbytes // WIDTHS.get(name, 1), rotate)

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.name]

    @property
    def nbytes(self) -> int:
        """Bytes of one row."""
        return self.stored_width * self.dtype.itemsize


def _known(name: Format) -> Format:
    if name not in DTYPES:
        raise UserError(f"there is no row format {name!r}; there are {', '.join(DTYPES)}")
    return name
