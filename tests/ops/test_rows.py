"""Row addresses: paged and contiguous tables against plain Python."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megaspan.ops.rows import RowTable


@st.composite
def lookups(draw):
    """A table of S sequences with P pages, and T tokens that each ask for K positions (-1 for none)."""
    sequences, pages, page_size = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(1, 6))
    order = draw(st.permutations(range(sequences * pages + 2)))
    starts = torch.tensor(order[: sequences * pages]).view(sequences, pages) * page_size
    tokens, slots = draw(st.integers(0, 5)), draw(st.integers(0, 4))
    position = st.integers(-1, pages * page_size - 1)
    ids = draw(st.lists(st.integers(0, sequences - 1), min_size=tokens, max_size=tokens))
    asked = draw(st.lists(position, min_size=tokens * slots, max_size=tokens * slots))
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    positions = torch.tensor(asked, dtype=dtype).view(tokens, slots)
    return RowTable(starts, page_size), torch.tensor(ids, dtype=torch.long), positions


@settings(max_examples=100)
@given(lookups())
def test_rows_equal_a_loop(lookup):
    table, sequence_ids, positions = lookup
    rows = table.rows(sequence_ids, positions)
    assert rows.dtype == torch.int64
    assert rows.shape == positions.shape
    starts = table.starts.tolist()
    for sequence, asked, found in zip(sequence_ids.tolist(), positions.tolist(), rows.tolist(), strict=True):
        for position, row in zip(asked, found, strict=True):
            page, offset = divmod(position, table.page_size)
            assert row == (-1 if position == -1 else starts[sequence][page] + offset)


def test_the_same_rows_through_pages_of_every_size():
    """A contiguous stretch is one page, or many that happen to follow each other."""
    ids, positions = torch.tensor([0, 1]), torch.tensor([[0, 5, 11, -1], [3, 4, 7, 8]])
    contiguous = RowTable(torch.tensor([[0], [12]]), 12).rows(ids, positions)
    for page_size in (1, 2, 3, 4, 6):
        starts = torch.arange(24).view(2, -1)[:, ::page_size]
        assert torch.equal(RowTable(starts, page_size).rows(ids, positions), contiguous)


def test_rows_beyond_32_bits():
    """P18: a row number past 2^31 stays positive, whatever the dtype of the positions."""
    far = 3 << 31
    positions = torch.tensor([[0, 7, -1]], dtype=torch.int32)
    for starts in (torch.tensor([[far]]), torch.tensor([[far, far + 4]])):
        rows = RowTable(starts, 4 if starts.shape[1] > 1 else 8).rows(torch.tensor([0]), positions)
        assert rows.tolist() == [[far, far + 7, -1]]


@pytest.mark.parametrize("pages", [1, 3])
@pytest.mark.parametrize("sequences", [1, 2])
def test_a_sequence_that_is_not_in_the_table_is_refused(sequences, pages):
    table = RowTable(torch.zeros(sequences, pages, dtype=torch.long), 4)
    with pytest.raises(IndexError):
        table.rows(torch.tensor([sequences]), torch.tensor([[0, 1]]))
