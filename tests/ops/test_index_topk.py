"""Exact, deterministic selection by every version of index_topk. P numbers are faults other engines had."""

import platform
from dataclasses import dataclass, fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megaspan.ops import native
from megaspan.ops.index_topk import index_topk, index_topk_blocked, index_topk_native, index_topk_reference
from megaspan.ops.index_topk.blocked import tile_shape
from megaspan.ops.index_topk.native import SOURCE, Problem, plan
from megaspan.ops.quant import decode_index_rows, encode_index_rows, quantize_index_queries
from megaspan.ops.rows import RowTable
from tests.allocations import peak_bytes

pytestmark = pytest.mark.usefixtures("poisoned_memory")
MIB = 1 << 20
# The kernel's other forms: no bf16 instructions, 8 lanes, 4 lanes.
NARROWER = ("-mno-avx512bf16", "-mno-avx512f", "-mno-avx") if platform.machine() == "x86_64" else ()


@pytest.fixture(scope="module", params=["blocked", "native", *NARROWER])
def select(request):
    """One version of the operation, called as select(case, budget_bytes)."""
    if request.param == "blocked":
        yield lambda case, budget=MIB: index_topk_blocked(*case.arguments(), budget)
        return
    with pytest.MonkeyPatch.context() as patch:
        if request.param.startswith("-"):
            patch.setenv("MEGASPAN_CFLAGS", request.param)
        native.load.cache_clear()
        if native.load(SOURCE) is None:
            pytest.skip("no compiler here")
        yield lambda case, budget=MIB: index_topk_native(*case.arguments(), budget)
    native.load.cache_clear()


@dataclass(frozen=True)
class Case:
    query: Tensor
    weights: Tensor
    keys: Tensor
    table: RowTable
    sequence_ids: Tensor
    visible: Tensor
    topk: int

    def arguments(self) -> tuple:
        return tuple(getattr(self, field.name) for field in fields(self))

    def reference(self) -> Tensor:
        return index_topk_reference(*self.arguments())

    def at(self, tokens: slice | Tensor) -> "Case":
        """The same with these tokens only, in this order."""
        names = ("query", "weights", "sequence_ids", "visible")
        return replace(self, **{name: getattr(self, name)[tokens] for name in names})

    def in_fp8(self, rotate: bool = False) -> "Case":
        """The same with FP8 index rows; small whole numbers stay exact if they are not rotated."""
        query, weights = quantize_index_queries(self.query, self.weights, rotate)
        return replace(self, query=query, weights=weights, keys=encode_index_rows(self.keys, rotate))


