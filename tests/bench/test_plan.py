import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megaspan.bench.plan import plan, plot, render
from megaspan.cache.growing import GrowingCache
from megaspan.config import ModelConfig
from megaspan.costs import memory
from megaspan.costs.flops import DENSE, Schedule, flops_per_token, index_flops, prefill_flops
from megaspan.errors import UserError
from megaspan.model import attention, indexer
from megaspan.model.batch import Batch
from megaspan.model.checkpoint_names import becomes_fp8, expected_tensors
from megaspan.model.transformer import Transformer
from megaspan.ops.linear import native as linear_native
from megaspan.ops.moe import native as moe_native
from megaspan.ops.router import native as router_native
from megaspan.ops.rows import RowTable
from megaspan.ops.sparse_mla import sparse_mla_reference
from tests.strategies import configs

MILLION = 1048576
GLM = ModelConfig.preset("glm-5.2")


@pytest.fixture(scope="module")
def glm() -> dict[str, Any]:
    return plan(GLM, MILLION)


def test_parameters(glm: dict[str, Any]) -> None:
    assert glm["parameters"] == 753_329_940_480
    assert memory.parameters(GLM.replace(num_nextn_predict_layers=0)) == 743_377_019_904
    assert glm["active_parameters"] == pytest.approx(40.30e9, rel=1e-4)
    assert (glm["full_layers"], glm["layers"]) == (21, 78)


def test_cache_bytes(glm: dict[str, Any]) -> None:
    """P25: index rows of full layers only, in the bytes of the released format."""
    assert glm["kv_bytes_per_token"] == 54_728 == 79 * 656 + 22 * 132
    assert glm["kv_bytes_total"] / memory.GIB == pytest.approx(53.4, abs=0.05)
    latents = 78 * glm["cache"]["bfloat16"]["latent_bytes_per_layer"] * MILLION
    assert latents / memory.GIB == 87.75
    without_mtp = memory.cache_bytes_per_token(GLM, mtp=False) * MILLION
    assert without_mtp / memory.GIB == pytest.approx(52.7, abs=0.05)


def test_flops_at_a_million(glm: dict[str, Any]) -> None:
    assert glm["index_flops_per_full_layer"] == pytest.approx(8.6e9, rel=0.005)
    assert 2.74 <= glm["flops_ratio"] <= 2.81
    assert 2.87 <= glm["flops_ratio_quarter"] <= 2.95
    assert glm["flops_ratio"] == round(glm["flops_per_token_all_full"] / glm["flops_per_token"], 2)
    assert glm["flops_per_token"] == sum(glm["flops_per_token_by_part"]["published"].values())


@pytest.mark.parametrize(
    ("context", "all_full", "published"),
    [(32, 0.125, 0.109), (128, 0.188, 0.126), (256, 0.273, 0.148), (512, 0.442, 0.194), (1024, 0.779, 0.285)],
)
def test_flops_along_the_context(context: int, all_full: float, published: float) -> None:
    result = plan(GLM, context * 1024)
    assert result["flops_per_token_all_full"] / 1e12 == pytest.approx(all_full, abs=0.0011)
    assert result["flops_per_token"] / 1e12 == pytest.approx(published, abs=0.0011)


@settings(max_examples=25)
@given(configs(), st.integers(0, 20), st.integers(1, 20), st.sampled_from(["own", "all_full", "dense"]))
def test_a_prefill_is_the_sum_of_its_tokens(config: ModelConfig, start: int, tokens: int, name: str) -> None:
    schedule = {"own": None, "all_full": Schedule.all_full(config), "dense": DENSE}[name]
    whole = prefill_flops(config, start, start + tokens, schedule, logits=tokens)
    each = [flops_per_token(config, position, schedule) for position in range(start, start + tokens)]
    assert whole == {part: sum(token[part] for token in each) for part in whole}


def test_a_quarter_is_exact() -> None:
    assert Schedule.quarter(GLM).full_layers == 19.5
    quarter = flops_per_token(GLM, 999, Schedule.quarter(GLM))["indexer"]
    assert quarter * 4 == flops_per_token(GLM, 999, Schedule.all_full(GLM))["indexer"]


