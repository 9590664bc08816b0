"""Sparse latent attention: every version against the plain loop. P numbers are faults other engines had."""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megaspan.ops.quant import decode_latent_rows, encode_latent_rows
from megaspan.ops.rows import RowTable
from megaspan.ops.sparse_mla import native, sparse_mla, sparse_mla_gathered, sparse_mla_reference
from tests.allocations import peak_bytes

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
needs_native = pytest.mark.skipif(
    not native.supports(torch.empty(1, 1, 1), torch.empty(1, 1)), reason="no C compiler here"
)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
VERSIONS = [
    pytest.param(sparse_mla_gathered, id="gathered"),
    pytest.param(native.sparse_mla_native, id="native", marks=needs_native),
]

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@dataclass
class Case:
    query: Tensor
    rows: Tensor
    selected: Tensor
    value_width: int
    scale: float

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor, int, float]:
        return self.query, self.rows, self.selected, self.value_width, self.scale

    def in_fp8(self) -> "Case":
        """The same with FP8 rows; every byte of those that nobody selected is 255."""
        packed = encode_latent_rows(self.rows, self.value_width)
        packed[self.rows.isnan().all(1)] = 255
        return replace(self, rows=packed)


def make_case(
    tokens: int = 5,
    heads: int = 4,
    width: int = 24,
    value_width: int = 16,
    slots: int = 40,
    row_count: int = 90,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """Random operands; a token uses between 1 and all of its slots, and rows that nobody selected are NaN."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(tokens, heads, width, generator=generator).to(dtype)
    rows = torch.randn(row_count, width, generator=generator).to(dtype)
    selected = torch.full((tokens, slots), -1)
    for token in range(tokens):
        used = int(torch.randint(1, min(slots, row_count) + 1, (), generator=generator))
        selected[token, :used] = torch.randperm(row_count, generator=generator)[:used]
    unseen = torch.ones(row_count, dtype=torch.bool)
    unseen[selected[selected >= 0]] = False
    rows[unseen] = torch.nan
    return Case(query, rows, selected, value_width, scale=1.5 * width**-0.5)


def make_model_case(tokens: int, dtype: torch.dtype) -> Case:
    """The shape of the shipped model: large enough for several blocks, parts and threads."""
    return make_case(tokens, 8, 144, 128, slots=512, row_count=2000, dtype=dtype)


@st.composite
def cases(draw) -> Case:
    width = draw(st.integers(1, 150))
    return make_case(
        tokens=draw(st.integers(0, 40)),
        heads=draw(st.integers(1, 18)),
        width=width,
        value_width=draw(st.integers(1, width)),
        slots=draw(st.sampled_from([1, 3, 31, 32, 33, 129, 300])),
        row_count=draw(st.integers(1, 400)),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        seed=draw(st.integers(0, 1000)),
    )


@st.composite
def fp8_cases(draw) -> Case:
    """Partial groups, more than one of them, and no rotary part at all."""
    value_width = draw(st.sampled_from([1, 5, 15, 16, 17, 127, 128, 129, 144, 260]))
    return make_case(
        tokens=draw(st.integers(0, 12)),
        heads=draw(st.integers(1, 10)),
        width=value_width + draw(st.sampled_from([0, 1, 2, 16, 33])),
        value_width=value_width,
        slots=draw(st.sampled_from([1, 3, 33, 129])),
        row_count=draw(st.integers(1, 200)),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        seed=draw(st.integers(0, 1000)),
    ).in_fp8()


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("version", VERSIONS)
@settings(max_examples=25)
@given(case=cases())
def test_equals_the_plain_loop(version, case):
    assert_close(version(*case.operands), sparse_mla_reference(*case.operands))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_the_plain_loop_in_the_shape_of_the_model(version, dtype):
    case = make_model_case(3, dtype)
    assert_close(version(*case.operands), sparse_mla_reference(*case.operands))


@pytest.mark.parametrize("version", VERSIONS)
@settings(max_examples=25)
@given(case=fp8_cases())
def test_fp8_rows_equal_the_plain_loop(version, case):
    assert_close(version(*case.operands), sparse_mla_reference(*case.operands))


@pytest.mark.parametrize("version", VERSIONS)
def test_fp8_rows_equal_the_same_rows_decoded(version):
    case = make_model_case(3, torch.float32).in_fp8()
    decoded = replace(case, rows=decode_latent_rows(case.rows, 128, 16))
    assert_close(version(*case.operands), version(*decoded.operands))


@needs_native
@pytest.mark.parametrize("flush", [False, True], ids=["", "flushing subnormals"])
def test_native_decodes_every_byte(flush):
    """A token that selects one row gets its value back, whatever the process does with subnormal floats."""
    finite = torch.tensor([byte for byte in range(256) if byte & 0x7F != 0x7F], dtype=torch.uint8)
    rows = encode_latent_rows(torch.full((1, len(finite) + 3), 448.0), len(finite))  # scales of 1
    rows[0, : len(finite)] = finite
    query = torch.zeros(1, 1, len(finite) + 3)
    torch.set_flush_denormal(flush)
    try:
        output = native.sparse_mla_native(query, rows, torch.tensor([[0]]), len(finite), 1.0)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(output[0], finite.view(torch.float8_e4m3fn).float()[None])


@pytest.mark.parametrize("version", VERSIONS)
def test_error_of_fp8_rows_is_flat_by_position(version):
    """P66: to position 8K, for latents of amplitude 0.02 and 50; a lost scale is worse with length."""
    length, slots, rank, rope = 8192, 256, 256, 16
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(length, rank + rope, generator=generator)
    rows[:, :128] *= 0.02
    rows[:, 128:rank] *= 50
    query = torch.randn(8, 4, rank + rope, generator=generator)
    query[..., :128] *= 50
    query[..., 128:rank] *= 0.02
    ends = torch.arange(1, 9) * (length // 8)
    selected = torch.stack(
        [torch.randperm(int(end), generator=generator)[:slots].sort().values for end in ends]
    )
    exact = sparse_mla_reference(query, rows, selected, rank, 0.05)
    error = version(query, encode_latent_rows(rows, rank), selected, rank, 0.05) - exact
    for part in (slice(0, 128), slice(128, rank)):
        relative = error[..., part].flatten(1).norm(dim=1) / exact[..., part].flatten(1).norm(dim=1)
        assert relative.max() < 0.05
        assert relative.max() < 1.6 * relative.min()


@pytest.mark.parametrize("version", VERSIONS)
def test_fp8_rows_of_another_size_are_refused(version):
    case = make_case().in_fp8()
    case.value_width -= 1
    with pytest.raises(ValueError, match="fit"):
        version(*case.operands)


def test_gradients_through_fp8_rows_are_refused():
    case = make_case().in_fp8()
    case.query.requires_grad_()
    for version in (sparse_mla, sparse_mla_gathered):
        with pytest.raises(ValueError, match="FP8 rows"):
            version(*case.operands)
    with torch.no_grad():
        assert_close(sparse_mla(*case.operands), sparse_mla_reference(*case.operands))


@pytest.mark.parametrize("version", VERSIONS)
def test_large_scores_neither_overflow_nor_lose_the_largest(version):
    case = make_case(width=24)
    case.scale = 1000.0
    assert_close(version(*case.operands), sparse_mla_reference(*case.operands))


@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
@pytest.mark.parametrize("version", VERSIONS)
def test_nan_in_a_selected_row_stays_with_the_tokens_that_selected_it(version, fp8):
    case = make_case(tokens=6)
    row = case.selected[0, 0]
    case.rows[row, 3:5] = torch.nan
    case = case.in_fp8() if fp8 else case
    hit = (case.selected == row).any(1)
    output = version(*case.operands)
    assert output[hit].isnan().all()
    assert output[~hit].isfinite().all()


@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
@pytest.mark.parametrize("version", VERSIONS)
def test_shuffled_pages_change_no_bit(version, fp8):
    page_size, pages = 4, 25
    case = make_case(row_count=page_size * pages)
    case = case.in_fp8() if fp8 else case
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(1))
    table = RowTable(order[None] * page_size, page_size)
    shuffled_rows = torch.empty_like(case.rows)
    every_position = torch.arange(len(case.rows))[None]
    shuffled_rows[table.rows(torch.zeros(1, dtype=torch.int64), every_position)[0]] = case.rows
    shuffled = table.rows(torch.zeros(len(case.selected), dtype=torch.int64), case.selected)
    expected = version(*case.operands)
    assert version(case.query, shuffled_rows, shuffled, case.value_width, case.scale).equal(expected)


@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
@pytest.mark.parametrize("version", VERSIONS)
def test_rows_beyond_two_to_the_31_elements(version, fp8):
    """P18: in a cache so large that an offset of 32 bits would wrap to another row."""
    case = make_case(dtype=torch.bfloat16)
    case = case.in_fp8() if fp8 else case
    row_count, width = case.rows.shape
    first = (1 << 31) // width + 1
    try:  # only the pages that are touched will exist
        storage = torch.UntypedStorage((first + row_count) * width * case.rows.itemsize)
    except RuntimeError:
        pytest.skip("no address space for a sparse 4 GB")
    rows = torch.empty(0, dtype=case.rows.dtype).set_(storage, 0, (first + row_count, width), (width, 1))
    rows[first:] = case.rows
    selected = torch.where(case.selected >= 0, case.selected + first, -1)
    actual = version(case.query, rows, selected, case.value_width, case.scale)
    assert actual.equal(version(*case.operands))


@needs_native
@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_native_token_does_not_depend_on_the_others(dtype, fp8):
    case = make_model_case(37, dtype)
    case = case.in_fp8() if fp8 else case
    together = native.sparse_mla_native(*case.operands)
    for token in (0, 7, 36):
        alone = slice(token, token + 1)
        slots = int((case.selected[token] >= 0).sum())
        output = native.sparse_mla_native(
            case.query[alone], case.rows, case.selected[alone, :slots], case.value_width, case.scale
        )
        assert output.equal(together[alone])


@needs_native
@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
def test_native_does_not_depend_on_the_number_of_threads(monkeypatch, fp8):
    monkeypatch.setattr(native, "WORTH_THREADS", 0)
    case = make_model_case(5, torch.float32)  # many tokens for 1 thread, few for 2 and 3
    case = case.in_fp8() if fp8 else case
    before, outputs = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            outputs.append(native.sparse_mla_native(*case.operands))
    finally:
        torch.set_num_threads(before)
    assert outputs[0].equal(outputs[1])
    assert outputs[0].equal(outputs[2])


@needs_native
@pytest.mark.parametrize("number", [90, 1 << 40, -12345])
def test_native_refuses_rows_outside_the_cache(number):
    case = make_case()
    case.selected[2, 0] = number
    case.selected[2, 1] = 0
    with pytest.raises(IndexError, match="row number outside"):
        native.sparse_mla_native(*case.operands)


@pytest.mark.parametrize("budget_bytes", [1, 20_000, 1 << 28])
def test_gradients_pass_the_finite_difference_check(budget_bytes):
    case = make_case(tokens=4, heads=2, width=5, value_width=3, slots=6, row_count=8)
    query = case.query.double().requires_grad_()
    rows = case.rows.nan_to_num(0.5).double().requires_grad_()

    def attend(query: Tensor, rows: Tensor) -> Tensor:
        return sparse_mla(query, rows, case.selected, case.value_width, case.scale, budget_bytes)

    assert torch.autograd.gradcheck(attend, (query, rows))


def test_gradients_equal_those_of_the_plain_loop_and_ignore_poison():
    case = make_case(tokens=9, slots=20, row_count=200)
    grads = []
    for version in (sparse_mla, sparse_mla_reference):
        query, rows = case.query.clone().requires_grad_(), case.rows.clone().requires_grad_()
        output = version(query, rows, case.selected, case.value_width, case.scale)
        grads.append(torch.autograd.grad(output.square().sum(), (query, rows)))
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gathered_memory_of_fp8_rows_stays_within_the_budget(dtype):
    budget = 1 << 20
    case = make_case(400, 2, width=48, value_width=32, slots=64, row_count=500, dtype=dtype).in_fp8()
    assert peak_bytes(lambda: sparse_mla_gathered(*case.operands, budget)) <= budget + case.query.nbytes


@pytest.mark.parametrize("heads", [1, 16])
def test_gathered_memory_stays_within_the_budget(heads):
    budget = 1 << 20
    case = make_case(400, heads, width=32, value_width=24, slots=64, row_count=500)
    kept = 3 * case.query.nbytes + 2 * case.rows.nbytes
    assert peak_bytes(lambda: sparse_mla_gathered(*case.operands, budget)) <= budget + kept
    query, rows = case.query.requires_grad_(), case.rows.requires_grad_()
    operands = (query, rows, *case.operands[2:], budget)
    assert peak_bytes(lambda: sparse_mla_gathered(*operands).sum().backward()) <= budget + kept


def test_gathered_result_does_not_depend_on_the_budget():
    case = make_case(tokens=23)
    expected = sparse_mla_gathered(*case.operands)
    for budget_bytes in (1, 30_000):
        torch.testing.assert_close(sparse_mla_gathered(*case.operands, budget_bytes), expected)


@needs_native
def test_dispatcher_takes_the_compiled_version_only_without_gradients(monkeypatch):
    case = make_case()
    calls = []
    monkeypatch.setattr(native, "sparse_mla_native", lambda *operands: calls.append(operands))
    case.query.requires_grad_()
    assert sparse_mla(*case.operands).requires_grad
    assert not calls
    with torch.no_grad():
        sparse_mla(*case.operands)
    assert len(calls) == 1


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
def test_gathered_on_the_gpu_in_bf16(fp8):
    case = make_model_case(65, torch.bfloat16)
    case = case.in_fp8() if fp8 else case
    expected = sparse_mla_reference(*case.operands)
    query, rows, selected = (tensor.cuda() for tensor in (case.query, case.rows, case.selected))
    actual = sparse_mla(query, rows, selected, case.value_width, case.scale, budget_bytes=8 << 20)
    assert_close(actual.cpu(), expected)
