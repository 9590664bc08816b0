"""Row formats: their bytes, and names that do not exist."""

import pytest
import torch

from megaspan.cache.pool import PagePools
from megaspan.cache.rows import RowFormat
from megaspan.config import ModelConfig
from megaspan.errors import UserError

REAL = ModelConfig.preset("glm-5.2")
DEBUG = ModelConfig.preset("debug")
KINDS = {"latent": RowFormat.latent, "index": RowFormat.index}


@pytest.mark.parametrize(
    ("name", "latent", "index"), [("float32", 2304, 512), ("bfloat16", 1152, 256), ("fp8", 656, 132)]
)
def test_bytes_of_a_row_at_real_size(name, latent, index):
    for kind, nbytes in (("latent", latent), ("index", index)):
        form = KINDS[kind](REAL, name)
        assert form.nbytes == nbytes
        assert torch.empty(form.stored_width, dtype=form.dtype).nbytes == nbytes


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_an_unknown_format_is_refused_with_the_known_ones(make):
    with pytest.raises(UserError, match=r"'int4'; there are float32, bfloat16, fp8"):
        make(DEBUG, "int4")


def test_pages_whose_scales_would_not_be_aligned_are_refused():
    config = DEBUG.replace(index_head_dim=18)
    with pytest.raises(UserError, match="page_size is 3, but FP8 index keys of 18 numbers"):
        PagePools(config, 2, 3, "float32", "fp8")
    for page_size, index in ((2, "fp8"), (4, "fp8"), (3, "bfloat16")):
        PagePools(config, 2, page_size, "float32", index)  # pyright: ignore[reportArgumentType]
