"""Decoding as CUDA graphs gives what the same steps give without, whatever changes between replays."""

from typing import Any

import pytest
import torch

from megaspan.cache.paged import PagedCache
from megaspan.cache.pool import PagePools
from megaspan.engine import decode_graph
from megaspan.engine.decode_graph import Decode, DecodeGraphs
from megaspan.engine.generation import Generation
from megaspan.engine.sampling import SamplingParams
from megaspan.model.batch import Batch
from megaspan.model.moe import Router
from tests.engine.engines import (
    DEBUG,
    PAGE,
    answer,
    assert_idle,
    debug_model,
    fix_costs,
    make_engine,
    prompt,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
    pytest.mark.usefixtures("poisoned_memory"),
]
SLOTS = 6
SMALL = DEBUG.replace(index_n_heads=4, index_head_dim=32, dtype="bfloat16")
REAL = SMALL.replace(  # the widths of GLM-5.2's attention, in a narrow model of three layers
    hidden_size=512,
    num_hidden_layers=3,
    indexer_types=("full", "shared", "shared"),
    mlp_layer_types=("dense", "sparse", "sparse"),
    num_attention_heads=64,
    q_lora_rank=256,
    kv_lora_rank=512,
    qk_nope_head_dim=192,
    qk_rope_head_dim=64,
    v_head_dim=256,
    index_n_heads=32,
    index_head_dim=128,
    index_topk=2048,
    intermediate_size=512,
    moe_intermediate_size=256,
    max_position_embeddings=8192,
)


def on_gpu(config: Any, invariant: bool = False) -> Any:
    """A model as one that is loaded: bf16, but for the routers."""
    model = debug_model(invariant, config=config).cuda()
    routers = {
        id(weight)
        for module in model.modules()
        if isinstance(module, Router)
        for weight in module.parameters()
    }
    for weight in model.parameters():
        if id(weight) not in routers:
            weight.data = weight.data.bfloat16()
    return model


