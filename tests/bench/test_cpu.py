from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megaspan.bench import cpu, runners
from megaspan.bench.cpu_rows import memory_growth, rows
from megaspan.bench.gguf_file import llama_tensors
from megaspan.bench.measure import Job, measure, measure_apart, prompt
from megaspan.bench.random_checkpoint import CONFIG, write_random_checkpoint
from megaspan.bench.runners import missing, open_runner, ours
from megaspan.errors import UserError


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_random_checkpoint(folder)
    return folder


@pytest.fixture
def in_this_process(monkeypatch) -> Iterator[None]:
    """Spare the agreement check its processes, and most of its steps."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(cpu, "measure_apart", lambda job: measure(job, CONFIG.vocab_size))
    monkeypatch.setattr(cpu, "AGREEMENT_TOKENS", 160)
    monkeypatch.setattr(cpu, "AGREEMENT_STEPS", 2)
    yield
    torch.set_num_threads(threads)


def answer(rate: float, length: int, decode: float = 100.0, peak: float = 2.0**30) -> dict[str, float]:
    return {"prefill_s": length / rate, "step_s": 1 / decode, "peak_bytes": peak, "idle_bytes": peak / 2}


GFLOPS = {"float32": 80.0, "bfloat16": 160.0}
MEASURED = {
    ("megaspan", 8192): answer(2000, 8192, decode=500, peak=3 * 2**28),
    ("megaspan, bf16 index", 8192): answer(3000, 8192, decode=600),
    ("transformers", 8192): answer(500, 8192, decode=30),
    ("llama.cpp", 8192): answer(600, 8192, decode=200),
    ("megaspan", 32768): answer(1500, 32768, peak=3 * 2**28 + 24576 * 4096),
    ("transformers", 32768): {"limit_s": 900.0},
    ("llama.cpp", 32768): answer(400, 32768),
    ("megaspan", 131072): answer(500, 131072, decode=39, peak=3 * 2**28 + (131072 - 8192) * 4096),
    ("transformers", 131072): {"error": "not run beyond 32K"},
    ("llama.cpp", 131072): {"error": "not installed: pip install llama-cpp-python"},
}


def made() -> dict:
    return {row.name: row for row in rows(MEASURED, GFLOPS, "megaspan bench cpu")}


def test_targets_follow_the_peers_of_the_same_run():
    by_name = made()
    assert by_name["prefill at 8K, megaspan"].target == 1200
    assert by_name["prefill at 32K, megaspan"].target == pytest.approx(3 * 400)
    assert by_name["prefill at 32K, megaspan"].met is True
    assert by_name["decode at 8K, megaspan"].target == pytest.approx(10 * 30)
    assert by_name["decode at 128K, megaspan"].met is False
    assert by_name["prefill at 8K, megaspan"].peer.endswith(": 600")
    assert by_name["peak memory of a 128K prefill, megaspan"].met is True


def test_a_peer_without_a_figure_has_a_reason():
    by_name = made()
    assert by_name["prefill at 32K, transformers"].value is None
    assert by_name["prefill at 32K, transformers"].note == "did not finish in 900 s"
    assert by_name["decode at 128K, llama.cpp"].figure() == "not installed: pip install llama-cpp-python"


def test_no_peer_no_target():
    alone = {key: value for key, value in MEASURED.items() if key[0].startswith("megaspan")}
    by_name = {row.name: row for row in rows(alone, GFLOPS, "megaspan bench cpu")}
    assert by_name["prefill at 32K, megaspan"].target is None
    assert by_name["prefill at 32K, megaspan"].peer is None


def test_linear_memory_grows_by_the_same_per_token():
    assert memory_growth(MEASURED, "megaspan") == pytest.approx(1)
    quadratic = {("megaspan", length): {"peak_bytes": length**2} for length in (8192, 32768, 131072)}
    assert memory_growth(quadratic, "megaspan") == pytest.approx(4)


def test_floors_shrink_with_the_length():
    by_name = made()
    floors = [by_name[f"prefill at {length}, megaspan"].floor for length in ("8K", "32K", "128K")]
    assert floors == sorted(floors, reverse=True)
    # At 128K nearly all products are index scores: 4 full layers × 2 × 32 heads × 64 × half the positions.
    assert floors[-1] == pytest.approx(80e9 / (4 * 2 * 32 * 64 * 65536), rel=0.1)
    # With index keys in bf16, index scores are products at the bf16 rate.
    rounded = by_name["decode at 8K, megaspan, bf16 index"].floor
    assert 1 < rounded / by_name["decode at 8K, megaspan"].floor < 2


def test_measure_gives_rates_and_memory(checkpoint):
    got = measure(Job("megaspan", str(checkpoint), 300, 2, 1, 60), CONFIG.vocab_size)
    assert got["prefill_s"] > 0
    assert got["step_s"] > 0
    assert got["peak_bytes"] >= got["idle_bytes"] > 2**20


def test_measure_gives_up_after_the_limit(checkpoint):
    job = Job("megaspan", str(checkpoint), 600, 1, 1, 0.0, return_logits=True)
    assert measure(job, CONFIG.vocab_size) == {"limit_s": 0.0}


def test_a_process_that_breaks_says_why(tmp_path):
    got = measure_apart(Job("megaspan", str(tmp_path / "absent"), 10, 1, 1, 10))
    assert "absent" in got["error"]


@pytest.mark.parametrize(
    "change",
    [{"index_topk": 65}, {"rope_theta": 1e4}, {"num_experts_per_tok": 1}, {"routed_scaling_factor": 2.4}],
    ids=lambda change: next(iter(change)),
)
def test_the_agreement_check_sees_what_differs(checkpoint, tmp_path, monkeypatch, in_this_process, change):
    write_random_checkpoint(tmp_path, replace(CONFIG, **change))

    class Wrong(ours.Runner):
        def __init__(self, checkpoint: Path, capacity: int, threads: int):
            super().__init__(tmp_path, capacity, threads)

    monkeypatch.setattr(ours, "Wrong", Wrong, raising=False)
    monkeypatch.setitem(runners.RUNNERS, "wrong", ("ours", "Wrong"))
    with pytest.raises(UserError, match="wrong and megaspan do not compute the same"):
        cpu.check_agreement(["megaspan", "wrong"], str(checkpoint), threads=1)


def test_transformers_agrees(checkpoint, in_this_process):
    pytest.importorskip("transformers")
    assert cpu.check_agreement(["megaspan", "transformers"], str(checkpoint), 1)["transformers"] < 1e-5


def test_rounded_index_keys_run(checkpoint):
    runner = open_runner("megaspan, bf16 index", checkpoint, 200, 1)
    logits = runner.prefill(prompt(200, CONFIG.vocab_size), lambda done, total: None)
    assert torch.isfinite(logits).all()


def test_gguf_takes_every_weight_once(checkpoint):
    weights = load_file(checkpoint / "model.safetensors")
    written = dict(llama_tensors(CONFIG, weights))
    assert sum(tensor.numel() for tensor in written.values()) == sum(w.numel() for w in weights.values())
    assert written["blk.3.ffn_down_exps.weight"].shape == (8, 128, 64)
    assert "blk.3.indexer.proj.weight" not in written


def test_llama_cpp_agrees(checkpoint, in_this_process):
    pytest.importorskip("llama_cpp")
    name = "llama.cpp, flash attention off"
    assert cpu.check_agreement(["megaspan", name], str(checkpoint), 1)[name] < 1e-5


def test_an_absent_peer_is_told_how_to_install(monkeypatch):
    from megaspan.bench.runners import transformers

    monkeypatch.setattr(transformers, "PACKAGES", ("no-such-package",))
    assert missing("transformers") == "not installed: pip install no-such-package"
    assert missing("megaspan") is None


@pytest.mark.parametrize(
    ("lengths", "peers", "message"),
    [([1024], ["vllm"], "vllm"), ([], [], "lengths"), ([0], [], "lengths"), ([2**20], [], "lengths")],
)
def test_bad_requests_are_refused(lengths, peers, message):
    with pytest.raises(UserError, match=message):
        cpu.run(lengths, peers)


def test_command_names_only_what_was_chosen():
    assert cpu.command_line(cpu.LENGTHS, cpu.PEERS, 2) == "megaspan bench cpu"
    chosen = cpu.command_line([1024], ["transformers"], 1)
    assert chosen == "megaspan bench cpu --lengths 1024 --peers transformers --threads 1"
