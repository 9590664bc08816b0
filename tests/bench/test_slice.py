"""The slice's bench at the debug widths: the whole path on a CPU, what it sets up, and what it refuses."""

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from megaspan.bench import slice
from megaspan.bench.device_time import PEAK_FLOPS, Stopwatch
from megaspan.bench.slice import parts, runner
from megaspan.bench.slice.attention import attention_alone
from megaspan.bench.slice.model import Contexts, contexts_that_fit, random_model, read_bytes, slice_config
from megaspan.bench.slice.parts import Alone, Slice, TooSlow
from megaspan.bench.slice.peer import transformers_cache_bytes
from megaspan.bench.slice.report import GOALS, Report
from megaspan.cli import app
from megaspan.config import ModelConfig
from megaspan.costs.memory import parameters
from megaspan.errors import UserError
from megaspan.model.batch import Batch

CPU = torch.device("cpu")
DEBUG = ModelConfig.preset("debug")
REAL = ModelConfig.preset("glm-5.2")
OPTIONS = slice.Options(config="debug", layers=4, context=256, chunk=64, rows="fp8", device="cpu")


@pytest.fixture
def quick(monkeypatch):
    """One step where there are many, in a table of few sequences."""
    monkeypatch.setattr(parts, "STEPS", 1)
    monkeypatch.setattr(runner, "BATCHES", (1, 2, 3))
    cold = Stopwatch.cold
    monkeypatch.setattr(Stopwatch, "cold", lambda self, calls: cold(self, calls, budget_s=0.0))


def make(rows="bfloat16", share=True, layers=4, experts=0, length=64, slots=3, distinct=3) -> Slice:
    config = slice_config(DEBUG, layers, experts, share)
    return Slice(config, rows, length, slots, distinct, 4, Stopwatch(CPU))


# --- a whole run -------------------------------------------------------------------------------------------


def test_a_run_gives_every_figure(quick):
    options = replace(OPTIONS, rows="both", parts=("decode", "batches", "attention", "invariant"))
    report = slice.run(options, lambda said: None)
    assert report.failures == []
    names = [row.name for row in report.rows]
    assert len(set(names)) == len(names)
    assert all(row.value is not None and row.value > 0 for row in report.rows)
    prefix = "4-layer slice of debug, "
    for end in (
        "prefill of 256 tokens, FP8 rows",
        "prefill of 256 tokens, bf16 rows",
        "latent rows of 256 tokens, bf16 rows",
        "decode at 128, batch 1, FP8 rows",
        "decode at 256, batch 3, bf16 rows",
        "decode at 256, batch 1, FP8 rows, an indexer in every layer",
        "attention at 256, decode of batch 3, an indexer in every layer ÷ IndexShare",
        "attention at 256, the last chunk of the prefill, an indexer in every layer ÷ IndexShare",
        "batch-invariant mode ÷ default, decode at 128, batch 2, FP8 rows",
    ):
        assert prefix + end in names
    assert all(row.target is None for row in report.rows)


def test_with_experts_and_beside_transformers(quick):
    pytest.importorskip("transformers")
    report = slice.run(replace(OPTIONS, experts=8, parts=("decode", "transformers")), lambda said: None)
    assert report.failures == []
    rows = {row.name.removeprefix("4-layer slice of debug with 8 experts, "): row for row in report.rows}
    theirs = {end: rows[f"decode at 128, batch 1, transformers, {end}"] for end in ("eager", "sdpa")}
    assert all(row.value is not None and row.peer is None for row in theirs.values())
    peer = rows["decode at 128, batch 1, FP8 rows"].peer
    assert peer is not None
    assert peer.startswith("transformers ")
    assert rows["latent rows of 256 tokens, FP8 rows"].peer == "transformers: 0.000305 GiB of keys and values"
    best = min(float(row.value or 0) for row in theirs.values())
    assert peer.endswith(f": {best:.3g}")
    assert rows["decode at 256, batch 1, FP8 rows"].peer is None


