"""Cache rows in one kernel: the bits of norm, rotation and encoder one after the other, and no other byte."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from megaspan.ops.quant import index_rows, latent_row_bytes, latent_rows
from megaspan.ops.rotation import turns

gpu = pytest.importorskip("megaspan.ops.write_rows.gpu", reason="no Triton here")
norm = pytest.importorskip("megaspan.ops.linear.gpu_norm")
rotation = pytest.importorskip("megaspan.ops.rotation.gpu")
pytestmark = pytest.mark.usefixtures("poisoned_memory")
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
FILL = 0xA5
PAGE = 4


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_projected(tokens: int, width: int, device: str, dtype: torch.dtype) -> Tensor:
    """Cut from a wider product that holds NaN beside it."""
    wide = torch.full((tokens, width + 7), torch.nan)
    wide[:, 4 : 4 + width] = normal(tokens, width, seed=width)
    return wide.to(device, dtype)[:, 4 : 4 + width]


def turns_of(tokens: int, rope: int, device: str) -> Tensor:
    positions = torch.randint(1 << 20, (tokens,), generator=torch.Generator().manual_seed(1))
    return turns(positions.to(device), rope, 8e6)


def places_of(tokens: int, rows: int, device: str) -> Tensor:
    return torch.randperm(rows, generator=torch.Generator().manual_seed(2))[:tokens].to(device)


def filled(rows: int, width: int, dtype: torch.dtype, device: str) -> Tensor:
    storage = torch.empty(rows, width, dtype=dtype, device=device)
    storage.view(torch.uint8).fill_(FILL)
    return storage


def same(actual: Tensor, expected: Tensor) -> bool:
    """Equal bits, but for the kind of NaN."""
    return actual.cpu().float().nan_to_num(nan=1e9).equal(expected.cpu().float().nan_to_num(nan=1e9))


def assert_others_untouched(storage: Tensor, places: Tensor) -> None:
    others = torch.ones(len(storage), dtype=torch.bool)
    others[places.cpu()] = False
    assert (storage.cpu().view(torch.uint8)[others] == FILL).all()


# --- latent rows -----------------------------------------------------------------------------------------


def without_signs_of_nan(packed: Tensor, rank: int) -> Tensor:
    values = packed[:, :rank]
    return torch.cat((values.where(values & 127 != 127, 127), packed[:, rank:]), 1)


def assert_writes_latent_rows(projected: Tensor, rank: int, rows: int, weight: Tensor | None = None) -> None:
    """In every format; FP8 rows are those of the encoder for the rows in the dtype of the projection."""
    tokens, device, dtype = len(projected), projected.device.type, projected.dtype
    rope = projected.shape[1] - rank
    weight = (normal(rank, seed=3) if weight is None else weight).to(device, dtype)
    turn, places = turns_of(tokens, rope, device), places_of(tokens, rows, device)
    separate = (
        norm.rms_norm_gpu(projected[:, :rank], weight, 1e-5),
        rotation.rotate_gpu(projected[:, rank:], turn),
    )
    expected = torch.cat(separate, 1)
    for kept in (torch.float32, torch.bfloat16):
        storage = filled(rows, rank + rope, kept, device)
        gpu.write_latent_rows_gpu(projected, weight, 1e-5, turn, storage, places)
        assert same(storage[places], expected.to(kept))
        assert_others_untouched(storage, places)
    storage = filled(rows, latent_row_bytes(rank, rope), torch.uint8, device)
    gpu.write_latent_rows_gpu(projected, weight, 1e-5, turn, storage, places)
    encoded = latent_rows.encode_latent_rows(expected.cpu(), rank)
    assert without_signs_of_nan(storage[places].cpu(), rank).equal(without_signs_of_nan(encoded, rank))
    assert_others_untouched(storage, places)


@settings(max_examples=8)
@given(
    tokens=st.integers(0, 3),
    rank=st.sampled_from([4, 36, 128, 132, 300]),
    rope=st.sampled_from([2, 6, 16]),
    dtype=dtypes,
)
def test_latent_rows(kernel_device, tokens, rank, rope, dtype):
    assert_writes_latent_rows(make_projected(tokens, rank + rope, kernel_device, dtype), rank, rows=9)


def test_latent_rows_of_zeros_and_extremes(kernel_device):
    """A group of zeros beside one that is not, the largest numbers, and those that are hardly there."""
    projected = make_projected(4, 264, kernel_device, torch.float32)
    projected[0] = 0
    projected[1, :128] = 0
    projected[2] *= 1e15
    projected[3, :128] *= 1e-30
    assert_writes_latent_rows(projected, 256, rows=5)


def test_latent_rows_that_are_tiny_or_hold_nan_or_infinity_beside_others(kernel_device):
    """Each in a group of its own."""
    weight = normal(512, seed=3)
    weight[:128] *= 1e-37
    weight[130], weight[260], weight[384:] = torch.nan, 3e38, torch.nan
    assert_writes_latent_rows(make_projected(4, 520, kernel_device, torch.float32) * 3, 512, 5, weight)


def test_latent_rows_that_are_not_finite(kernel_device):
    """Nothing is refused, and a bad row harms no other."""
    projected, weight = normal(3, 136).to(kernel_device), torch.ones(128, device=kernel_device)
    turn, places = turns_of(3, 8, kernel_device), places_of(3, 3, kernel_device)
    storage = filled(3, latent_row_bytes(128, 8), torch.uint8, kernel_device)
    gpu.write_latent_rows_gpu(projected, weight, 1e-5, turn, storage, places)
    good = storage[places]
    projected[1, 5] = torch.nan
    gpu.write_latent_rows_gpu(projected, weight, 1e-5, turn, storage, places)
    assert storage[places][[0, 2]].equal(good[[0, 2]])
    bad = latent_rows.decode_latent_rows(storage[places][1:2], 128, 8)
    assert bad[:, :128].isnan().all()
    assert bad[:, 128:].isfinite().all()


def test_latent_rows_that_do_not_fit_are_refused(kernel_device):
    projected, turn = torch.zeros(2, 24, device=kernel_device), turns_of(2, 8, kernel_device)
    weight, places = torch.ones(16, device=kernel_device), places_of(2, 2, kernel_device)
    for change in (
        {"storage": torch.empty(2, 23)},
        {"places": places[:1]},
        {"turns": turn[:1]},
        {"norm_weight": weight[:15]},
        {"norm_weight": weight.bfloat16()},
    ):
        whole = {"storage": torch.empty(2, 24), "places": places, "turns": turn, "norm_weight": weight}
        with pytest.raises(ValueError, match=r"fit|weight"):
            gpu.write_latent_rows_gpu(projected, eps=1e-5, **{**whole, **change})
    storage = torch.empty(2, latent_row_bytes(18, 6), dtype=torch.uint8)
    with pytest.raises(ValueError, match="multiple of 4, not 18"):
        gpu.write_latent_rows_gpu(
            projected, torch.ones(18), 1e-5, turns_of(2, 6, kernel_device), storage, places
        )


# --- index rows ------------------------------------------------------------------------------------------


def read_paged(storage: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Bytes [N, D + 4] of pages as e4m3 values [N, D] and scales [N], both fp32."""
    pages = storage.cpu().reshape(-1, PAGE * (width + 4))
    values = pages[:, : PAGE * width].reshape(-1, width).clone().view(torch.float8_e4m3fn)
    return values.float(), pages[:, PAGE * width :].clone().view(torch.float32).flatten()


