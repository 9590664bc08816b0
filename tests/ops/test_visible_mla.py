"""Latent attention to every visible row: the bits of a selection of them all, whatever shares the call."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megaspan.ops.quant import encode_latent_rows
from megaspan.ops.rows import RowTable
from megaspan.ops.sparse_mla import native, sparse_mla, sparse_mla_reference, visible_mla
from megaspan.ops.sparse_mla.visible import tokens_per_tile
from tests.allocations import peak_bytes

MIB = 1 << 20
WIDTH, VALUE_WIDTH, PAGE = 24, 16, 4
needs_native = pytest.mark.skipif(
    not native.supports(torch.empty(1, 1, 1), torch.empty(1, 1)), reason="no C compiler here"
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture(params=[pytest.param("compiled", marks=needs_native), "PyTorch"])
def version(request, monkeypatch):
    if request.param == "PyTorch":
        monkeypatch.setattr(native, "supports", lambda query, rows: False)


class Case:
    """Sequences of some lengths on shuffled pages, and queries for the last tokens of each."""

    def __init__(
        self, queries: list[int], lengths: list[int], dtype: torch.dtype = torch.float32, seed: int = 0
    ):
        generator = torch.Generator().manual_seed(seed)
        pages = -(-max(lengths) // PAGE)
        order = torch.randperm(len(lengths) * pages, generator=generator)
        self.table = RowTable(order.view(len(lengths), pages) * PAGE, PAGE)
        self.rows = torch.full((len(order) * PAGE, WIDTH), torch.nan, dtype=dtype)
        for sequence, length in enumerate(lengths):
            written = self.table.rows(torch.tensor([sequence]), torch.arange(length)[None])[0]
            self.rows[written] = torch.randn(length, WIDTH, generator=generator).to(dtype)
        self.query = torch.randn(sum(queries), 3, WIDTH, generator=generator).to(dtype)
        self.sequence_ids = torch.repeat_interleave(torch.arange(len(queries)), torch.tensor(queries))
        ends = [torch.arange(total - new, total) + 1 for new, total in zip(queries, lengths, strict=True)]
        self.visible = torch.cat(ends)

    def attend(self, tokens: slice = slice(None), budget_bytes: int = 64 * MIB) -> Tensor:
        places = self.table, self.sequence_ids[tokens], self.visible[tokens]
        return visible_mla(self.query[tokens], self.rows, *places, VALUE_WIDTH, 0.3, budget_bytes)

    def selected(self) -> Tensor:
        """[T, L] row numbers, in order, then -1."""
        positions_L = torch.arange(int(self.visible.max()))
        return self.table.rows(self.sequence_ids, positions_L.where(positions_L < self.visible[:, None], -1))


batches = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 150)), min_size=1, max_size=4).filter(
    lambda batch: any(new for new, _ in batch)
)


@settings(max_examples=25)
@given(batch=batches, seed=st.integers(0, 99))
def test_equals_the_plain_loop(batch, seed):
    case = Case([new for new, _ in batch], [new + past for new, past in batch], seed=seed)
    expected = sparse_mla_reference(case.query, case.rows, case.selected(), VALUE_WIDTH, 0.3)
    torch.testing.assert_close(case.attend(), expected, rtol=1e-5, atol=1e-5)


@needs_native
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "fp8"])
def test_has_the_bits_of_a_selection_of_everything(kind):
    case = Case([40, 1, 3], [300, 77, 3], torch.float32 if kind == "float32" else torch.bfloat16)
    if kind == "fp8":
        case.rows = encode_latent_rows(case.rows, VALUE_WIDTH)
    expected = sparse_mla(case.query, case.rows, case.selected(), VALUE_WIDTH, 0.3)
    assert torch.equal(case.attend(), expected)
    assert torch.equal(case.attend(budget_bytes=1), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_neither_company_nor_chunks_nor_budget_change_a_bit(version, dtype):
    case = Case([33, 1, 7], [150, 301, 7], dtype)
    expected = case.attend()
    for budget_bytes in (1, 60_000, 200_000):
        assert torch.equal(case.attend(budget_bytes=budget_bytes), expected)
    for first, last in ((0, 1), (0, 17), (17, 33), (33, 34), (34, 41), (5, 36)):
        assert torch.equal(case.attend(slice(first, last)), expected[first:last])


@pytest.mark.parametrize("length", [512, 8192])
def test_memory_stays_within_the_budget(version, length):
    """P21: the row numbers of all 64 tokens at the greater length would be 4 MiB by themselves."""
    case = Case([64], [length])
    answer = []
    most = peak_bytes(lambda: answer.append(case.attend(budget_bytes=MIB)))
    needed = 0 if native.supports(case.query, case.rows) else 3 * length * WIDTH * 4  # one token's own rows
    assert most <= max(MIB, needed) + answer[0].nbytes
    assert torch.equal(answer[0], case.attend())


def test_budget_is_read_at_every_call():
    """P22: the tile follows the budget of the call, and the length that is seen."""
    assert tokens_per_tile(4096, 64 * MIB) == 64 * tokens_per_tile(4096, MIB) > 64
    assert tokens_per_tile(1 << 20, MIB) == 1


def test_no_tokens(version):
    assert Case([1], [9]).attend(slice(0, 0)).shape == (0, 3, VALUE_WIDTH)


def test_gradients_are_those_of_a_selection_of_everything():
    case = Case([3, 2], [9, 30])
    case.query.requires_grad_()
    case.rows.requires_grad_()
    gradients = []
    for output in (case.attend(), sparse_mla(case.query, case.rows, case.selected(), VALUE_WIDTH, 0.3)):
        gradients.append(torch.autograd.grad(output.square().sum(), (case.query, case.rows)))
    torch.testing.assert_close(*gradients)