def test_the_command_prints_rows_that_say_how_to_run_it_again(quick):
    arguments = [
        "--config",
        "debug",
        "--context",
        "128",
        "--chunk",
        "64",
        "--rows",
        "fp8",
        "--parts",
        "decode",
    ]
    result = CliRunner().invoke(app, ["bench", "slice", *arguments, "--device", "cpu", "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    (command,) = {row["command"] for row in rows}
    assert command == (
        "megaspan bench slice --config debug --layers 4 --context 128 --rows fp8 --chunk 64 --parts decode"
    )


def test_every_target_is_that_of_a_figure_of_the_default_run(quick, monkeypatch):
    """The same run with the names that it has at a million tokens."""
    monkeypatch.setattr(runner, "BATCHES", (1, 8, 32))
    words = {64: "128K", 128: "1M"}
    monkeypatch.setattr(runner, "size", words.__getitem__)
    monkeypatch.setattr(slice.Options, "whole", "1M")
    options = replace(OPTIONS, rows="both", context=128, parts=slice.PARTS[:-1])
    report = slice.run(options, lambda said: None)
    assert set(GOALS) <= {row.name.removeprefix("4-layer slice of debug, ") for row in report.rows}


def test_goals_and_published_figures_are_those_of_the_default_run():
    name = "attention at 1M, decode of batch 1, an indexer in every layer ÷ IndexShare"
    for has_goals in (True, False):
        report = Report("slice", "megaspan bench slice", has_goals, lambda said: None)
        report.add(name, 2.5, "times", "higher")
        (row,) = report.rows
        assert row.met is (True if has_goals else None)
        assert row.peer == ("2.9 times fewer FLOPs (published)" if has_goals else None)


def test_a_context_that_no_gpu_holds_is_one_that_transformers_cannot_follow(quick, monkeypatch):
    monkeypatch.setattr(runner, "IMPLEMENTATIONS", ())
    held = transformers_cache_bytes(slice_config(DEBUG, 4, 0, share=True), 256)
    for memory, peer in (
        (held, None),
        (held - 1, "transformers: impossible, 0.000305 GiB of keys and values"),
    ):
        monkeypatch.setattr(Stopwatch, "memory_bytes", memory)
        report = slice.run(replace(OPTIONS, parts=("decode", "transformers")), lambda said: None)
        peers = {row.name.removeprefix("4-layer slice of debug, "): row.peer for row in report.rows}
        assert peers["prefill of 256 tokens, FP8 rows"] == peer
        assert peers["decode at 256, batch 1, FP8 rows"] == peer
        assert peers["decode at 128, batch 1, FP8 rows"] is None


# --- what it is made of ------------------------------------------------------------------------------------


def test_the_slice_of_the_real_model():
    config = slice_config(REAL, 4, 0, share=True)
    assert config.indexer_types == ("full", "shared", "shared", "shared")
    assert parameters(config) == pytest.approx(3.48e9, rel=2e-3)
    assert slice_config(REAL, 4, 0, share=False).full_layers == (0, 1, 2, 3)
    assert slice_config(REAL, 4, 256, share=True).mlp_layer_types == ("dense",) * 3 + ("sparse",)


def test_random_weights_keep_states_as_large_as_they_are():
    config = slice_config(DEBUG, 4, 8, share=True)
    model = random_model(config, CPU)
    one = make(experts=8)
    hidden = model.model.embed_tokens(one.token_ids)
    assert 0.8 < float(hidden.float().std()) < 1.2
    batch = Batch(one.token_ids, (64,), (0,), (0,))
    with torch.inference_mode():
        hidden, _ = model.run_layers(hidden, None, batch, one.contexts.cache, range(4))
        logits = model.unembed(model.model.norm(hidden))
    assert 0.5 < float(hidden.float().std()) < 4
    assert 0.5 < float(logits.std()) < 2
    assert model.model.layers[3].mlp.gate.weight.dtype == torch.float32
    assert model.lm_head.weight.dtype == torch.bfloat16


def test_a_step_reads_all_weights_but_the_embedding_and_the_experts_of_nobody():
    dense = random_model(slice_config(DEBUG, 2, 0, share=True), CPU)
    total = sum(parameter.nbytes for parameter in dense.parameters())
    assert read_bytes(dense, 1) == total - dense.model.embed_tokens.weight.nbytes
    sparse = random_model(slice_config(DEBUG, 2, 8, share=True), CPU)
    experts = sum(parameter.nbytes for name, parameter in sparse.named_parameters() if ".experts." in name)
    assert read_bytes(sparse, 2) - read_bytes(sparse, 1) == pytest.approx(experts * (1 / 4 - 1 / 16))


def test_the_floors_of_attention_are_what_it_reads_and_computes(monkeypatch):
    """What remains of them when the rest of a step's floor is taken off, and the FLOPs by hand."""
    monkeypatch.setattr(Stopwatch, "copy_rate", 1.0)
    shared, every = make("fp8"), make("fp8", share=False)
    weights = read_bytes(shared.model, 2)
    assert shared.decode_attention(2).floor == pytest.approx(shared.decode_floor(2, 64) - weights)
    keys, rows = 20 * 64, 4 * 8 * 52  # of one token: FP8 index keys of one layer, 8 latent rows of each layer
    assert every.decode_attention(2).over(shared.decode_attention(2))[1] == pytest.approx(
        (4 * keys + rows) / (keys + rows)
    )
    assert shared.prefill_attention(16).floor is None
    monkeypatch.setattr(Stopwatch, "has_known_peak", True)
    shared, every = make("fp8"), make("fp8", share=False)
    pairs = sum(range(64 - 16 + 1, 64 + 1))
    scores = 2 * DEBUG.index_n_heads * DEBUG.index_head_dim * pairs / PEAK_FLOPS["fp8"]
    products = DEBUG.num_attention_heads * (DEBUG.latent_width + DEBUG.kv_lora_rank)
    attention = 4 * 2 * 16 * 8 * products / PEAK_FLOPS["bfloat16"]
    assert shared.prefill_attention(16).floor == pytest.approx(scores + attention)
    assert every.prefill_attention(16).floor == pytest.approx(4 * scores + attention)


def test_ratios_without_floors_have_none():
    assert Alone(6.0, None).over(Alone(2.0, 1.0)) == (3.0, None)
    assert Alone(6.0, 3.0).over(Alone(2.0, 1.0)) == (3.0, 3.0)


def test_transformers_keeps_keys_and_values_of_every_head():
    assert transformers_cache_bytes(slice_config(REAL, 4, 0, share=True), 1 << 20) == 256 << 30


def test_pages_are_shuffled_and_sequences_have_their_own_as_far_as_there_are():
    config = slice_config(DEBUG, 2, 0, share=True)
    contexts = Contexts(config, 30, "bfloat16", slots=3, distinct=2, device=CPU, page_size=4)
    starts = contexts.cache.starts[:3] // 4
    assert starts.shape[1] == contexts.pages_each == 8
    assert sorted(starts[:2].flatten().tolist()) == list(range(16))
    assert starts[0].tolist() != sorted(starts[0].tolist())
    assert torch.equal(starts[2], starts[0])


@pytest.mark.parametrize("rows", ["bfloat16", "fp8"])
def test_the_other_sequences_get_the_first_ones_rows(rows, monkeypatch):
    monkeypatch.setattr("megaspan.bench.slice.model.COPIED_PAGES", 3)
    one = make(rows, length=40)
    one.prefill(20, limit_s=60)
    logits = []
    for slot in range(3):
        batch = Batch(one.token_ids[-1:], (1,), (39,), (slot,))
        with torch.inference_mode():
            logits.append(one.model.unembed(one.model(batch, one.contexts.cache)))
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])
    assert logits[0].isfinite().all()


