"""The host tier: pages in main memory, below those of the device."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megaspan.cache.pool import Segment


class HostTier:
    """Slots of one page each. A slot holds the page's rows of every segment side by side, in the order of a
    forward pass, so that no pool can be there without the others and a slot's bytes are a disk page.

    segments: what one page consists of (`PagePools.segments`). slots: how many pages fit. pin: page-lock
    the memory, which lets a GPU read it while other work runs; ignored where there is no CUDA.

    `memory` is uint8 [slots, page_bytes]. Only the thread of the engine takes and gives slots.
    """

    def __init__(self, segments: Sequence["Segment"], slots: int, pin: bool = False):
        if slots < 0:
            raise ValueError(f"a host tier cannot have {slots} slots")
        self.widths = [segment.pages.shape[1] for segment in segments]
        self.page_bytes = sum(self.widths)
        # Copies by index go a word at a time: eight bytes where every segment allows it.
        self._word = torch.int64 if all(width % 8 == 0 for width in self.widths) else torch.uint8
        self.memory = torch.empty(
            slots, self.page_bytes, dtype=torch.uint8, pin_memory=pin and torch.cuda.is_available()
        )
        self._free = list(range(slots))[::-1]
        self._is_free = [True] * slots

    @property
    def total(self) -> int:
        return len(self._is_free)

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """`count` free slots, or None (and none taken) where there are fewer."""
        if count > len(self._free):
            return None
        slots = [self._free.pop() for _ in range(count)]
        for slot in slots:
            self._is_free[slot] = False
        return slots

    def give(self, slots: Iterable[int]) -> None:
        """Free slots that were taken. ValueError, and none freed, where one of them is free already."""
        slots = list(slots)
        if len(set(slots)) < len(slots) or any(self._is_free[slot] for slot in slots):
            raise ValueError(f"host slots {slots} are not all taken, or named twice")
        for slot in slots:
            self._is_free[slot] = True
        self._free.extend(slots)

    def words(self, pages: Tensor) -> Tensor:
        """The bytes of pages, uint8 [N, B], seen as the words in which they are copied, [N, B / word]."""
        return pages.view(self._word)

    def columns(self, memory: Tensor) -> list[Tensor]:
        """For each segment its part of packed pages: uint8 [N, page_bytes] → words [N, width / word] each."""
        return [self.words(part) for part in memory.split(self.widths, dim=1)]