def test_dense_attention_sees_everything() -> None:
    debug = ModelConfig.preset("debug")
    dense = prefill_flops(debug, 0, 100, DENSE)
    assert dense["indexer"] == 0
    # 4 heads of 16 + 8 against 16 wide values, expanded, meet 5050 pairs in 9 layers.
    assert dense["attention"] == 2 * 4 * (24 + 16) * 5050 * 9


def top_k_in_products(
    query: Tensor,
    weights: Tensor,
    keys: Tensor,
    table: RowTable,
    sequence_ids: Tensor,
    visible: Tensor,
    topk: int,
    budget_bytes: int,
    **known: object,
) -> Tensor:
    """`index_topk` whose every sum over heads or widths is a matrix product, which a counter sees."""
    selected = torch.full((len(query), topk), -1, dtype=torch.int32)
    for token, length in enumerate(visible.tolist()):
        rows = table.rows(sequence_ids[token, None], torch.arange(length)[None])[0]
        scores = weights[token, None] @ (query[token] @ keys[rows].T).relu()
        best = scores[0].topk(min(topk, length)).indices.sort().values
        selected[token, : len(best)] = best.int()
    return selected


def counted(config: ModelConfig, past: int, tokens: int) -> int:
    """Matrix product FLOPs of our forward pass for the `tokens` after `past` others, and their logits."""
    model = Transformer(config)
    model.initialise(0)
    cache = GrowingCache(config)
    token_ids = torch.arange(past + tokens) % config.vocab_size
    with torch.no_grad():
        if past:
            model(Batch.of([token_ids[:past]]), cache)
        with pytest.MonkeyPatch.context() as patch, FlopCounterMode(display=False) as counter:
            for compiled in (linear_native, moe_native):  # a counter does not see into compiled operations
                patch.setattr(compiled, "supports", lambda *operands, **sizes: False)
            patch.setattr(router_native, "can_take", lambda *operands: False)
            patch.setattr(indexer, "index_topk", top_k_in_products)
            patch.setattr(
                attention, "sparse_mla", lambda *operands, **mode: sparse_mla_reference(*operands[:-1])
            )
            model.lm_head(model(Batch.of([token_ids[past:]], [past]), cache))
    return counter.get_total_flops()


@pytest.mark.parametrize("position", [3, 150])
def test_a_token_costs_what_a_counter_sees(position: int) -> None:
    config = ModelConfig.preset("debug")
    assert sum(flops_per_token(config, position).values()) == counted(config, position, 1)


def test_a_prefill_costs_what_a_counter_sees() -> None:
    config = ModelConfig.preset("debug")
    assert sum(prefill_flops(config, 0, 20, logits=20).values()) == counted(config, 0, 20)


@settings(max_examples=10)
@given(configs(), st.integers(0, 12), st.integers(1, 6))
def test_random_configs_cost_what_a_counter_sees(config: ModelConfig, past: int, tokens: int) -> None:
    flops = prefill_flops(config, past, past + tokens, logits=tokens)
    assert sum(flops.values()) == counted(config, past, tokens)


@settings(max_examples=15)
@given(configs(), st.booleans())
def test_parameters_are_those_of_the_model(config: ModelConfig, tied: bool) -> None:
    config = config.replace(num_nextn_predict_layers=0, tie_word_embeddings=tied)
    model = Transformer(config)
    biases = sum(buffer.numel() for name, buffer in model.named_buffers() if name.endswith("correction_bias"))
    assert memory.parameters(config) == sum(weight.numel() for weight in model.parameters()) + biases


