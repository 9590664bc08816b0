"""Row formats: their bytes, what encoding keeps, and names that do not exist."""

import pytest
import torch

from megaspan.cache.rows import RowFormat
from megaspan.config import ModelConfig
from megaspan.errors import UserError
from megaspan.ops.quant import decode_index_rows, decode_latent_rows, hadamard

REAL = ModelConfig.preset("glm-5.2")
DEBUG = ModelConfig.preset("debug")
KINDS = {"latent": RowFormat.latent, "index": RowFormat.index}
DECODERS = {
    "latent": lambda stored, form: decode_latent_rows(
        stored, form.latent_rank, form.width - form.latent_rank
    ),
    "index": lambda stored, form: decode_index_rows(stored),
}


@pytest.mark.parametrize(
    ("name", "latent", "index"), [("float32", 2304, 512), ("bfloat16", 1152, 256), ("fp8", 656, 132)]
)
def test_bytes_of_a_row_at_real_size(name, latent, index):
    assert RowFormat.latent(REAL, name).nbytes == latent
    assert RowFormat.index(REAL, name).nbytes == index


@pytest.mark.parametrize("config", [REAL, DEBUG], ids=["glm-5.2", "debug"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "error"), [("float32", 0), ("bfloat16", 2**-8), ("fp8", 2**-4)])
def test_a_stored_row_reads_back_within_the_rounding_of_its_format(config, kind, name, error):
    form = KINDS[kind](config, name)
    rows = torch.randn(5, form.width, generator=torch.Generator().manual_seed(0))
    stored = form.encode(rows)
    assert stored.shape == (5, form.stored_width)
    assert stored.dtype == form.dtype
    assert stored[0].nbytes == form.nbytes
    expected = hadamard(rows) if (kind, name) == ("index", "fp8") else rows
    decoded = stored.float() if name != "fp8" else DECODERS[kind](stored, form)
    # A value far below its block's largest keeps an absolute error, hence the second bound.
    assert ((decoded - expected).abs() <= error * expected.abs() + (name == "fp8") * 0.01).all()


@pytest.mark.parametrize("name", ["float32", "bfloat16", "fp8"])
def test_rows_of_a_bf16_model_are_taken(name):
    for make in KINDS.values():
        form = make(DEBUG, name)
        rows = torch.randn(3, form.width).bfloat16()
        assert torch.equal(form.encode(rows), form.encode(rows.float()))


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_an_unknown_format_is_refused_with_the_known_ones(make):
    with pytest.raises(UserError, match=r"'int4'; there are float32, bfloat16, fp8"):
        make(DEBUG, "int4")
