"""The ragged batch: positions, the table's rows, and what is cached of the sequences."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megaspan.model.batch import Batch

SEQUENCES = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 9)), min_size=1, max_size=5
)  # new tokens, cached tokens


@given(SEQUENCES, st.randoms(use_true_random=False), st.booleans())
def test_tokens_know_their_slot_and_position(sequences, random, named):
    slots = random.sample(range(20), len(sequences)) if named else None
    batch = Batch.of([[1] * new for new, _ in sequences], [past for _, past in sequences], slots=slots)
    expected = [
        (slots[ordinal] if slots else ordinal, past + step)
        for ordinal, (new, past) in enumerate(sequences)
        for step in range(new)
    ]
    actual = list(zip(batch.sequence_ids.tolist(), batch.positions.tolist(), strict=True))
    assert actual == expected
    assert batch.sequence_ids.dtype == batch.positions.dtype == torch.int64
    assert batch.visible.tolist() == [position + 1 for _, position in expected]


@pytest.mark.parametrize("sequences", [1, 3])
def test_slots_of_a_decoding_step(sequences):
    batch = Batch.of([[5]] * sequences, [7] * sequences, slots=[9, 2, 4][:sequences])
    assert batch.sequence_ids.tolist() == [9, 2, 4][:sequences]
    assert batch.positions.tolist() == [7] * sequences
    assert batch.table_rows == (9, 2, 4)[:sequences]


def test_without_slots_a_sequence_has_the_row_of_its_place():
    assert Batch.of([[1], [2, 3]]).table_rows == (0, 1)


def test_the_longest_sequence_bounds_what_any_token_sees():
    batch = Batch.of([[1], [2, 3]], [7, 5])
    assert batch.longest == 8 == batch.visible.max()
    assert Batch.of([[]]).longest == 0


def test_numbers_in_tensors_are_read_when_they_are_asked_for():
    """The batch that they are given to is not changed."""
    plain = Batch.of([[5], [6]], [9, 9], slots=[3, 3])
    numbers = torch.zeros(3, 2, dtype=torch.int64)
    batch = plain.reading(*numbers)
    numbers[:] = torch.tensor([[4, 2], [0, 1], [8, 9]])
    assert torch.equal(torch.stack((batch.positions, batch.sequence_ids, batch.visible)), numbers)
    assert (batch.longest, batch.query_lengths, batch.table_rows) == (10, (1, 1), (3, 3))
    assert (plain.positions.tolist(), plain.sequence_ids.tolist()) == ([9, 9], [3, 3])