def make(
    visible: list[list[int]], heads=3, width=8, topk=8, page_size=0, whole=True, dtype=torch.float32, seed=0
) -> Case:
    """Tokens of sequence s see visible[s]; page 0 means contiguous; whole numbers make every sum exact."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator)
        return (values * 1.5).round() if whole else values

    longest = max(1, *(length for row in visible for length in row))
    page = page_size or longest
    pages = -(-longest // page)
    order = torch.randperm(len(visible) * pages, generator=generator)
    lengths = torch.tensor([length for row in visible for length in row])
    return Case(
        query=draw(len(lengths), heads, width).to(dtype),
        weights=draw(len(lengths), heads),
        keys=draw(len(visible) * pages * page, width).to(dtype),
        table=RowTable((order * page).view(len(visible), pages), page),
        sequence_ids=torch.tensor([s for s, row in enumerate(visible) for _ in row]),
        visible=lengths,
        topk=topk,
    )


def scores_of(case: Case, token: int) -> Tensor:
    """The scores of what a token sees, in fp64."""
    positions = torch.arange(int(case.visible[token]))
    rows = case.table.rows(case.sequence_ids[token, None], positions[None])[0]
    keys = decode_index_rows(case.keys[rows]) if case.keys.dtype == torch.uint8 else case.keys[rows]
    products = case.query[token].double() @ keys.double().T
    return case.weights[token].double() @ products.relu()


@st.composite
def cases(draw, whole: bool) -> Case:
    visible = draw(st.lists(st.lists(st.integers(0, 260), min_size=1, max_size=6), min_size=1, max_size=4))
    return make(
        visible,
        heads=draw(st.integers(1, 33)),
        width=draw(st.integers(8, 80)),
        topk=draw(st.sampled_from([1, 7, 8, 64])),
        page_size=draw(st.sampled_from([0, 4, 64])),
        whole=whole,
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        seed=draw(st.integers(0, 99)),
    )


@settings(max_examples=25, deadline=None)
@given(case=cases(whole=True))
def test_equals_reference_where_sums_are_exact(select, case):
    assert torch.equal(select(case), case.reference())


@settings(max_examples=20, deadline=None)
@given(case=cases(whole=True))
def test_fp8_keys_equal_reference_where_sums_are_exact(select, case):
    exact, packed = case.reference(), case.in_fp8()
    assert torch.equal(packed.reference(), exact)
    assert torch.equal(select(packed), exact)


@settings(max_examples=15, deadline=None)
@given(case=cases(whole=False), fp8=st.booleans())
def test_picks_the_best_up_to_rounding(select, case, fp8):
    case = case.in_fp8(rotate=True) if fp8 else case
    for token, selected in enumerate(select(case)):
        scores = scores_of(case, token)
        wanted = min(case.topk, len(scores))
        positions = selected[:wanted].long()
        assert (selected[wanted:] == -1).all()
        assert (positions.diff() > 0).all()
        worst = scores.sort(descending=True).values[:wanted]
        torch.testing.assert_close(
            scores[positions].sort(descending=True).values, worst, rtol=1e-5, atol=1e-5 * case.query.shape[2]
        )


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 16, 47, 48, 49, 3000], ids=lambda n: f"L{n}")
def test_lengths_about_topk_and_the_block(select, length):
    case = make([[length, max(0, length - 1), length // 2]], page_size=4)
    assert torch.equal(select(case), case.reference())


def test_fewer_visible_than_topk_leaves_minus_one(select):
    """P12: masked keys are never chosen and no slot keeps what the buffer held before."""
    assert select(make([[3]])).tolist() == [[0, 1, 2, -1, -1, -1, -1, -1]]


def test_prompts_about_topk_in_one_batch(select):
    """P10: topk - 1, topk and topk + 1 visible positions, alone and mixed."""
    lengths = [7, 8, 9]
    mixed = make([[n] for n in lengths])
    assert torch.equal(select(mixed), mixed.reference())
    for token in range(3):
        alone = mixed.at(slice(token, token + 1))
        assert torch.equal(select(alone)[0], select(mixed)[token])


@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
@pytest.mark.parametrize("weight", [1.0, -1.0])
def test_all_scores_zero_picks_the_first(select, weight, fp8):
    """P14: every ReLU is shut; with negative weights the zeros are -0.0."""
    case = make([[5000, 700]], topk=64)
    weights = torch.full_like(case.weights, weight)
    case = replace(case, query=case.query.abs(), keys=-case.keys.abs(), weights=weights)
    case = case.in_fp8() if fp8 else case
    assert (select(case) == torch.arange(64, dtype=torch.int32)).all()


@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
def test_few_positives_and_a_plateau_of_zeros(select, fp8):
    """P14: 1 % of the keys score above the plateau, its lowest positions fill the rest; 20 runs agree."""
    case = make([[6000]], topk=96)
    keys = -case.keys.abs()
    keys[torch.randperm(6000, generator=torch.Generator().manual_seed(1))[:60]] *= -1
    case = replace(case, query=case.query.abs(), keys=keys, weights=case.weights.abs())
    case = case.in_fp8() if fp8 else case
    runs = [select(case) for _ in range(20)]
    assert torch.equal(runs[0], case.reference())
    assert all(torch.equal(run, runs[0]) for run in runs)


def test_fp8_keys_tie_across_scales(select):
    """P14: keys that score the same through another scale and value are told apart by position only."""
    width, length = 8, 2000
    keys = torch.zeros(length, width)
    keys[:, 0] = 2.0
    keys[torch.arange(length), 1 + torch.arange(length) % 7] = 2.0 ** (torch.arange(length) % 9)
    query = torch.zeros(1, 2, width)
    query[..., 0] = 1.0
    case = replace(make([[length]], heads=2, topk=40), query=query, keys=keys, weights=torch.ones(1, 2))
    assert len(set(encode_index_rows(keys, rotate=False)[:, width + 3].tolist())) > 1
    assert select(case.in_fp8()).tolist() == [list(range(40))]


@pytest.mark.parametrize("flush", [False, True], ids=["", "flushing subnormals"])
def test_every_e4m3_value_in_order(select, flush):
    """Keys of the values 0 to 448, of which the least are subnormal, whatever the process does with those."""
    for topk in (1, 60, *range(119, 127)):
        order = torch.randperm(127, generator=torch.Generator().manual_seed(topk))
        keys = encode_index_rows(torch.full((127, 8), 448.0), rotate=False)
        keys[:, :8] = order[:, None]
        case = make([[127]], heads=1, topk=topk)
        query, weights = torch.ones_like(case.query).bfloat16(), torch.ones_like(case.weights)
        case = replace(case, query=query, keys=keys, weights=weights)
        torch.set_flush_denormal(flush)
        try:
            selected = select(case)
        finally:
            torch.set_flush_denormal(False)
        assert sorted(order[selected[0].long()].tolist()) == list(range(127 - topk, 127))


@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
def test_does_not_depend_on_threads_company_or_budget(select, fp8):
    """The same choice alone or in a batch, split among threads or not, in large steps or small."""
    case = make([[9000] * 40], heads=5, width=24, topk=33, whole=False)
    case = case.in_fp8() if fp8 else case
    one = case.at(slice(0, 1))
    expected = select(case)
    assert torch.equal(select(one)[0], expected[0])
    assert torch.equal(select(case, MIB // 4), expected)
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert torch.equal(select(case), expected)
            assert torch.equal(select(one)[0], expected[0])
    finally:
        torch.set_num_threads(threads)


def test_needle_early_in_a_long_row(select):
    """P16: the one good key, at position 5 of 131,073, is chosen by every token."""
    case = make([[131_073] * 3], heads=4, width=16, whole=False)
    case = replace(case, query=case.query.abs(), keys=case.keys * 0.01, weights=case.weights.abs() + 1)
    case.keys[5] = 1.0
    assert (select(case, 16 * MIB) == 5).any(1).all()


def test_close_scores_are_told_apart(select):
    """P05: two keys about rank topk differ by 1e-4 relative, which bf16 weights or sums would not see."""
    case = make([[100]], heads=2, width=8, topk=4, whole=False)
    keys = torch.zeros_like(case.keys)
    keys[[10, 20, 30], 0] = 5.0
    keys[40, 0], keys[50, 1] = 1.0, 1.0
    query = torch.zeros_like(case.query)
    query[0, 0, 0], query[0, 1, 1] = 1.0, 1.0
    for better, weights in ((40, [1.0001, 1.0]), (50, [1.0, 1.0001])):
        close = replace(case, query=query, keys=keys, weights=torch.tensor([weights]))
        assert select(close).tolist() == [[10, 20, 30, better]]


@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
def test_physical_pages_do_not_matter(select, fp8):
    """P20: the same sequence under another order of pages gives the same positions."""
    contiguous = make([[83, 90, 90]], whole=False)
    contiguous = contiguous.in_fp8() if fp8 else contiguous
    order = torch.randperm(23, generator=torch.Generator().manual_seed(3))
    unseen = contiguous.keys.new_full((92, contiguous.keys.shape[1]), 255 if fp8 else torch.nan)
    paged = replace(contiguous, keys=unseen, table=RowTable(order[None] * 4, 4))
    paged.keys[paged.table.rows(torch.tensor([0]), torch.arange(90)[None])[0]] = contiguous.keys
    assert torch.equal(select(paged), select(contiguous))


@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
def test_rows_beyond_two_to_the_31_elements(select, fp8):
    """P18: a view whose rows lie so far apart that a 32-bit offset would wrap to another row."""
    near = make([[60] * 2], width=8, dtype=torch.bfloat16)
    near = near.in_fp8() if fp8 else near
    stride = (1 << 31) // 50
    try:  # only the pages that are touched will exist
        far = torch.UntypedStorage(60 * stride * near.keys.itemsize)
    except RuntimeError:
        pytest.skip("no address space for a sparse 5 GB")
    keys = torch.empty(0, dtype=near.keys.dtype).set_(far, 0, near.keys.shape, (stride, 1))
    keys.copy_(near.keys)
    assert torch.equal(select(replace(near, keys=keys)), near.reference())


def test_not_finite_fp8_keys(select):
    """A NaN among the values counts as -inf, wherever it stands and whatever the width."""
    for width in (4, 33):
        case = make([[300, 5, 9]], heads=2, width=width, topk=8)
        case = replace(case, query=case.query.abs() + 1, weights=case.weights.abs() + 1)
        case.keys[::3, width - 1] = torch.nan
        case = case.in_fp8()
        assert torch.equal(select(case), case.reference())
        assert not (select(case)[0] % 3 == 0).any()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_not_finite_keys(select, value):
    """NaN counts as -inf; nothing hangs; infinities order as numbers."""
    case = make([[300, 5, 9]], heads=2, width=4, topk=8)
    case = replace(case, query=case.query.abs() + 1, weights=case.weights.abs() + 1)
    case.keys[::3] = value
    assert torch.equal(select(case), case.reference())
    case.keys[:] = value
    assert torch.equal(select(case), case.reference())


def test_token_without_sequence_order(select):
    """Tokens of the sequences may come interleaved."""
    case = make([[50, 51, 52], [40, 41, 42]], page_size=4)
    shuffled = torch.tensor([3, 0, 4, 1, 5, 2])
    assert torch.equal(select(case.at(shuffled)), case.reference()[shuffled])


def test_no_tokens(select):
    assert select(make([[9]]).at(slice(0, 0))).shape == (0, 8)


def test_a_table_of_many_long_sequences_is_not_copied(select):
    """An engine's table of 64 sequences and 1 Mi positions, 8 MiB, serves one token of the last of them."""
    case = make([[200]], page_size=64)
    starts = torch.full((64, 16384), -12345)
    starts[63, : case.table.starts.shape[1]] = case.table.starts[0]
    wide = replace(case, table=RowTable(starts, 64), sequence_ids=torch.tensor([63]))
    answer = []
    assert peak_bytes(lambda: answer.append(select(wide, MIB))) <= MIB
    assert torch.equal(answer[0], case.reference())


