"""Decoding steps over fixed buffers give what ordinary batches give."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megaspan.cache.paged import PagedCache
from megaspan.cache.pool import PagePools
from megaspan.cache.solo import SoloCache
from megaspan.engine import decode_graph, memory
from megaspan.engine.decode_graph import Decode, DecodeGraphs
from megaspan.engine.generation import Generation
from megaspan.engine.sampling import SamplingParams
from megaspan.model.batch import Batch
from tests.engine.engines import (
    DEBUG,
    GREEDY,
    PAGE,
    assert_solo,
    prompt,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")
PAGES, SLOTS = 64, 6
FORMATS = [("float32", None), ("bfloat16", None), ("fp8", None), ("bfloat16", "fp8")]
LENGTHS = st.lists(st.integers(0, 30), min_size=1, max_size=5)


def filled(model: Any, lengths: list[int], formats: tuple[Any, Any], scratch: bool) -> PagedCache:
    """A cache whose slots, from the last one down, hold sequences of these lengths, in scattered pages."""
    pools = PagePools(DEBUG, PAGES, PAGE, *formats, mtp=False, scratch=scratch)
    cache = PagedCache(pools, SLOTS, max_pages=12)
    order = torch.randperm(PAGES, generator=torch.Generator().manual_seed(1)).tolist()
    for place, length in enumerate(lengths):
        slot = SLOTS - 1 - place
        cache.assign(slot, 0, order[10 * place : 10 * place + 10])
        if length:
            model(Batch.of([prompt(length, place)], slots=[slot]), cache)
    return cache


@pytest.mark.parametrize("formats", FORMATS, ids=str)
@pytest.mark.parametrize("tokens", [1, 3])
@settings(max_examples=8)
@given(lengths=LENGTHS)
@torch.no_grad()
def test_a_step_over_fixed_buffers_is_bit_equal_to_an_ordinary_batch(model, formats, tokens, lengths):
    """Padding included, twice in a row, with pages past the end of every sequence."""
    plain, fixed = (filled(model, lengths, formats, scratch) for scratch in (False, True))
    decoder = DecodeGraphs(model, fixed, SLOTS, tokens)
    slots, past = [SLOTS - 1 - place for place in range(len(lengths))], list(lengths)
    for seed in (7, 8):
        pieces = [prompt(tokens, seed + 10 * slot) for slot in slots]
        expected = model.unembed(model(Batch.of(pieces, past, slots=slots), plain))
        actual = decoder(Decode(torch.tensor(pieces).flatten().tolist(), past, slots))
        assert torch.equal(actual, expected)
        past = [length + tokens for length in past]
    places = [rows_of(plain, slot, length) for slot, length in zip(slots, past, strict=True)]
    pages = (torch.cat(places) // PAGE).unique()  # whole ones: what no row is written to is poisoned in both
    for expected, actual in zip(plain.pools.segments, fixed.pools.segments, strict=True):
        assert torch.equal(expected.pages[pages], actual.pages[pages])


def rows_of(cache: PagedCache, slot: int, length: int) -> torch.Tensor:
    """The numbers of a slot's first rows, [length]."""
    return cache._table.rows(torch.tensor([slot]), torch.arange(length)[None])[0]


@torch.no_grad()
def test_padding_writes_to_the_scratch_page_only(model):
    cache = filled(model, [9, 20, 5], ("float32", None), scratch=True)
    before = [segment.pages.clone() for segment in cache.pools.segments]
    DecodeGraphs(model, cache, SLOTS)(Decode([1, 2, 3], [9, 20, 5], [5, 4, 3]))  # a step of four
    places = {int(rows_of(cache, *read)[-1]) for read in ((5, 10), (4, 21), (3, 6))}
    for segment, old in zip(cache.pools.segments, before, strict=True):
        changed = (segment.pages != old).unflatten(1, (PAGE, -1)).any(-1).nonzero()
        assert {page * PAGE + row for page, row in changed.tolist()} == places


@torch.no_grad()
def test_what_a_step_cannot_do_is_refused_before_it_runs(model):
    cache = filled(model, [9], ("float32", None), scratch=True)
    decoder = DecodeGraphs(model, cache, most=2)
    with pytest.raises(ValueError, match="slot 5 has pages for 40 tokens, but the batch needs 41"):
        decoder(Decode([1], [40], [5]))
    with pytest.raises(ValueError, match="a step of 3 sequences is run, but there may be 2"):
        decoder(Decode([1, 2, 3], [9, 9, 9], [5, 5, 5]))
    with pytest.raises(ValueError, match="scratch=True"):
        DecodeGraphs(model, filled(model, [9], ("float32", None), scratch=False), most=2)