def test_bytes_and_contexts_that_fit_are_those_of_the_formats():
    config = slice_config(REAL, 4, 0, share=True)
    each = (1 << 20) * (4 * 656 + 132)
    assert contexts_that_fit(config, "fp8", 1 << 20, 32, 10.5 * each) == 10
    assert contexts_that_fit(config, "fp8", 1 << 20, 32, 99 * each) == 32
    assert contexts_that_fit(config, "fp8", 1 << 20, 32, -1.0) == 1
    contexts = Contexts(slice_config(DEBUG, 4, 0, share=True), 64, "bfloat16", 1, 1, CPU, 4)
    assert contexts.row_bytes("latent") == 64 * 4 * 40 * 2
    assert contexts.row_bytes("index") == 64 * 16 * 2


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("rows", ["bfloat16", "fp8"])
def test_attention_alone_is_that_of_the_pass(rows, share):
    """Layer by layer, bit for bit."""
    one = make(rows, share)
    one.prefill(32, limit_s=60)
    batch = Batch(one.token_ids[32:], (32,), (32,), (0,))
    outputs = attention_alone(one.model, one.contexts.cache, batch)()
    seen = []
    for layer in one.model.model.layers:
        attention = layer.self_attn
        attend = attention._attend
        attention._attend = lambda *operands, attend=attend: seen.append(attend(*operands)) or seen[-1]
    with torch.inference_mode():
        one.model(batch, one.contexts.cache)
    assert len(outputs) == len(seen) == 4
    for ours, theirs in zip(outputs, seen, strict=True):
        assert torch.equal(ours, theirs)


