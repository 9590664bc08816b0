"""The ragged batch: what one call of the model reads. A training pack and a serving step are both one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """T new tokens of S sequences, one sequence after the other.

    token_ids: [T] int64. query_lengths: tokens of each sequence in this batch. past_lengths: rows
    that each sequence already has in the cache. slots: the row of the cache's table that each sequence
    has, by default its place in the batch.
    """

    token_ids: Tensor
    query_lengths: tuple[int, ...]
    past_lengths: tuple[int, ...]
    slots: tuple[int, ...] | None = None

    @classmethod
    def of(
        cls,
        sequences: Sequence[Sequence[int] | Tensor],
        past: Sequence[int] | None = None,
        device: str = "cpu",
        slots: Sequence[int] | None = None,
    ) -> "Batch":
        """Pack the new tokens of S sequences; `past` holds the lengths already cached (default: none)."""
        pieces = [torch.as_tensor(sequence, dtype=torch.long, device=device) for sequence in sequences]
        lengths = tuple(len(piece) for piece in pieces)
        past_lengths = tuple(past) if past is not None else (0,) * len(pieces)
        return cls(torch.cat(pieces), lengths, past_lengths, tuple(slots) if slots is not None else None)

    @cached_property
    def table_rows(self) -> tuple[int, ...]:
        """The row of the cache's table that each of the S sequences has."""
        return self.slots if self.slots is not None else tuple(range(len(self.query_lengths)))

    @cached_property
    def sequence_ids(self) -> Tensor:
        """[T] int64: the row of the cache's table that each token's sequence has."""
        return self._repeated(self.table_rows)

    @cached_property
    def query_starts(self) -> tuple[int, ...]:
        """S + 1 offsets: the tokens of sequence s are query_starts[s] to query_starts[s + 1]."""
        starts = [0]
        for length in self.query_lengths:
            starts.append(starts[-1] + length)
        return tuple(starts)

    @cached_property
    def positions(self) -> Tensor:
        """[T] int64: each token's position in its own sequence."""
        device = self.token_ids.device
        if len(self.query_lengths) == 1:
            return torch.arange(self.past_lengths[0], self.total_lengths[0], device=device)
        offsets = [past - start for past, start in zip(self.past_lengths, self.query_starts, strict=False)]
        return torch.arange(len(self.token_ids), device=device) + self._repeated(offsets)

    @cached_property
    def visible(self) -> Tensor:
        """[T] int64: how many positions of its sequence each token may see, itself included."""
        return self.positions + 1

    @property
    def total_lengths(self) -> tuple[int, ...]:
        """Cached and new tokens of each sequence."""
        return tuple(past + new for past, new in zip(self.past_lengths, self.query_lengths, strict=True))

    @cached_property
    def longest(self) -> int:
        """The length of the longest sequence, cached and new tokens: no token sees more positions."""
        return max(self.total_lengths, default=0)

    def reading(self, positions: Tensor, sequence_ids: Tensor, visible: Tensor) -> "Batch":
        """The same batch, but its tokens' numbers are what these tensors [T] hold whenever they are read.

        A CUDA graph is captured over such a batch once and replayed for others. What is known without
        looking into tensors must hold for all of them: past_lengths are then the most that there may be.
        """
        batch = replace(self)
        vars(batch).update(positions=positions, sequence_ids=sequence_ids, visible=visible)
        return batch

    def _repeated(self, values: Sequence[int]) -> Tensor:
        """[T] int64: each sequence's value at each of its tokens."""
        device = self.token_ids.device
        if len(self.query_lengths) == 1:
            return torch.full_like(self.token_ids, values[0])
        of_sequences = torch.tensor(values, dtype=torch.int64, device=device)
        if set(self.query_lengths) == {1}:  # every sequence decodes
            return of_sequences
        lengths = torch.tensor(self.query_lengths, device=device)
        return torch.repeat_interleave(of_sequences, lengths, output_size=len(self.token_ids))