def assert_writes_index_rows(projected: Tensor, rope: int, rows: int) -> None:
    tokens, width = projected.shape
    device, dtype = projected.device.type, projected.dtype
    weight, bias = (normal(width, seed=seed).to(device, dtype) for seed in (3, 4))
    turn, places = turns_of(tokens, rope, device), places_of(tokens, rows, device)

    def written(storage: Tensor, rotate: bool) -> Tensor:
        gpu.write_index_rows_gpu(projected, weight, bias, 1e-6, turn, storage, places, PAGE, rotate)
        return storage

    kept = written(filled(rows, width, dtype, device), True)
    assert_others_untouched(kept, places)
    keys = kept[places].cpu()
    normed = F.layer_norm(projected.cpu(), (width,), weight.cpu(), bias.cpu(), 1e-6)
    expected = rotation_in_words(normed, turn.cpu())
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2**-6, "atol": 2**-6}
    torch.testing.assert_close(keys, expected, **tolerance)
    if dtype == torch.bfloat16 and keys.numel() > 100:  # rounded where PyTorch rounds: bits seldom differ
        assert (keys == expected).float().mean() > 0.95
    assert same(written(filled(rows, width, torch.float32, device), True)[places], keys)
    for rotate in (True, False):
        storage = written(filled(rows, width + 4, torch.uint8, device), rotate)
        values, scales = read_paged(storage, width)
        expected_values, expected_scales = index_rows.quantize_index_queries(
            keys[:, None], torch.ones(tokens, 1), rotate
        )
        assert same(values[places.cpu()], expected_values[:, 0])
        assert same(scales[places.cpu()], expected_scales[:, 0])
        values[places.cpu()], scales[places.cpu()] = 0, 0
        untouched = torch.full((4,), FILL, dtype=torch.uint8)
        assert set(values.unique().tolist()) <= {0.0, untouched[:1].view(torch.float8_e4m3fn).float().item()}
        assert set(scales.unique().tolist()) <= {0.0, untouched.view(torch.float32).item()}


