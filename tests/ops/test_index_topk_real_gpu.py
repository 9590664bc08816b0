"""The selection on a GPU at the widths of GLM-5.2, by the kernels in CUDA and in Triton: always exact."""

from dataclasses import dataclass
from functools import cached_property

import pytest
import torch
from torch import Tensor

from megaspan.ops.rows import RowTable
from tests.ops.index_topk_cases import make

gpu = pytest.importorskip("megaspan.ops.index_topk.gpu", reason="no Triton here")
from megaspan.ops.index_topk import cuda  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
GIB = 1 << 30
HEADS, WIDTH, PAGE, TOPK, LENGTH = 32, 128, 64, 2048, 40960
KINDS = (
    *("random", "ties", "equal", "zeros", "rising", "falling"),
    *("nan", "outlier", "fifty", "period", "cluster"),
)


@dataclass(frozen=True)
class Cached:
    """FP8 keys of S sequences of equal length, and where they lie: values [S, L, 128] and scales [S, L]."""

    values: Tensor
    scales: Tensor
    storage: Tensor
    table: RowTable

    @classmethod
    def of(cls, values: Tensor, scales: Tensor, spare_pages: int = 3) -> "Cached":
        """Pages in random order behind the spare ones, which are NaN."""
        sequences, length = scales.shape
        pages = sequences * length // PAGE
        storage = torch.full(((spare_pages + pages) * PAGE, WIDTH + 4), 255, dtype=torch.uint8, device="cuda")
        of_pages = storage.view(-1, PAGE * (WIDTH + 4))
        order = spare_pages + torch.randperm(pages, device="cuda")
        values = values.to(torch.float8_e4m3fn)
        of_pages[order, : PAGE * WIDTH] = values.view(torch.uint8).view(pages, -1)
        of_pages[order, PAGE * WIDTH :] = scales.view(pages, PAGE).view(torch.uint8)
        return cls(values, scales, storage, RowTable((order * PAGE).view(sequences, -1), PAGE))


@dataclass(frozen=True)
class Queries:
    """Of the sequences 0, 1, ... so many in a row each."""

    query: Tensor
    weights: Tensor
    lengths: tuple[int, ...]
    visible: Tensor

    @classmethod
    def whole(cls, lengths: tuple[int, ...], visible: Tensor) -> "Queries":
        """Of numbers whose products and sums are exact in any order."""
        tokens = sum(lengths)
        query = integers(-3, 3, tokens, HEADS, WIDTH).bfloat16()
        return cls(query, integers(-8, 8, tokens, HEADS).float() / 8, lengths, visible)

    @cached_property
    def sequence_ids(self) -> Tensor:
        return torch.arange(len(self.lengths)).repeat_interleave(torch.tensor(self.lengths)).cuda()

    def at(self, tokens: slice, lengths: tuple[int, ...]) -> "Queries":
        return Queries(self.query[tokens], self.weights[tokens], lengths, self.visible[tokens])

    def select(self, cached: Cached, topk: int = TOPK) -> Tensor:
        operands = self.query, self.weights, cached.storage, cached.table, self.sequence_ids, self.visible
        return gpu.index_topk_gpu(*operands, topk, GIB, self.lengths, cached.scales.shape[1])


@pytest.fixture(params=["cuda", "triton"])
def version(request, monkeypatch) -> str:
    if request.param == "cuda":
        assert cuda.cuda.can_run(torch.device("cuda"), cuda.PREFILL, cuda.SCORE, cuda.SELECT)
    else:
        monkeypatch.setattr(cuda, "supports", lambda *operands: False)
    return request.param


def generator() -> torch.Generator:
    return torch.Generator("cuda").manual_seed(7)


def integers(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high + 1, shape, device="cuda", generator=generator())


