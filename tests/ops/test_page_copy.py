"""Page copies: each named page arrives whole, and no other byte changes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megaspan.ops.page_copy import PageCopy, copy_pages_reference

LATENT, INDEX = 64 * 1152, 64 * 132  # bytes of a page at the model's widths


def random_bytes(pages: int, width: int, seed: int) -> Tensor:
    return torch.randint(
        0, 256, (pages, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def packed(pages: int, widths: list[int], seed: int, word: torch.dtype) -> list[Tensor]:
    """Segments that lie side by side in packed pages."""
    return [part.view(word) for part in random_bytes(pages, sum(widths), seed).split(widths, dim=1)]


def separate(pages: int, widths: list[int], seed: int, word: torch.dtype) -> list[Tensor]:
    """Segments each in memory of its own."""
    return [random_bytes(pages, width, seed + number).view(word) for number, width in enumerate(widths)]


@st.composite
def copies(draw):
    """Sources and targets, one of them packed; pages of both in any order; and a range of the segments."""
    word = draw(st.sampled_from([torch.uint8, torch.int64]))
    multiple = draw(st.sampled_from([8, 16])) if word == torch.int64 else 1
    widths = draw(st.lists(st.integers(1, 40).map(multiple.__mul__), min_size=1, max_size=4))
    layouts = draw(st.permutations([packed, separate]))
    sources, targets = (layout(9, widths, seed, word) for layout, seed in zip(layouts, (1, 50), strict=True))
    count = draw(st.integers(0, 9))
    numbers = [torch.tensor(draw(st.permutations(range(9)))[:count], dtype=torch.int64) for _ in range(2)]
    first = draw(st.integers(0, len(widths)))
    return sources, targets, range(first, draw(st.integers(first, len(widths)))), *numbers


def expected_after(
    sources: list[Tensor], targets: list[Tensor], segments: range, *numbers: Tensor
) -> list[Tensor]:
    """The targets' content after the copy, by the reference."""
    results = [target.clone() for target in targets]
    chosen = slice(segments.start, segments.stop)
    copy_pages_reference(sources[chosen], results[chosen], *numbers)
    return results


