"""FP8 latent rows: the layout, what it loses, what it survives. P66 is a fault that other engines had."""

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megaspan.ops.quant import decode_latent_rows, latent_row_bytes, latent_rows, native

pytestmark = pytest.mark.usefixtures("poisoned_memory")


needs_native = pytest.mark.skipif(not native.supports(torch.empty(1, 1)), reason="no C compiler here")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(latent_rows.encode_latent_rows, id="plain"),
        pytest.param(native.encode_latent_rows, id="native", marks=needs_native),
    ],
)
def encode(request):
    """One version of `encode_latent_rows`."""
    return request.param


def drawn_rows(count: int, width: int, seed: int = 0) -> Tensor:
    """Columns of very different size, so that a scale of the wrong group shows."""
    generator = torch.Generator().manual_seed(seed)
    columns = torch.exp(2 * torch.randn(width, generator=generator))
    return torch.randn(count, width, generator=generator) * columns


def plain_decoding(packed: list[int], latent_rank: int, rope_width: int) -> list[float]:
    """One row, number by number."""
    row = bytes(packed)
    groups = math.ceil(latent_rank / 128)
    scales = struct.unpack_from(f"<{groups}f", row, latent_rank)
    values = torch.tensor(packed[:latent_rank], dtype=torch.uint8).view(torch.float8_e4m3fn).tolist()
    halves = struct.unpack_from(f"<{rope_width}H", row, latent_rank + 4 * groups)
    rope = [struct.unpack("<f", struct.pack("<I", half << 16))[0] for half in halves]
    return [value * scales[i // 128] for i, value in enumerate(values)] + rope


@settings(max_examples=40)
@given(
    count=st.integers(0, 6),
    latent_rank=st.sampled_from([1, 7, 127, 128, 129, 200, 512]),
    rope_width=st.sampled_from([0, 1, 16, 64]),
    magnitude=st.sampled_from([1e-38, 1e-20, 1.0, 1e30]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_rows_come_back_within_half_a_step(encode, count, latent_rank, rope_width, magnitude, dtype, seed):
    rows = (drawn_rows(count, latent_rank + rope_width, seed).clamp(-1e6, 1e6) * magnitude).to(dtype)
    packed = encode(rows, latent_rank)
    assert (packed.dtype, packed.shape) == (torch.uint8, (count, latent_row_bytes(latent_rank, rope_width)))
    decoded = decode_latent_rows(packed, latent_rank, rope_width)
    plain = [plain_decoding(row, latent_rank, rope_width) for row in packed.tolist()]
    assert torch.equal(decoded, torch.tensor(plain).view_as(decoded))
    assert torch.equal(decoded[:, latent_rank:], rows[:, latent_rank:].bfloat16().float())
    for group, exact in zip(
        decoded[:, :latent_rank].split(128, 1), rows[:, :latent_rank].double().split(128, 1), strict=True
    ):
        scale = (exact.abs().amax(1, keepdim=True) / 448).clamp(min=torch.finfo(torch.float32).tiny)
        # Half a step is 2^-4 of a normal e4m3 value and 2^-10 of the scale below; 1e-6 is float32's rounding.
        bound = torch.maximum(exact.abs() / 16, scale / 1024) * (1 + 1e-6) + 1e-44
        assert ((group.double() - exact).abs() <= bound).all()


def test_a_row_takes_656_bytes_at_the_real_width(encode):
    assert latent_row_bytes(512, 64) == 656
    assert encode(torch.ones(3, 576), 512).shape == (3, 656)


def test_decodes_to_the_dtype_asked_for(encode):
    packed = encode(drawn_rows(5, 144), 128)
    exact = decode_latent_rows(packed, 128, 16)
    assert torch.equal(decode_latent_rows(packed, 128, 16, torch.bfloat16), exact.bfloat16())


@pytest.mark.parametrize("amplitude", [0.02, 50.0])
def test_groups_of_other_amplitude_have_their_own_scales(encode, amplitude):
    """P66: scales left at 1, or shared with another group or with the rotary part, lose the small one."""
    rows = drawn_rows(50, 576).sign() * torch.rand(50, 576, generator=torch.Generator().manual_seed(1))
    rows[:, :128] *= amplitude
    rows[:, 256:384] *= 1 / amplitude
    rows[:, 512:] *= amplitude
    error = decode_latent_rows(encode(rows, 512), 512, 64) - rows
    for part, bound in zip((*range(0, 512, 128), 512), (0.03,) * 4 + (0.003,), strict=True):
        columns = slice(part, part + 128)
        assert error[:, columns].norm() < bound * rows[:, columns].norm()


def test_a_row_depends_on_no_other_row(encode):
    """In batch-invariant mode the cache of a token alone is that of the token in a batch, bit by bit."""
    rows = drawn_rows(67, 144)
    together = encode(rows, 128)
    assert torch.equal(torch.cat([encode(row[None], 128) for row in rows]), together)
    part = encode(rows[5:40], 128)
    assert torch.equal(part, together[5:40])


def test_zeros_have_scale_one(encode):
    packed = encode(torch.zeros(2, 130), 128)
    assert packed[0].tolist() == [0] * 128 + list(struct.pack("<f", 1.0)) + [0] * 4
    assert torch.equal(decode_latent_rows(packed, 128, 2), torch.zeros(2, 130))


def test_encoding_again_changes_no_byte_of_the_values(encode):
    packed = encode(drawn_rows(20, 200), 190)
    again = encode(decode_latent_rows(packed, 190, 10), 190)
    assert torch.equal(again[:, :190], packed[:, :190])


def test_what_is_not_finite_harms_no_other_value_but_by_saturating(encode):
    rows = drawn_rows(5, 272).clamp(-9, 9)
    rows[0, 3], rows[1, 4], rows[2, 5] = math.nan, math.inf, -math.inf
    rows[3, 260] = math.nan
    decoded = decode_latent_rows(encode(rows, 256), 256, 16)
    assert decoded.isnan().nonzero().tolist() == [[0, 3], [3, 260]]
    assert decoded[1, 4] == -decoded[2, 5] == pytest.approx(2.0**127)
    assert decoded[1:3].isfinite().all()
    for row in (0, 3, 4):
        sound = ~rows[row].isnan()
        expected = decode_latent_rows(encode(rows[row, None].nan_to_num(0), 256), 256, 16)[0]
        assert torch.equal(decoded[row, sound], expected[sound])


@needs_native
@settings(max_examples=40)
@given(
    count=st.sampled_from([0, 1, 3, 700]),
    latent_rank=st.sampled_from([1, 7, 128, 129, 200]),
    rope_width=st.sampled_from([0, 1, 16, 150]),
    magnitude=st.sampled_from([1e-44, 1e-38, 1e-5, 1.0, 1e30, 1e38]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_native_equals_the_plain_version_bit_by_bit(count, latent_rank, rope_width, magnitude, dtype, seed):
    rows = (drawn_rows(count, latent_rank + rope_width, seed) * magnitude).to(dtype)
    rows[::5] *= torch.rand(len(rows[::5]), 1).round()  # zeros among them
    rows[1:2, :latent_rank] = math.inf
    rows[2:3, latent_rank // 2] = math.nan
    finite = rows[:, latent_rank:].nan_to_num(0)
    rows = torch.cat((rows[:, :latent_rank], finite), 1)
    plain = latent_rows.encode_latent_rows(rows, latent_rank)
    assert torch.equal(native.encode_latent_rows(rows, latent_rank), plain)


def test_rows_of_another_width_are_refused(encode):
    packed = encode(torch.ones(2, 144), 128)
    with pytest.raises(ValueError, match="rows of 164 bytes"):
        decode_latent_rows(packed, 128, 18)