def keys_of(kind: str, sequences: int, length: int) -> Cached:
    """Whole numbers times a scale, rounded once; the kinds are what could lead a threshold astray."""
    values = integers(-3, 3, sequences, length, WIDTH).float()
    scales = torch.rand(sequences, length, device="cuda", generator=generator()) + 0.5
    along = torch.arange(length, device="cuda") / length
    if kind in ("equal", "rising", "falling", "fifty"):
        values[:] = values[:1, :1]
    if kind in ("ties", "equal"):
        scales[:] = 1
    elif kind == "zeros":
        scales[torch.rand(scales.shape, device="cuda", generator=generator()) < 0.99] = 0
    elif kind == "rising":
        scales[:] = along + 0.1
    elif kind == "falling":
        scales[:] = 1.5 - along
    elif kind == "nan":
        scales[:, ::3] = torch.nan
    elif kind == "outlier":
        scales[:, length // 2] = 1e20
    elif kind == "fifty":
        scales[:] = 50 + torch.randn(scales.shape, device="cuda", generator=generator())
    elif kind == "period":
        scales[:, ::PAGE] *= 100
    elif kind == "cluster":
        scales[:, length // 3 : length // 3 + 3000] *= 100
    return Cached.of(values, scales)


def expected(queries: Queries, cached: Cached, token: int, topk: int = TOPK) -> Tensor:
    """The row of one token, by sorting all scores."""
    seen = slice(int(queries.visible[token]))
    sequence = int(queries.sequence_ids[token])
    products = cached.values[sequence, seen].float() @ queries.query[token].float().T
    scores = (products.relu() * queries.weights[token]).sum(1) * cached.scales[sequence, seen]
    scores = scores.where(~scores.isnan(), -torch.inf) + 0.0
    best = scores.sort(descending=True, stable=True).indices[:topk].sort().values
    return torch.cat((best, best.new_full((topk - len(best),), -1))).int()


def visible_of(tokens: int, length: int) -> Tensor:
    """Random, and what is special to the pages, to the top-k and to the kernels' blocks."""
    visible = torch.randint(1, length + 1, (tokens,), device="cuda", generator=generator())
    special = torch.tensor([length, 1, 5, 64, 2048, 2049, 8193, 16384], device="cuda")[:tokens]
    visible[: len(special)] = special
    return visible


@pytest.mark.parametrize("kind", KINDS)
def test_exact_and_the_same_again(version, kind):
    cached = keys_of(kind, 2, LENGTH)
    for lengths in ((1, 1), (3, 3), (5, 3), (64, 1), (90, 70), (300, 2)):
        queries = Queries.whole(lengths, visible_of(sum(lengths), LENGTH))
        selected = queries.select(cached)
        assert queries.select(cached).equal(selected)
        some = {*range(10), *range(0, sum(lengths), 9)} & {*range(sum(lengths))}
        wrong = [token for token in some if not selected[token].equal(expected(queries, cached, token))]
        assert not wrong, f"{lengths}: {wrong} of {sorted(some)}"


@pytest.mark.parametrize("topk", [1, 8, 31, 64, 100])
def test_few_are_chosen_among_equals(version, topk):
    cached = keys_of("ties", 1, LENGTH)
    for count in (1, 3, 80):
        queries = Queries.whole((count,), visible_of(count, LENGTH))
        for token, row in enumerate(queries.select(cached, topk)):
            assert row.equal(expected(queries, cached, token, topk)), (count, token)


@pytest.mark.parametrize("page_size", [0, 16, 64, 128])
def test_bf16_keys(page_size):
    visible = [visible_of(8, 5120).clamp(max=5120).tolist(), list(range(5000, 5090))]
    case = make(visible, HEADS, WIDTH, 512, page_size, dtype=torch.bfloat16)
    assert gpu.index_topk_gpu(*case.to("cuda").arguments(), GIB).cpu().equal(case.reference())


def test_a_query_decoded_is_as_in_a_prefill(version):
    """Scores as near to each other as their roundings; Triton's kernel of one query adds in its own order."""
    values = torch.full((2, LENGTH, WIDTH), 256.0, device="cuda")
    values[..., :8] = torch.randn(2, LENGTH, 8, device="cuda", generator=generator())
    cached = Cached.of(values, torch.ones(2, LENGTH, device="cuda"))
    query = torch.full((200, HEADS, WIDTH), 2.0, device="cuda")
    query[..., :8] = torch.randn(200, HEADS, 8, device="cuda", generator=generator())
    weights = torch.rand(200, HEADS, device="cuda", generator=generator()) + 0.1
    visible = torch.arange(LENGTH - 199, LENGTH + 1, device="cuda")
    queries = Queries(query.to(torch.float8_e4m3fn).bfloat16(), weights, (200,), visible)
    together = queries.select(cached)
    for count in (2, 3, 64) if version == "triton" else (1, 2, 3, 64):
        for first in (0, 77, 200 - count):
            tokens = slice(first, first + count)
            assert queries.at(tokens, (count,)).select(cached).equal(together[tokens])


def test_a_million_positions(version):
    length, tokens = 1 << 20, 4096
    cached = keys_of("random", 1, length)
    queries = Queries.whole((tokens,), torch.arange(length - tokens + 1, length + 1, device="cuda"))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    selected = queries.select(cached)
    assert torch.cuda.max_memory_allocated() - before < GIB
    for token in (0, 1, 2047, 4095):
        row = expected(queries, cached, token)
        assert selected[token].equal(row)
        assert queries.at(slice(token, token + 1), (1,)).select(cached)[0].equal(row)


def test_storage_past_2_to_the_31_bytes(version):
    values, scales = integers(-3, 3, 1, 8192, WIDTH).float(), torch.ones(1, 8192, device="cuda")
    cached = Cached.of(values, scales, spare_pages=(1 << 31) // (PAGE * (WIDTH + 4)) + 1)
    for count in (1, 3, 80):
        queries = Queries.whole((count,), visible_of(count, 8192).clamp(max=8192))
        for token, row in enumerate(queries.select(cached)):
            assert row.equal(expected(queries, cached, token))


@pytest.mark.parametrize("count", [1, 4])
def test_a_graph_waits_for_nothing_and_reads_what_is_there_then(version, count):
    cached = keys_of("random", 2, LENGTH)
    queries = Queries.whole((count, count), visible_of(2 * count, LENGTH))
    queries.select(cached)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        selected = queries.select(cached)
    queries.visible.copy_(queries.visible.flip(0))
    queries.query.neg_()
    graph.replay()
    for token, row in enumerate(selected):
        assert row.equal(expected(queries, cached, token))