def rotation_in_words(states: Tensor, turn: Tensor) -> Tensor:
    rope, wide = turn.shape[-1], states.float()
    mirrored = wide[:, :rope].unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    turned = wide[:, :rope] * turn[:, 0] + mirrored * turn[:, 1]
    return torch.cat((turned, wide[:, rope:]), 1).to(states.dtype)


@settings(max_examples=8)
@given(
    tokens=st.integers(0, 4),
    sizes=st.sampled_from([(2, 2), (4, 12), (8, 16), (6, 20), (16, 64), (64, 128)]),
    dtype=dtypes,
)
@example(tokens=4, sizes=(64, 128), dtype=torch.bfloat16)
def test_index_rows(kernel_device, tokens, sizes, dtype):
    rope, width = sizes
    assert_writes_index_rows(make_projected(tokens, width, kernel_device, dtype), rope, rows=3 * PAGE)


def test_index_rows_of_one_number_and_of_nan(kernel_device):
    """A row of equal numbers is its bias; NaN stays in its own row."""
    projected = make_projected(3, 16, kernel_device, torch.float32)
    projected[0], projected[1, 3] = 2.5, torch.nan
    weight, bias = torch.ones(16, device=kernel_device), normal(16).to(kernel_device)
    turn, places = torch.zeros(3, 2, 4, device=kernel_device), torch.tensor([1, 6, 3], device=kernel_device)
    turn[:, 0] = 1
    storage = filled(2 * PAGE, 16, torch.float32, kernel_device)
    gpu.write_index_rows_gpu(projected, weight, bias, 1e-6, turn, storage, places, PAGE, True)
    torch.testing.assert_close(storage[1], bias)
    assert storage[6].isnan().all()
    assert storage[3].isfinite().all()
    storage = filled(2 * PAGE, 20, torch.uint8, kernel_device)
    gpu.write_index_rows_gpu(projected, weight, bias, 1e-6, turn, storage, places, PAGE, True)
    values, scales = read_paged(storage, 16)
    assert values[6].isnan().all()
    assert scales[6] == 1


