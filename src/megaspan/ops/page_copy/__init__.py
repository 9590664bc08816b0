"""Copy scattered pages between a GPU and pinned host memory, or within main memory."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megaspan.ops.page_copy.buffered import copy_buffered
from megaspan.ops.page_copy.reference import copy_pages_reference

__all__ = ["PageCopy", "copy_buffered", "copy_pages_reference"]

BYTES_AT_ONCE = 32 << 20  # what one launch moves at least, if there is so much: under a millisecond


class PageCopy:
    """Copies pages from one place to another, each page in a number of segments.

    Where one side is a GPU's memory and the other pinned host memory, one kernel reads or writes the host's
    memory itself, for all pages of several segments: the driver's copies of each page would cost the CPU more
    than the bus. Elsewhere pages are gathered into a buffer that is copied. Both run in the current stream;
    what a kernel writes to the host may be read once that stream has been waited for.

    sources, targets: for each segment its part of all pages, [N, B] and [M, B], all uint8 or all int64. B may
    differ from segment to segment, and pages need not follow each other. They must stay where they are.
    """

    def __init__(self, sources: Sequence[Tensor], targets: Sequence[Tensor]):
        self.sources, self.targets = list(sources), list(targets)
        for source, target in zip(self.sources, self.targets, strict=True):
            if source.dim() != 2 or target.dim() != 2 or source.shape[1] != target.shape[1]:
                raise ValueError(
                    f"pages {list(source.shape)} and {list(target.shape)} must be [N, B] and [M, B]"
                )
        self._page_bytes = sum(source.shape[1] * source.element_size() for source in self.sources)
        self._launch = self._launcher()

    def numbers(self, source_pages: Sequence[int], target_pages: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The numbers of pages [P] as `copy` takes them: int64, where they are used."""
        devices = self.sources[0].device, self.targets[0].device
        if self._launch is not None:
            devices = (self._device,) * 2
        pages = zip((source_pages, target_pages), devices, strict=True)
        first, second = (torch.tensor(numbers, dtype=torch.int64).to(device) for numbers, device in pages)
        return first, second

    def segments_at_once(self, pages: int) -> int:
        """How many segments of so many pages a call should copy: a launch of more costs the CPU no more."""
        if self._launch is None:
            return 1
        bytes_of_segment = max(1, pages * self._page_bytes // len(self.sources))
        return max(1, BYTES_AT_ONCE // bytes_of_segment)

    def copy(
        self,
        segments: range,
        source_pages: Tensor,
        target_pages: Tensor,
        buffer_bytes: int = 64 << 20,
        keep_pace: Callable[[], None] = lambda: None,
    ) -> None:
        """Set in these segments each target page, [P] different ones, to its source page [P]; see `numbers`.

        buffer_bytes: how much is gathered at a time. keep_pace: called after each such part, or the launch.
        """
        if self._launch is not None:
            self._launch(segments, source_pages, target_pages)
            return keep_pace()
        for number in segments:
            pair = self.sources[number], self.targets[number]
            copy_buffered(*pair, source_pages, target_pages, buffer_bytes, keep_pace)

    @property
    def _device(self) -> torch.device:
        return next(side.device for side in (self.sources[0], self.targets[0]) if side.is_cuda)

    def _launcher(self) -> Callable[[range, Tensor, Tensor], None] | None:
        """The kernel with the addresses of all pages, if it can reach both sides."""
        sides = self.sources[0], self.targets[0]
        if not any(side.is_cuda for side in sides) or not all(
            side.is_cuda or side.is_pinned() for side in sides
        ):
            return None
        from megaspan.ops.page_copy.gpu import PageCopyLauncher

        return PageCopyLauncher(self.sources, self.targets, self._device)
