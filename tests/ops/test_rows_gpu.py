"""Row addresses in one launch, against the PyTorch version."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from megaspan.ops.rows import RowTable
from tests.ops.test_rows import lookups

gpu = pytest.importorskip("megaspan.ops.rows_gpu", reason="no Triton here")


def assert_same_rows(device: str, table: RowTable, sequence_ids: Tensor, positions: Tensor) -> None:
    expected = table.rows(sequence_ids, positions)
    moved = (table.starts, sequence_ids, positions)
    starts, sequence_ids, positions = (
        part.to(device) if device != "cpu" else part for part in moved
    )  # to() keeps strides
    actual = gpu.rows_gpu(starts, table.page_size, sequence_ids, positions)
    assert actual.dtype == torch.int64
    assert torch.equal(actual.cpu(), expected)


@settings(max_examples=30)
@given(lookup=lookups())
def test_rows_equal_those_of_the_cpu(kernel_device, lookup):
    assert_same_rows(kernel_device, *lookup)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("pages", [1, 40])
@pytest.mark.parametrize(("tokens", "slots"), [(3, 1023), (2, 1024), (1, 1030), (1030, 1), (300, 7)])
def test_tiles_of_every_shape(kernel_device, tokens, slots, pages, dtype):
    """Rows past 2**31, and more positions than a program takes in either direction."""
    generator = torch.Generator().manual_seed(tokens)
    starts = (torch.randperm(3 * pages, generator=generator) * 64 + (3 << 31)).view(3, pages)
    ids = torch.randint(0, 3, (tokens,), generator=generator)
    positions = torch.randint(-1, pages * 64, (tokens, slots), generator=generator).to(dtype)
    assert_same_rows(kernel_device, RowTable(starts, 64), ids, positions)


@pytest.mark.parametrize("pages", [1, 5])
def test_views_and_entries_that_are_not_named(kernel_device, pages):
    """Every other page and token, positions side by side; what is not named is no address."""
    starts = torch.full((4, 2 * pages), -(2**62))
    starts[2, ::2] = torch.arange(pages) * 100
    positions = torch.tensor([[0, -1, 3], [3 * pages - 1, 2, -1]]).T.contiguous().T
    table = RowTable(starts[:, ::2], 3 if pages > 1 else 1 << 20)
    assert_same_rows(kernel_device, table, torch.tensor([2, 0, 2, 0])[::2], positions)
    bare = replace(table, starts=table.starts.contiguous())
    rows = gpu.rows_gpu(
        bare.starts.to(kernel_device),
        bare.page_size,
        torch.tensor([0], device=kernel_device),
        torch.tensor([[-1]], device=kernel_device),
    )
    assert rows.tolist() == [[-1]]


@pytest.mark.parametrize("shape", [(0, 5), (5, 0)])
def test_nothing_asked_for(kernel_device, shape):
    positions = torch.zeros(shape, dtype=torch.int32, device=kernel_device)
    ids = torch.zeros(shape[0], dtype=torch.int64, device=kernel_device)
    rows = gpu.rows_gpu(torch.zeros(1, 2, dtype=torch.int64, device=kernel_device), 4, ids, positions)
    assert (rows.shape, rows.dtype) == (shape, torch.int64)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_prefill_at_real_width():
    """8,192 tokens that each select 2,048 of a million positions."""
    generator = torch.Generator("cuda").manual_seed(1)
    starts = (torch.randperm(2 * 16_384, generator=generator, device="cuda") * 64).view(2, 16_384)
    ids = torch.arange(8192, device="cuda") // 4096
    shape = 8192, 2048
    positions = torch.randint(-1, 1 << 20, shape, generator=generator, device="cuda", dtype=torch.int32)
    rows = RowTable(starts, 64).rows(ids, positions)
    known = positions.long().clamp(min=0)
    expected = starts[ids[:, None], known // 64] + known % 64
    assert torch.equal(rows, expected.where(positions >= 0, -1))