def test_decoding_leaves_the_first_sequence_as_it_was():
    one = make()
    one.prefill(32, limit_s=60)
    before = one.contexts.cache.rows("latent", 3)[one.contexts.cache.starts[0] + 3].clone()
    one.decode(2, 64)
    one.decode(1, 32)
    after = one.contexts.cache.rows("latent", 3)[one.contexts.cache.starts[0] + 3]
    assert torch.allclose(before.float(), after.float(), atol=0.05)


def test_reading_that_takes_too_long_is_given_up(quick):
    with pytest.raises(TooSlow, match="stopped after 32 of 64 tokens"):
        make().prefill(32, limit_s=0.0)


def test_a_context_that_is_not_read_has_no_more_figures(quick, monkeypatch):
    monkeypatch.setattr(runner, "PREFILL_LIMIT_S", 0.0)
    report = slice.run(replace(OPTIONS, parts=("decode",)), lambda said: None)
    (row,) = report.rows
    assert row.value is None
    assert row.note.startswith("stopped after 64 of 256 tokens")


# --- what fails --------------------------------------------------------------------------------------------


def test_where_memory_ends_a_row_says_so_and_the_run_goes_on(quick, monkeypatch):
    decode = Slice.decode

    def small(self, batch, length):
        if batch > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB\nmore")
        return decode(self, batch, length)

    monkeypatch.setattr(Slice, "decode", small)
    report = slice.run(replace(OPTIONS, parts=("batches", "decode")), lambda said: None)
    assert report.failures == []
    noted = {
        row.name
        for row in report.rows
        if row.note == "out of memory: CUDA out of memory. Tried to allocate 9 GiB"
    }
    assert len(noted) == 4
    assert any(row.name.endswith("decode at 256, batch 1, FP8 rows") and row.value for row in report.rows)


def test_a_part_that_breaks_keeps_the_run_from_being_recorded(tmp_path):
    report = Report("slice", "megaspan bench slice", False, lambda said: None)
    with report.part("decode"):
        raise RuntimeError("no such kernel\nand more")
    report.add("prefill", 1.0, "s")
    with pytest.raises(UserError, match=r"parts of the run failed: decode: RuntimeError: no such kernel$"):
        slice.record(report, tmp_path)
    assert list(tmp_path.iterdir()) == []
    report.failures.clear()
    slice.record(report, tmp_path)
    assert len(json.loads((tmp_path / "slice.json").read_text())["rows"]) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": "int4"}, "no rows 'int4': choose from fp8, bfloat16, both"),
        ({"parts": ("decode", "sleep")}, "no part 'sleep'; there are decode, "),
        ({"layers": 0}, "--layers is 0: give at least 1"),
        ({"chunk": 0}, "--chunk is 0"),
        ({"context": 1}, "--context is 1: give at least 2"),
        ({"experts": -1}, "--experts is -1"),
        ({"context": 250}, "--context 250 is no multiple of --chunk 64"),
        ({"config": "nothing"}, "nothing is neither a file nor a preset"),
        ({"experts": 1}, "num_experts_per_tok"),
        ({"experts": 9}, "--experts is 9, but the config has 8: give no more"),
        ({"layers": 10}, "--layers is 10, but the config has 9: give no more"),
        ({"device": "gpu"}, "--device gpu: figures are taken on cuda and on cpu"),
    ],
)
def test_options_that_cannot_be_are_refused_before_anything_is_measured(changes, message):
    said: list[str] = []
    with pytest.raises(UserError, match=message):
        slice.run(replace(OPTIONS, **changes), said.append)
    assert said == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_gpu_the_default_says_what_to_do():
    result = CliRunner().invoke(app, ["bench", "slice"])
    assert result.exit_code == 2
    assert "no CUDA device here: --device cpu --config debug --context 256" in result.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_run_at_real_widths_on_a_gpu(quick):
    options = slice.Options(context=16384, chunk=4096, parts=slice.PARTS[:-1])
    report = slice.run(options, lambda said: None)
    assert report.failures == []
    assert all(row.value is not None and row.value > 0 for row in report.rows)