@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
@pytest.mark.parametrize("length", [1024, 16384])
@pytest.mark.parametrize("heads", [1, 32])
def test_memory_stays_within_the_budget(select, length, heads, fp8):
    """P21, P23: neither length nor heads take the peak past the budget, and the result is the same.

    The scores of all 64 tokens at the greater length would be 4 MiB, four times the budget.
    """
    case = make([[length] * 64], heads=heads, width=16)
    case = case.in_fp8() if fp8 else case
    answer = []
    most = peak_bytes(lambda: answer.append(select(case, MIB)))
    assert 0 < most <= MIB
    assert torch.equal(answer[0], select(case, 16 * MIB))


def test_budget_is_read_at_every_call():
    """P22: the steps follow the budget of the call."""
    assert tile_shape(65536, 32, 64, 64, 64 * MIB, True)[0] > tile_shape(65536, 32, 64, 64, 4 * MIB, True)[0]
    library = native.load(SOURCE)
    if library is None:
        pytest.skip("no compiler here")
    tiles = []
    for budget in (64 * MIB, MIB // 4, 64 * MIB):
        problem = Problem(tokens=512, heads=32, width=64, topk=64, is_bf16=0)
        assert plan(library, problem, 65536, budget) <= budget
        tiles.append((problem.tile, problem.groups))
    assert tiles[0] == tiles[2] > tiles[1]


def test_budget_below_the_smallest_step_is_refused(select):
    with pytest.raises(ValueError, match="budget of"):
        select(make([[5000]], topk=64), 1000)


def test_dispatcher_refuses_what_disagrees():
    case = make([[20]])
    for wrong, words in (
        ({"keys": case.keys.bfloat16()}, "bfloat16"),
        ({"keys": case.keys[:, :4]}, "disagree"),
        ({"weights": case.weights[:, :2]}, "weights"),
        ({"visible": case.visible.repeat(2)}, "visible"),
        ({"keys": case.in_fp8().keys}, "uint8"),
        ({"keys": case.in_fp8().keys[:, 1:]}, "disagree"),
    ):
        with pytest.raises(ValueError, match=words):
            index_topk(*replace(case, **wrong).arguments())


def test_rows_out_of_range_are_refused(select):
    case = make([[20]])
    for wrong in (
        {"visible": torch.tensor([21])},
        {"sequence_ids": torch.tensor([1])},
        {"table": RowTable(torch.tensor([[1]]), 20)},
    ):
        with pytest.raises(IndexError):
            select(replace(case, **wrong))


def test_dispatcher_takes_any_layout():
    """Strided keys, non-contiguous queries, tensors that need a gradient, and half precision."""
    case = make([[40, 41]], width=8)
    wide = torch.zeros(41, 20)
    wide[:, 3:11] = case.keys
    query = case.query.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    strided = replace(case, keys=wide[:, 3:11], query=query)
    assert torch.equal(index_topk(*strided.arguments()), case.reference())
    columns = replace(case, keys=case.keys.T.contiguous().T)
    assert torch.equal(index_topk(*columns.arguments()), case.reference())
    half = replace(case, keys=case.keys.half(), query=case.query.half())
    assert torch.equal(index_topk(*half.arguments()), case.reference())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocked_on_a_gpu(dtype, fp8):
    case = make([list(range(1, 600))], heads=16, width=32, topk=64, page_size=64, dtype=dtype)
    case = case.in_fp8() if fp8 else case
    table = RowTable(case.table.starts.cuda(), case.table.page_size)
    moved = [value.cuda() if isinstance(value, Tensor) else value for value in case.arguments()]
    moved[3] = table
    assert torch.equal(index_topk_blocked(*moved, MIB).cpu(), case.reference())