class Pair:
    """The same steps as graphs and without, each over pools of its own with the same pages."""

    def __init__(self, config: Any, formats: tuple[Any, Any], page_size: int, pages: int, tokens: int = 1):
        self.model = on_gpu(config)
        self.order = torch.randperm(pages, generator=torch.Generator().manual_seed(2)).tolist()
        self.page_size, self.held, self.tokens = page_size, {}, tokens
        self.past: dict[int, int] = {}
        self.decoders = []
        for capture in (True, False):
            pools = PagePools(config, pages, page_size, *formats, "cuda", mtp=False, scratch=True)
            cache = PagedCache(pools, SLOTS, max_pages=pages)
            self.decoders.append(DecodeGraphs(self.model, cache, SLOTS, tokens, capture))

    @torch.inference_mode()
    def read(self, slot: int, ids: list[int]) -> None:
        """A prompt, into a slot from its beginning on."""
        self.past[slot], self.held[slot] = 0, 0
        self._grow(slot, len(ids))
        for decoder in self.decoders:
            self.model(Batch.of([ids], [0], "cuda", [slot]), decoder.cache)
        self.past[slot] = len(ids)

    def step(self, slots: list[int], seed: int) -> torch.Tensor:
        """A decoding step; AssertionError unless both ways give the same bits."""
        ids = prompt(len(slots) * self.tokens, seed)
        for slot in slots:
            self._grow(slot, self.past[slot] + self.tokens)
        step = Decode(ids, [self.past[slot] for slot in slots], slots)
        graph, plain = [decoder(step).clone() for decoder in self.decoders]
        assert graph.isfinite().all()
        assert torch.equal(graph, plain)
        for slot in slots:
            self.past[slot] += self.tokens
        return graph

    def _grow(self, slot: int, length: int) -> None:
        missing = -(-length // self.page_size) - self.held[slot]
        pages = [self.order.pop() for _ in range(missing)]
        for decoder in self.decoders:
            decoder.cache.assign(slot, self.held[slot], pages)
        self.held[slot] += missing


@pytest.mark.parametrize("formats", [("bfloat16", None), ("fp8", None)], ids=str)
@pytest.mark.parametrize("tokens", [1, 2])
class TestReplays:
    def test_they_give_what_the_same_steps_give_without_graphs(self, formats, tokens, monkeypatch):
        """Sequences join and leave, sizes lie between the captured ones, pages are added, reaches passed."""
        monkeypatch.setattr(decode_graph, "REACHES", (48, 96))
        pair = Pair(SMALL, formats, PAGE, 256, tokens)
        for place, length in enumerate((40, 9, 1, 77, 23)):
            pair.read(place, prompt(length, place))
        steps = [[0], [0, 1], [2, 0, 1], [2, 0, 1], [4, 3, 2, 1, 0], [4, 3, 1], [1], [4, 3, 1]]
        for seed, slots in enumerate(3 * steps):
            pair.step(slots, seed)
        assert pair.decoders[0].replays == 3 * len(steps)
        assert pair.decoders[1].replays == 0

    def test_real_widths(self, formats, tokens):
        """More positions than are selected, across several pages of 64."""
        pair = Pair(REAL, formats, 64, 200, tokens)
        for place, length in enumerate((3000, 2049, 130)):
            pair.read(place, prompt(length, place))
        for seed in range(40):
            pair.step([[1, 0, 2], [0], [2, 1]][seed % 3], seed)
        assert pair.decoders[0].replays == 40

    def test_they_give_the_same_bits_again(self, formats, tokens):
        pair = Pair(SMALL, formats, PAGE, 256, tokens)
        pair.read(0, prompt(50))
        first = pair.step([0], 7)
        for _ in range(20):
            pair.past[0] = 50
            assert torch.equal(pair.step([0], 7), first)


def test_a_step_waits_for_nothing():
    """Neither the host for the GPU nor, where it fills the buffers, for a copy out of pageable memory."""
    pair = Pair(SMALL, ("bfloat16", None), PAGE, 64)
    pair.read(0, prompt(20))
    pair.step([0], 0)
    decoder, step = pair.decoders[0], Decode([1], [21], [0])
    pair._grow(0, 22)
    torch.cuda.set_sync_debug_mode("error")
    try:
        decoder(step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert decoder.replays == 2


def test_what_cannot_be_captured_runs_without_graphs(monkeypatch, caplog):
    """And the GPU goes on to do all that it did before."""
    pair = Pair(SMALL, ("bfloat16", None), PAGE, 64)
    pair.read(0, prompt(20))
    layer = pair.model.model.layers[4]
    forward = layer.forward

    def waiting(hidden, *arguments):
        hidden.sum().item()
        return forward(hidden, *arguments)

    monkeypatch.setattr(layer, "forward", waiting)
    for seed in range(3):
        pair.step([0], seed)
    assert pair.decoders[0].replays == 0
    assert caplog.text.count("decoding without CUDA graphs, which is slower: ") == 1
    assert torch.randn(8, device="cuda").add(1).isfinite().all()
    monkeypatch.undo()
    again = DecodeGraphs(pair.model, pair.decoders[0].cache, SLOTS)
    again(Decode([1], [22], [0]))
    assert again.replays == 1


def sampled(limit: int) -> SamplingParams:
    return SamplingParams(temperature=0.8, seed=limit, max_tokens=limit, ignore_eos=True)


@pytest.mark.parametrize("pages", [200, 40], ids=["room", "preemption"])
def test_the_engine_answers_with_graphs_as_without(pages):
    """Batch-invariant, so that bits do not depend on how a step is filled up. Captured as they are needed."""
    model = on_gpu(SMALL, invariant=True)
    prompts = [prompt(length, length) for length in (3, 40, 17, 9, 30)]
    params = [sampled(limit) for limit in (4, 60, 9, 25, 50)]
    answers = []
    for graphs in (True, False):
        engine = make_engine(model, pages=pages, max_running=4)
        fix_costs(engine, 1e-3)  # so that both read the prompts in the same chunks
        decoder = engine.runner.decoder
        assert decoder is not None
        if not graphs:
            engine.runner.decoder = None
        answers.append([answer(outputs) for outputs in engine.generate(prompts, params)])
        assert (decoder.replays > 50) == graphs
        assert (engine.stats().preempted_total > 0) == (pages == 40)
        assert_idle(engine)
        engine.close()
    assert answers[0] == answers[1]


def test_one_sequence_decodes_as_a_graph():
    """What `complete` does, against a pass over the whole sequence."""
    model = on_gpu(SMALL, invariant=True)
    ids = prompt(60)
    generation = Generation(model, 60, chunk=16)
    kept = [generation.prefill(ids[:40]), *(generation.step(token) for token in ids[40:])]
    other = Generation(model, 60, chunk=64)
    other._decoder = None
    assert torch.equal(other.prefill(ids[:40]), kept[0])
    for expected, token in zip(kept[1:], ids[40:], strict=True):
        assert torch.equal(other.step(token), expected)
    assert generation._decoder is not None
    assert generation._decoder.replays == 20
    for token in ids[:4]:
        generation.step(token)
    with pytest.raises(ValueError, match="slot 0 has pages for 64 tokens, but the batch needs 65"):
        generation.step(ids[4])
