"""The serving cache: sequences whose rows lie in pages of shared pools."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from megaspan.cache.pool import PagePools
from megaspan.model.batch import Batch
from megaspan.ops.rows import RowTable
from megaspan.ops.write_rows import IndexProjection, LatentProjection, write_index_rows, write_latent_rows

UNASSIGNED = 2**44  # in place of a page's first row: in no memory, on a GPU too, so reading it fails


class ReadyMarks(Protocol):
    """A restore on its way into the pools' pages, finished layer by layer."""

    def wait(self, layer: int) -> None:
        """Return when the layer's rows are there, in every pool; raise if they will not be."""
        ...


class PagedCache:
    """A table of `sequences` slots, each of up to `max_pages` pages, over the rows of some pools.

    The caller owns the pages and says with `assign` which of them a slot reads; `Batch.slots` says which
    slot each sequence is. The table is updated in place, so that a step costs the same at any length.

    starts: [sequences, max_pages] int64, the first row of each page, on the pools' device. scratch_slot:
    where the pools have a scratch page, one slot more, whose every page is that one: sequences that only
    fill up a batch have it.
    """

    def __init__(self, pools: PagePools, sequences: int, max_pages: int):
        self.pools, self.max_pages = pools, max_pages
        self.scratch_slot = sequences if pools.scratch_page is not None else None
        slots = sequences + (self.scratch_slot is not None)
        self.starts = torch.full((slots, max_pages), UNASSIGNED, dtype=torch.int64, device=pools.device)
        self._array = self.starts.numpy() if self.starts.is_cpu else None
        self._table = RowTable(self.starts, pools.page_size)
        self._capacity = [0] * slots  # tokens that the assigned pages of each slot can hold
        if pools.scratch_page is not None:
            self.starts[sequences] = pools.scratch_page * pools.page_size
            self._capacity[sequences] = self.reach
        self._restores: tuple[ReadyMarks, ...] = ()
        self._batch: Batch | None = None
        self._new_rows = torch.empty(0, dtype=torch.int64)

    @property
    def reach(self) -> int:
        """The most tokens that a sequence can have."""
        return self.max_pages * self.pools.page_size

    def assign(self, slot: int, first_index: int, pages: Sequence[int]) -> None:
        """Make `pages` the slot's pages from `first_index` on; it has none after them.

        ValueError where that leaves a gap, is longer than `max_pages`, or names a page outside the pools.
        """
        page_size, stop = self.pools.page_size, first_index + len(pages)
        if not 0 <= first_index <= self._capacity[slot] // page_size:
            raise ValueError(f"slot {slot} has no page before page {first_index}: assign pages in order")
        if stop > self.max_pages:
            raise ValueError(f"slot {slot} would have {stop} pages, but the table holds {self.max_pages}")
        if pages and not 0 <= min(pages) <= max(pages) < self.pools.total_pages:
            raise ValueError(f"slot {slot} is assigned a page outside the {self.pools.total_pages} there are")
        self._set(slot, first_index, np.array(pages, dtype=np.int64) * page_size)
        left = self._capacity[slot] // page_size - stop
        if left > 0:
            self._set(slot, stop, np.full(left, UNASSIGNED))
        self._capacity[slot] = stop * page_size

    def _set(self, slot: int, first_index: int, entries: np.ndarray) -> None:
        """Overwrite entries of the table; in main memory without the detour over tensor operations."""
        place = slice(first_index, first_index + len(entries))
        if self._array is not None:
            self._array[slot, place] = entries
        else:
            self.starts[slot, place] = torch.from_numpy(entries).to(self.starts.device)

    def release(self, slot: int) -> None:
        """Forget the slot's pages."""
        self.assign(slot, 0, ())

    def depend_on(self, restores: Sequence[ReadyMarks]) -> None:
        """Make the next pass wait, layer by layer, for the rows that these restores bring."""
        self._restores = tuple(restores)

    def table(self, batch: Batch) -> RowTable:
        """The whole table. ValueError for a slot whose pages cannot hold its sequence."""
        self.require_room(batch.table_rows, batch.total_lengths)
        self._batch = batch
        self._new_rows = self._table.rows(batch.sequence_ids, batch.positions[:, None])[:, 0]
        return self._table

    def require_room(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """ValueError for a slot whose pages cannot hold so many tokens."""
        for slot, length in zip(slots, lengths, strict=True):
            if length > self._capacity[slot]:
                raise ValueError(
                    f"slot {slot} has pages for {self._capacity[slot]} tokens, but the batch needs {length}"
                )

    @property
    def rotates_index(self) -> bool:
        return self.pools.formats["index"].rotate

    def write_latent(self, layer: int, batch: Batch, new: LatentProjection) -> Tensor:
        rows = self._rows_to_write("latent", layer, batch)
        write_latent_rows(new, rows, self._new_rows)
        return rows

    def write_index(self, layer: int, batch: Batch, new: IndexProjection) -> Tensor:
        rows = self._rows_to_write("index", layer, batch)
        write_index_rows(new, rows, self._new_rows, self.pools.page_size, self.rotates_index)
        return rows

    def commit(self, batch: Batch) -> None:
        self._batch, self._restores = None, ()

    def rows(self, pool: str, layer: int) -> Tensor:
        """All the stored rows of a layer, once every restore that the pass depends on has brought them."""
        for restore in self._restores:
            restore.wait(layer)
        return self.pools.rows(pool, layer)

    def _rows_to_write(self, pool: str, layer: int, batch: Batch) -> Tensor:
        if batch is not self._batch:
            raise ValueError("rows of a batch are written, but its table was not asked for")
        return self.rows(pool, layer)