@settings(max_examples=25)
@given(configs(), st.sampled_from([16, 200]))
def test_weights_are_those_of_the_files(config: ModelConfig, hidden: int) -> None:
    config = config.replace(hidden_size=hidden, moe_intermediate_size=192)
    sizes = dict.fromkeys(memory.FORMATS, 0)
    count = 0
    for name, shape in expected_tensors(config).items():
        numbers = torch.Size(shape).numel()
        bias = name.endswith("e_score_correction_bias")
        blocks = torch.Size([-(-width // 128) for width in shape]).numel()
        count += numbers
        sizes["bfloat16"] += numbers * (4 if bias else 2)
        sizes["fp8"] += numbers + 4 * blocks if becomes_fp8(name, shape) else numbers * (4 if bias else 2)
    assert memory.parameters(config) == count
    assert {dtype: memory.weight_bytes(config, dtype) for dtype in memory.FORMATS} == sizes


@settings(max_examples=15)
@given(configs(), st.integers(1, 9), st.sampled_from(["float32", "bfloat16"]))
def test_cache_bytes_are_those_of_the_tensors(config: ModelConfig, tokens: int, index: memory.Format) -> None:
    capacity = 16
    cache = GrowingCache(config, capacity=capacity, index_dtype=getattr(torch, index))
    per_token = memory.cache_bytes_per_token(config, "float32", index, mtp=False)
    stored = [*cache.latent, *cache.index.values()]
    assert sum(tensor.nbytes for tensor in stored) == capacity * per_token
    assert set(cache.index) == set(config.full_layers)
    cache.lengths = [tokens]
    assert sum(cache.memory().values()) == tokens * per_token


@given(st.integers(1, 90), st.integers(1, 20))
def test_layers_are_owned_once_and_in_order(layers: int, ranks: int) -> None:
    blocks = memory.owned_layers(layers, ranks)
    assert [layer for block in blocks for layer in block] == list(range(layers))
    sizes = [len(block) for block in blocks]
    assert len(sizes) == ranks
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


def test_what_fits_on_a_node(glm: dict[str, Any]) -> None:
    assert [len(block) for block in memory.owned_layers(78, 8)] == [10, 10, 10, 10, 10, 10, 9, 9]
    fits = {(fit["weights"], fit["cache"], fit["layer_split"]): fit for fit in glm["fits"]}
    assert not fits["bfloat16", "fp8", True]["weights_fit"]
    copied, split = fits["fp8", "fp8", False], fits["fp8", "fp8", True]
    assert copied["bytes_per_token_per_gpu"] == 54_728
    # Layers 0 to 9 with the full ones 0, 1, 2 and 6; one scratch layer; the draft layer.
    assert split["bytes_per_token_per_gpu"] == 10 * 656 + 4 * 132 + 2 * (656 + 132)
    assert copied["largest_context"] < MILLION == split["largest_context"]
    free = 141 * 0.9 * memory.GIB - memory.weight_bytes(GLM, "fp8") / 8
    assert split["tokens"] == int(free / split["bytes_per_token_per_gpu"])
    assert split["sequences"] == split["tokens"] // MILLION


def test_more_memory_fits_more() -> None:
    smaller, larger = plan(GLM, 1000, gpu_gib=141)["fits"], plan(GLM, 1000, gpu_gib=288)["fits"]
    assert all(few["tokens"] < many["tokens"] for few, many in zip(smaller, larger, strict=True))


@pytest.mark.parametrize(
    "wrong", [{"context": 0}, {"context": 5000}, {"gpus": 0}, {"gpu_gib": 0.0}, {"reserve": 1.0}]
)
def test_impossible_plans_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        plan(ModelConfig.preset("debug"), **{"context": 100, **wrong})


@settings(max_examples=10)
@given(configs(), st.integers(1, 1024), st.integers(1, 9))
def test_any_config_has_a_plan(config: ModelConfig, context: int, gpus: int) -> None:
    result = plan(config, context, gpus)
    assert json.loads(json.dumps(result)) == result
    Console(file=io.StringIO()).print(render(result))
    assert result["flops_per_token"] <= result["flops_per_token_all_full"]


def test_tables_show_the_figures(glm: dict[str, Any]) -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(render(glm))
    shown = console.export_text()
    figures = ("753,329,940,480", "21 of 78", "54,728 B", "53.4 GiB", "284.64 G", "2.74", "weights too large")
    for figure in figures:
        assert figure in shown


def test_index_flops_grow_with_the_context() -> None:
    assert index_flops(GLM, 2048) == 2 * index_flops(GLM, 1024) == 2 * 32 * 128 * 2048


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "flops.png"
    plot(GLM, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="cannot write"):
        plot(GLM, tmp_path / "missing" / "flops.png")
    with pytest.raises(UserError, match="cannot write"):
        plot(GLM, tmp_path / "flops.nonsense")


def test_plot_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match="matplotlib"):
        plot(GLM, tmp_path / "flops.png")
