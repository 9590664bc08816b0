"""FP8 index rows in their storage: page by page, values and then scales."""

import pytest
import torch
from torch import Tensor

from megaspan.ops.quant import (
    decode_index_rows,
    dequantize_rows,
    index_row_views,
    index_rows,
    load_index_rows,
    native,
    quantize_rows,
    store_index_rows,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")
WIDTH = 128  # that of the released model
needs_native = pytest.mark.skipif(not native.supports(torch.empty(1, 1)), reason="no C compiler here")
versions = pytest.mark.parametrize(
    "store",
    [
        pytest.param(index_rows.store_index_rows, id="plain"),
        pytest.param(native.store_index_rows, id="native", marks=needs_native),
    ],
)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def stored(keys: Tensor, page_size: int) -> Tensor:
    """The keys in order, in whole pages."""
    storage = torch.full((len(keys), keys.shape[1] + 4), 255, dtype=torch.uint8)
    store_index_rows(keys, storage, torch.arange(len(keys)), page_size)
    return storage


@versions
@pytest.mark.parametrize("rotate", [True, False])
@pytest.mark.parametrize("count", [0, 1, 2, 7])
@pytest.mark.parametrize("width", [1, 32, 128])
@pytest.mark.parametrize("page_size", [4, 64])
def test_a_page_holds_all_values_and_then_all_scales(page_size, width, count, rotate, store):
    """Byte for byte, rows in any order among others that stay as they are."""
    keys, pages = normal(count, width) * 30, 3
    places = torch.randperm(pages * page_size, generator=torch.Generator().manual_seed(count))[:count]
    storage = torch.full((pages * page_size, width + 4), 0xA5, dtype=torch.uint8)
    store(keys, storage, places, page_size, rotate)
    values, scale = quantize_rows(keys, rotate)
    expected = torch.full((storage.numel(),), 0xA5, dtype=torch.uint8)
    for row, place in enumerate(places.tolist()):
        page = place // page_size * page_size * (width + 4)
        first = page + place % page_size * width
        expected[first : first + width] = values[row].view(torch.uint8)
        first = page + page_size * width + place % page_size * 4
        expected[first : first + 4] = scale[row : row + 1].view(torch.uint8)
    assert torch.equal(storage.flatten(), expected)
    loaded = load_index_rows(storage, places, page_size)
    for kept, whole in zip(loaded, (values, scale), strict=True):
        assert torch.equal(kept.float(), whole.float())
    assert torch.equal(decode_index_rows(storage, places, page_size), dequantize_rows(values, scale))


@pytest.mark.parametrize("page_size", [4, 64])
def test_a_page_copied_elsewhere_reads_the_same(page_size):
    """What tiers and restores rely on: a page's bytes do not depend on where the page lies."""
    keys = normal(2 * page_size, WIDTH)
    storage, other = stored(keys, page_size), torch.full((5 * page_size, WIDTH + 4), 255, dtype=torch.uint8)
    pages, others = (rows.view(-1, page_size * (WIDTH + 4)) for rows in (storage, other))
    others[[3, 1]] = pages
    places = torch.cat((torch.arange(page_size) + 3 * page_size, torch.arange(page_size) + page_size))
    moved = decode_index_rows(other, places, page_size)
    assert torch.equal(moved, decode_index_rows(storage, torch.arange(len(keys)), page_size))
    assert others[[0, 2, 4]].eq(255).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_without_a_kernel_for_it_stores_and_reads_the_same_bytes():
    keys, places = normal(70, WIDTH), torch.arange(128).flip(0)[:70]
    storage = torch.full((128, WIDTH + 4), 0xA5, dtype=torch.uint8)
    on_gpu = storage.cuda()
    store_index_rows(keys, storage, places, 64)
    store_index_rows(keys.cuda(), on_gpu, places.cuda(), 64)
    assert torch.equal(on_gpu.cpu(), storage)
    read = decode_index_rows(on_gpu, places.cuda(), 64)
    assert torch.equal(read.cpu(), decode_index_rows(storage, places, 64))


def test_views_are_the_storage_itself():
    storage = stored(normal(12, 16), 4)
    values, scales = index_row_views(storage, 4)
    assert (values.dtype, values.shape) == (torch.float8_e4m3fn, (3, 4, 16))
    assert (scales.dtype, scales.shape) == (torch.float32, (3, 4))
    scales[1, 2] = 0
    assert decode_index_rows(storage, torch.arange(12), 4).eq(0).all(1).nonzero().tolist() == [[6]]


@versions
def test_storage_that_does_not_fit_is_refused(store):
    keys, places = normal(2, 6), torch.tensor([0, 1])
    storage = torch.zeros(8, 10, dtype=torch.uint8)
    for wrong, page_size, words in (
        (storage, 3, "whole pages of 3"),
        (torch.zeros(8, 20, dtype=torch.uint8)[:, :10], 4, "contiguous"),
        (storage, 1, "multiple of 4, not 1 x 6: choose another page size"),
    ):
        with pytest.raises(ValueError, match=words):
            store(keys, wrong, places, page_size)
    for outside in (-1, 8, -(2**62)):
        with pytest.raises(IndexError):
            store(keys, storage, torch.tensor([0, outside]), 4)


def test_keys_of_another_width_or_number_are_refused():
    storage = torch.zeros(8, 20, dtype=torch.uint8)
    for keys, places in ((normal(2, 1), [0, 1]), (normal(2, 16), [0])):
        with pytest.raises(ValueError, match="do not fit"):
            store_index_rows(keys, storage, torch.tensor(places), 4)