def test_index_rows_that_do_not_fit_are_refused(kernel_device):
    projected, turn = torch.zeros(2, 6), turns_of(2, 2, "cpu")
    weight, places = torch.ones(6), places_of(2, 2, "cpu")
    for change in ({"storage": torch.empty(4, 7)}, {"places": places[:1]}, {"norm_bias": weight[:5]}):
        whole = {"storage": torch.empty(4, 6), "places": places, "norm_bias": weight}
        rest = {"eps": 1e-6, "turns": turn, "page_size": 4, "rotate": True}
        with pytest.raises(ValueError, match="fit"):
            gpu.write_index_rows_gpu(projected, weight, **rest, **{**whole, **change})
    storage = torch.empty(6, 10, dtype=torch.uint8)
    with pytest.raises(ValueError, match="multiple of 4, not 3 x 6"):
        gpu.write_index_rows_gpu(projected, weight, weight, 1e-6, turn, storage, places, 3, True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
class TestAtRealWidths:
    @pytest.mark.parametrize("tokens", [1, 33, 1000])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_rows(self, tokens, dtype):
        wide = normal(tokens, 704).to("cuda", dtype)
        assert_writes_latent_rows(wide[:, :576], 512, rows=1024)
        assert_writes_index_rows(wide[:, 576:], 64, rows=1024)

    def test_a_token_does_not_depend_on_the_others(self):
        projected = normal(100, 576).cuda().bfloat16()
        weight, turn = normal(512).cuda().bfloat16(), turns_of(100, 64, "cuda")
        index_weight = weight[:128]

        def rows(few: slice) -> tuple[Tensor, Tensor]:
            places = torch.arange(100, device="cuda")[few]
            latent = filled(128, 656, torch.uint8, "cuda")
            keys = filled(128, 132, torch.uint8, "cuda")
            gpu.write_latent_rows_gpu(projected[few], weight, 1e-5, turn[few], latent, places)
            index = projected[few, :128], index_weight, index_weight, 1e-6, turn[few]
            gpu.write_index_rows_gpu(*index, keys, places, 128, True)
            values = keys.view(-1)[: 128 * 128].view(128, 128)
            return latent[places], values[places]

        together = rows(slice(0, 100))
        for few in (slice(0, 1), slice(5, 6), slice(9, 40)):
            assert all(one.equal(of_all[few]) for one, of_all in zip(rows(few), together, strict=True))

    def test_past_2_to_the_31_bytes_and_numbers(self):
        weight, turn = normal(512).cuda().bfloat16(), turns_of(2, 64, "cuda")
        projected = normal(2, 576).cuda().bfloat16()
        rows = (1 << 32) // 656 // 64 * 64
        places = torch.tensor([1, rows - 1], device="cuda")
        near, near_places = filled(64, 656, torch.uint8, "cuda"), torch.tensor([1, 63], device="cuda")
        far = torch.empty(rows, 656, dtype=torch.uint8, device="cuda")
        gpu.write_latent_rows_gpu(projected, weight, 1e-5, turn, far, places)
        gpu.write_latent_rows_gpu(projected, weight, 1e-5, turn, near, near_places)
        assert far[places].equal(near[near_places])
        del far
        rows = (1 << 32) // 132 // 64 * 64
        index = projected[:, :128], weight[:128], weight[128:256], 1e-6, turn
        far, near = (torch.empty(count, 132, dtype=torch.uint8, device="cuda") for count in (rows, 64))
        gpu.write_index_rows_gpu(*index, far, torch.tensor([1, rows - 1], device="cuda"), 64, True)
        gpu.write_index_rows_gpu(*index, near, near_places, 64, True)
        of_page = far[rows - 64 :].view(-1), near.view(-1)
        for part in (slice(63 * 128, 64 * 128), slice(64 * 128 + 63 * 4, 64 * 132)):
            assert of_page[0][part].equal(of_page[1][part])