@settings(max_examples=50)
@given(copies(), st.sampled_from([1, 300, 1 << 20]))
def test_through_buffers_of_any_size(arguments, buffer_bytes):
    sources, targets, segments, *numbers = arguments
    expected, paces = expected_after(*arguments), []
    copy = PageCopy(sources, targets)
    copy.copy(
        segments, *copy.numbers(*(of.tolist() for of in numbers)), buffer_bytes, lambda: paces.append(1)
    )
    assert all(map(torch.equal, targets, expected))
    widths = [sources[number].shape[1] * sources[number].element_size() for number in segments]
    parts = [-(-len(numbers[0]) // max(1, buffer_bytes // width)) for width in widths]
    assert len(paces) == sum(max(1, count) for count in parts)


@settings(max_examples=10)
@given(arguments=copies())
def test_by_a_kernel(kernel_device, arguments):
    """Under the interpreter both sides are main memory."""
    gpu = pytest.importorskip("megaspan.ops.page_copy.gpu")
    sources, targets, segments, *numbers = arguments
    expected = expected_after(*arguments)
    if kernel_device == "cuda":
        sources, targets = [part.cuda() for part in sources], [part.cuda() for part in targets]
    launch = gpu.PageCopyLauncher(sources, targets, torch.device(kernel_device))
    launch(segments, *(of.to(kernel_device) for of in numbers))
    assert all(torch.equal(target.cpu(), wanted) for target, wanted in zip(targets, expected, strict=True))


def test_a_page_of_many_blocks(kernel_device):
    """Pages just below, at and above a program's block, and more of them than there are programs."""
    gpu = pytest.importorskip("megaspan.ops.page_copy.gpu")
    widths = [8 * (gpu.BLOCK + more) for more in (-2, 0, 2, gpu.BLOCK)]
    sources, targets = separate(12, widths, 1, torch.int64), packed(12, widths, 50, torch.int64)
    numbers = torch.arange(12), torch.arange(12).flip(0)
    expected = expected_after(sources, targets, range(4), *numbers)
    if kernel_device == "cuda":
        sources, targets = [part.cuda() for part in sources], [part.cuda() for part in targets]
    launch = gpu.PageCopyLauncher(sources, targets, torch.device(kernel_device))
    launch(range(4), *(of.to(kernel_device) for of in numbers))
    assert all(torch.equal(target.cpu(), wanted) for target, wanted in zip(targets, expected, strict=True))


def test_segments_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="must be"):
        PageCopy([torch.zeros(2, 3)], [torch.zeros(2, 4)])


# --- between a GPU and pinned host memory -----------------------------------------------------------------

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("widths", [[LATENT, INDEX, 64 * 656], [20, 52, 7]])
def test_there_and_back(widths):
    """Pages of real widths, and of odd ones, through pinned memory and back into other pages."""
    word = torch.int64 if widths[0] == LATENT else torch.uint8
    device_pages = [part.cuda() for part in separate(40, widths, 1, word)]
    memory = torch.full((30, sum(widths)), 255, dtype=torch.uint8).pin_memory()
    host_pages = [part.view(word) for part in memory.split(widths, dim=1)]
    before = [part.clone() for part in device_pages]
    down, up = PageCopy(device_pages, host_pages), PageCopy(host_pages, device_pages)
    segments = range(len(widths))
    assert down.segments_at_once(1) >= len(widths)
    down.copy(segments, *down.numbers([39, 3, 0, 17], [5, 29, 0, 7]))
    torch.cuda.synchronize()
    untouched = [slot for slot in range(30) if slot not in (5, 29, 0, 7)]
    assert (memory[untouched] == 255).all()
    for part in device_pages:
        part.fill_(-1 if word == torch.int64 else 255)
    up.copy(segments, *up.numbers([7, 5, 0, 29], [1, 2, 30, 4]))
    for part, old in zip(device_pages, before, strict=True):
        assert torch.equal(part[[1, 2, 30, 4]], old[[17, 39, 0, 3]])
        rest = [page for page in range(40) if page not in (1, 2, 30, 4)]
        assert (part[rest].view(torch.uint8) == 255).all()


@pytest.mark.gpu
@needs_gpu
def test_pages_beyond_32_bits():
    """A page that lies past 2**31 words of a pool, of 18 GB."""
    pages = (1 << 31) // (LATENT // 8) + 5
    pool = torch.zeros(pages, LATENT // 8, dtype=torch.int64, device="cuda")
    pool[pages - 1] = torch.arange(LATENT // 8, device="cuda")
    host = torch.zeros(2, LATENT // 8, dtype=torch.int64).pin_memory()
    down, up = PageCopy([pool], [host]), PageCopy([host], [pool])
    down.copy(range(1), *down.numbers([pages - 1], [1]))
    torch.cuda.synchronize()
    assert torch.equal(host[1], torch.arange(LATENT // 8))
    up.copy(range(1), *up.numbers([1], [pages - 2]))
    assert torch.equal(pool[pages - 2], pool[pages - 1])


@pytest.mark.gpu
@needs_gpu
def test_host_memory_that_is_not_pinned_goes_through_a_buffer():
    pool, host = [torch.arange(64, device="cuda").view(8, 8)], [torch.zeros(3, 8, dtype=torch.int64)]
    down, up = PageCopy(pool, host), PageCopy(host, pool)
    assert down.segments_at_once(1) == 1
    down.copy(range(1), *down.numbers([7, 2], [0, 2]), buffer_bytes=64)
    assert host[0][:, 0].tolist() == [56, 0, 16]
    up.copy(range(1), *up.numbers([0], [1]), buffer_bytes=64)
    assert pool[0][1].tolist() == list(range(56, 64))