def test_sizes_and_reaches_cover_what_is_asked_for(model, monkeypatch):
    monkeypatch.setattr(decode_graph, "REACHES", (2, 20, 500))
    cache = PagedCache(PagePools(DEBUG, 4, PAGE, scratch=True), 70, max_pages=12)
    assert DecodeGraphs(model, cache, 1).sizes == [1]
    assert DecodeGraphs(model, cache, 20).sizes == [1, 2, 4, 8, 16, 20]
    assert DecodeGraphs(model, cache, 1000).sizes[-1] == 256
    assert DecodeGraphs(model, cache, 4).reaches == [2, 20, 48]
    assert DecodeGraphs(model, cache, 4, tokens=3).reaches == [20, 48]


@torch.no_grad()
def test_a_solo_cache_counts_its_tokens_and_not_those_of_padding(model):
    cache = SoloCache(DEBUG, 100, "float32")
    decoder = DecodeGraphs(model, cache, most=1)
    model(Batch.of([prompt(20)]), cache)
    decoder.capture_all()
    assert cache.lengths == [20]
    assert cache.memory() == {"latent": 20 * 9 * 40 * 4, "index": 20 * 4 * 16 * 4}
    expected = model.unembed(model(Batch.of([prompt(21)[20:]], [20]), cache))
    assert cache.lengths == [21]
    assert torch.equal(decoder(Decode(prompt(21)[20:], [20], [0])), expected)


@torch.inference_mode()
def test_one_sequence_reads_and_decodes_as_in_a_growing_cache(model):
    """What a generation does on a GPU, but for the graph."""
    growing, solo = Generation(model, 60, chunk=16), Generation(model, 60, chunk=16)
    solo.cache = SoloCache(DEBUG, 60, "float32")
    solo._decoder = DecodeGraphs(model, solo.cache, most=1)
    ids = prompt(60)
    assert torch.equal(solo.prefill(ids[:40]), growing.prefill(ids[:40]))
    kept = [solo.step(token) for token in ids[40:]]
    for logits, token in zip(kept, ids[40:], strict=True):
        assert torch.equal(logits, growing.step(token))
    assert solo.length == 60
    assert solo.cache.memory() == growing.cache.memory()


# ---- in the engine, whose way on a GPU is taken here on a CPU, but for the graphs themselves


@pytest.fixture
def decoding(make, model, monkeypatch):
    """Makes engines whose steps that only decode run over fixed buffers; counts these steps."""

    def pools(*arguments: Any, **options: Any) -> PagePools:
        return PagePools(*arguments, **{**options, "scratch": True})

    monkeypatch.setattr(memory, "PagePools", pools)
    steps = []

    class Counted(DecodeGraphs):
        def __call__(self, step: Decode) -> torch.Tensor:
            steps.append(len(step.slots))
            return super().__call__(step)

    def made(**options: Any):
        engine = make(**options)
        engine.runner.decoder = Counted(model, engine.memory.paged, engine.config.max_running)
        engine.warm_up()
        return engine, steps

    return made


def sampled(limit: int) -> SamplingParams:
    return SamplingParams(temperature=0.8, seed=limit, max_tokens=limit, ignore_eos=True)


def test_requests_that_join_and_leave_get_what_they_get_alone(decoding, model):
    """Five requests and three slots, so that steps of one to three are run, over pages that are added."""
    engine, steps = decoding(max_running=3)
    prompts = [prompt(length, length) for length in (3, 40, 17, 9, 30)]
    params = [sampled(limit) for limit in (4, 60, 9, 25, 12)]
    for ids, wanted, outputs in zip(prompts, params, engine.generate(prompts, params), strict=True):
        assert_solo(model, ids, wanted, outputs)
    assert set(steps) == {1, 2, 3}


def test_preempted_requests_go_on_as_they_began(decoding, model):
    """Sixteen pages are too few for four requests of 60 tokens."""
    engine, steps = decoding(pages=16)
    prompts, wanted = [prompt(9, seed) for seed in range(4)], sampled(51)
    for ids, outputs in zip(prompts, engine.generate(prompts, wanted), strict=True):
        assert_solo(model, ids, wanted, outputs)
    assert engine.stats().preempted_total > 0
    assert max(steps) == 4


def test_a_step_that_fails_ends_its_requests_and_no_others(decoding, model, monkeypatch):
    engine, _ = decoding()
    engine.submit(prompt(9), GREEDY, "one")
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[-1], "forward", lambda *arguments: 1 / 0)
        (output,) = engine.step()
    assert (output.finish_reason, output.error) == ("error", "the step failed: division by zero")
    (outputs,) = engine.generate([prompt(11)], GREEDY)
    assert_solo(model, prompt(11), GREEDY, outputs)
