"""Where the cached rows of each sequence live."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class RowTable:
    """Row numbers of the positions of S sequences, kept in pages of `page_size` rows.

    starts: [S, P] int64, the first row of each page. A contiguous cache has one page a sequence,
    as long as the sequence can grow, so every kernel needs only this one form of address.
    """

    starts: Tensor
    page_size: int

    def rows(self, sequence_ids: Tensor, positions: Tensor) -> Tensor:
        """Turn positions [T, K] of the sequences [T] into int64 row numbers [T, K]; -1 stays -1.

        IndexError for a sequence that is not in the table; a GPU does not check it, which would make it wait.
        """
        if self.starts.is_cuda:
            from megaspan.ops.rows_gpu import rows_gpu

            return rows_gpu(self.starts, self.page_size, sequence_ids, positions)
        positions_TK = positions.long()
        if self.starts.shape[1] == 1:  # one page: a contiguous cache
            first_T1 = self.starts.index_select(0, sequence_ids)
            return (first_T1 + positions_TK).where(positions_TK >= 0, -1)
        known_TK = positions_TK.clamp(min=0)
        starts_TK = self.starts[sequence_ids[:, None], known_TK // self.page_size]
        return (starts_TK + known_TK % self.page_size).where(positions_TK >= 0, -1)
