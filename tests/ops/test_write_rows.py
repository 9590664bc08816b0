"""New rows of a cache: what they are, where they go, and that nothing else changes."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megaspan.ops.quant import decode_index_rows, decode_latent_rows, hadamard, latent_row_bytes
from megaspan.ops.rotation import rotate_reference, turns
from megaspan.ops.write_rows import IndexProjection, LatentProjection, write_index_rows, write_latent_rows

pytestmark = pytest.mark.usefixtures("poisoned_memory")
FILL = 0xA5
PAGE = 4
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
formats = st.sampled_from([torch.float32, torch.bfloat16, torch.uint8])
dtypes = st.sampled_from([torch.float32, torch.bfloat16])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def latent_projection(tokens: int, rank=32, rope=8, dtype=torch.float32, device="cpu") -> LatentProjection:
    projected, weight = normal(tokens, rank + rope).to(device, dtype), normal(rank, seed=1).to(device, dtype)
    return LatentProjection(projected, weight, 1e-5, turns(positions(tokens, device), rope, 8e6))


def index_projection(tokens: int, width=16, rope=8, dtype=torch.float32, device="cpu") -> IndexProjection:
    projected = normal(tokens, width, seed=2).to(device, dtype)
    weight, bias = (normal(width, seed=seed).to(device, dtype) for seed in (3, 4))
    return IndexProjection(projected, weight, bias, 1e-6, turns(positions(tokens, device), rope, 8e6))


def positions(tokens: int, device: str) -> Tensor:
    return torch.randint(1 << 20, (tokens,), generator=torch.Generator().manual_seed(5)).to(device)


def storage_of(rows: int, width: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    storage = torch.empty(rows, width, dtype=dtype, device=device)
    storage.view(torch.uint8).fill_(FILL)
    return storage


def places_of(tokens: int, rows: int, seed: int = 0) -> Tensor:
    return torch.randperm(rows, generator=torch.Generator().manual_seed(seed))[:tokens]


def assert_rounded(stored: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Up to the format's rounding; a value far below its row's largest keeps an absolute error."""
    error = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.uint8: 2**-4}[dtype]
    bound = error * expected.float().abs() + (dtype == torch.uint8) * 0.02
    assert ((stored.float() - expected.float()).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latent_rows_are_a_normed_latent_and_a_rotated_key(dtype):
    new = latent_projection(70, dtype=dtype)
    latent = F.rms_norm(new.projected[:, :32], (32,), eps=1e-5) * new.norm_weight
    expected = torch.cat((latent, rotate_reference(new.projected[:, 32:], new.turns)), 1)
    torch.testing.assert_close(new.rows, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_index_keys_are_normed_and_then_rotated(dtype):
    new = index_projection(70, dtype=dtype)
    normed = F.layer_norm(new.projected, (16,), new.norm_weight, new.norm_bias, 1e-6)
    torch.testing.assert_close(new.rows, rotate_reference(normed, new.turns))


@pytest.mark.parametrize("make", [latent_projection, index_projection])
def test_gradients_reach_projection_and_norm(make):
    new = make(5)
    for tensor in (new.projected, new.norm_weight):
        tensor.requires_grad_()
    assert new.rows is new.rows
    new.rows.pow(2).sum().backward()
    assert new.projected.grad.count_nonzero() == new.projected.numel()
    assert new.norm_weight.grad.count_nonzero() == new.norm_weight.numel()


@pytest.mark.parametrize("make", [latent_projection, index_projection])
def test_an_invariant_row_has_the_same_bits_alone(make):
    new = replace(make(70), invariant=True)
    for token in (0, 33, 69):
        one = slice(token, token + 1)
        alone = replace(new, projected=new.projected[one], turns=new.turns[one])
        assert torch.equal(alone.rows[0], new.rows[token])


@settings(max_examples=25)
@given(tokens=st.integers(0, 9), kept=formats, dtype=dtypes, rank=st.sampled_from([32, 130]))
def test_latent_rows_go_to_their_places_only(tokens, kept, dtype, rank):
    new, rows = latent_projection(tokens, rank, dtype=dtype), 12
    width = latent_row_bytes(rank, 8) if kept == torch.uint8 else rank + 8
    storage, places = storage_of(rows, width, kept), places_of(tokens, rows)
    write_latent_rows(new, storage, places)
    stored = storage[places]
    assert_rounded(decode_latent_rows(stored, rank, 8) if kept == torch.uint8 else stored, new.rows, kept)
    storage[places] = storage_of(tokens, width, kept)
    assert storage.view(torch.uint8).eq(FILL).all()


@settings(max_examples=25)
@given(
    tokens=st.integers(0, 9),
    kept=formats,
    dtype=dtypes,
    width=st.sampled_from([16, 24]),
    rotate=st.booleans(),
)
def test_index_keys_go_to_their_places_only(tokens, kept, dtype, width, rotate):
    new, rows, is_fp8 = index_projection(tokens, width, dtype=dtype), 3 * PAGE, kept == torch.uint8
    storage, places = storage_of(rows, width + 4 * is_fp8, kept), places_of(tokens, rows)
    write_index_rows(new, storage, places, PAGE, rotate)
    expected = hadamard(new.rows.float()) if is_fp8 and rotate and width == 16 else new.rows
    stored = decode_index_rows(storage, places, PAGE) if is_fp8 else storage[places]
    assert_rounded(stored, expected, kept)
    changed = storage.view(torch.uint8).flatten() != FILL
    assert changed.sum() <= tokens * storage[0].nbytes
    others = places_of(rows, rows)[tokens:]
    kept_as_they_were = decode_index_rows(storage, others, PAGE) if is_fp8 else storage[others]
    filled = storage_of(rows, width + 4 * is_fp8, kept)
    untouched = decode_index_rows(filled, others, PAGE) if is_fp8 else filled[others]
    assert torch.equal(kept_as_they_were, untouched)


def test_what_is_stored_is_cut_from_the_graph():
    new, storage = latent_projection(3), torch.zeros(8, 40)
    new.projected.requires_grad_()
    write_latent_rows(new, storage, torch.tensor([1, 5, 2]))
    assert not storage.requires_grad


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_writes_what_a_cpu_writes_in_one_kernel(dtype, kept):
    """At the real widths, without `rows`. Another order of additions moves a rounded number by a step."""
    is_fp8, places = kept == torch.uint8, places_of(70, 128)
    new, other = (latent_projection(70, 512, 64, dtype, device) for device in ("cpu", "cuda"))
    storages = [
        storage_of(128, latent_row_bytes(512, 64) if is_fp8 else 576, kept, at) for at in ("cpu", "cuda")
    ]
    write_latent_rows(new, storages[0], places)
    write_latent_rows(other, storages[1], places.cuda())
    assert "rows" not in vars(other)
    rows = [storage.cpu()[places] for storage in storages]
    ours, expected = (decode_latent_rows(row, 512, 64) if is_fp8 else row.float() for row in rows)
    torch.testing.assert_close(ours, expected, rtol=2**-3 if is_fp8 else 2**-6, atol=1e-2)

    new, other = (index_projection(70, 128, 64, dtype, device) for device in ("cpu", "cuda"))
    storages = [storage_of(128, 128 + 4 * is_fp8, kept, at) for at in ("cpu", "cuda")]
    write_index_rows(new, storages[0], places, 64)
    write_index_rows(other, storages[1], places.cuda(), 64)
    assert "rows" not in vars(other)
    ours, expected = (
        decode_index_rows(rows, places, 64) if is_fp8 else rows[places].float()
        for rows in (storages[1].cpu(), storages[0])
    )
    torch.testing.assert_close(ours, expected, rtol=2**-3 if is_fp8 else 2**-6, atol=2e-2)
