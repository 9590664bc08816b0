"""Page copies by one kernel, which reads or writes pinned host memory at the address that the host uses.

A few programs keep enough bytes on the way to fill the bus, and leave the other multiprocessors to the model.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 32
BLOCK = 2048  # words that a program moves at a time: 16 KiB where pages are whole words


@triton.jit(do_not_specialize=["first_segment", "segments", "pages", "chunks"])
def _copy(
    table_ptr,
    source_pages_ptr,
    target_pages_ptr,
    first_segment,
    segments,
    pages,
    chunks,
    WORD_BYTES: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Pages [P] of `segments` segments, the first segment first, `chunks` blocks for the widest of pages.

    table: int64 [G, 5]: addresses of source and target, bytes from page to page in both, words in a page.
    """
    word = tl.int64 if WORD_BYTES == 8 else tl.uint8
    of_segment = pages * chunks
    for item in range(tl.program_id(0), segments * of_segment, tl.num_programs(0)):
        entry = table_ptr + (first_segment + item // of_segment) * 5
        page, chunk = item % of_segment // chunks, item % chunks
        source = tl.load(entry) + tl.load(source_pages_ptr + page) * tl.load(entry + 2)
        target = tl.load(entry + 1) + tl.load(target_pages_ptr + page) * tl.load(entry + 3)
        words = tl.multiple_of(tl.load(entry + 4), ALIGNMENT // WORD_BYTES)
        offsets = chunk * BLOCK + tl.arange(0, BLOCK)
        source_words = tl.multiple_of(source.to(tl.pointer_type(word)), ALIGNMENT) + offsets
        target_words = tl.multiple_of(target.to(tl.pointer_type(word)), ALIGNMENT) + offsets
        tl.store(target_words, tl.load(source_words, mask=offsets < words), mask=offsets < words)


class PageCopyLauncher:
    """See `PageCopy`. sources, targets: [N, B] and [M, B] for each segment, of 8 or 1 byte a word."""

    def __init__(self, sources: Sequence[Tensor], targets: Sequence[Tensor], device: torch.device):
        self._word_bytes = sources[0].element_size()
        if self._word_bytes not in (1, 8) or any(side.stride(1) != 1 for side in (*sources, *targets)):
            raise ValueError("pages must be of int64 or uint8, the words of a page side by side")
        table = [_entry(*pair) for pair in zip(sources, targets, strict=True)]
        numbers_of_bytes = [(*entry[:4], entry[4] * self._word_bytes) for entry in table]
        self._is_aligned = all(number % 16 == 0 for numbers in numbers_of_bytes for number in numbers)
        self._table = torch.tensor(table, dtype=torch.int64).to(device)
        self._chunks = max(1, triton.cdiv(max(entry[4] for entry in table), BLOCK))
        nothing = torch.zeros(0, dtype=torch.int64, device=device)
        self._launch(range(0), nothing, nothing)  # compiled now, not while a transfer is timed

    def __call__(self, segments: range, source_pages: Tensor, target_pages: Tensor) -> None:
        """Copy pages [P], int64 on the GPU, of consecutive segments, in the current stream."""
        if len(segments) and len(source_pages):
            self._launch(segments, source_pages, target_pages)

    def _launch(self, segments: range, source_pages: Tensor, target_pages: Tensor) -> None:
        _copy[(PROGRAMS,)](
            self._table,
            source_pages,
            target_pages,
            segments.start,
            len(segments),
            len(source_pages),
            self._chunks,
            WORD_BYTES=self._word_bytes,
            ALIGNMENT=16 if self._is_aligned else self._word_bytes,
            BLOCK=BLOCK,
            num_warps=8,
        )


def _entry(source: Tensor, target: Tensor) -> tuple[int, int, int, int, int]:
    step, target_step = (side.stride(0) * side.element_size() for side in (source, target))
    return source.data_ptr(), target.data_ptr(), step, target_step, source.shape[1]
