"""The command with a real small model: text on stdout, figures on stderr, bad input in one line."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from typer.testing import CliRunner

from megaspan.bench.random_checkpoint import write_random_checkpoint
from megaspan.cli import app
from megaspan.cli.shell import SPIN_COUNT
from megaspan.complete import memory
from megaspan.config import ModelConfig
from megaspan.errors import UserError
from megaspan.tokenizer import byte_alphabet


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The debug architecture with random weights, and a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("model")
    backend = Backend(models.BPE(vocab=byte_alphabet(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore
    specials = ["<|repository|>", "<|file|>", "<|endoftext|>"]
    backend.add_special_tokens([AddedToken(token, special=True) for token in specials])
    config = replace(
        ModelConfig.preset("debug"), vocab_size=backend.get_vocab_size(), eos_token_id=(258,),
        num_nextn_predict_layers=0,
    )  # fmt: skip
    write_random_checkpoint(folder, config)
    backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "pkg").mkdir(parents=True)
    (folder / "pkg/a.py").write_text("from pkg import b\n\n\ndef f():\n")
    (folder / "pkg/b.py").write_text("b = 1\n" * 20)
    (folder / "README.md").write_text("# A project\n")
    (folder / "latin.py").write_bytes(b"\xe9")
    (folder / "picture.png").write_bytes(b"\x89PNG\0")
    return folder


def megaspan(*arguments: object, stdin: str | bytes | None = None):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)


def refused(*arguments: object, stdin: str | bytes | None = None) -> str:
    """The one line with which a command refuses its input."""
    result = megaspan(*arguments, stdin=stdin)
    assert result.exit_code == 2, (result.stdout, result.stderr, result.exception)
    assert result.stdout == ""
    assert result.stderr.startswith("megaspan: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


# --- a real model ----------------------------------------------------------------------------------------


def test_complete_streams_to_stdout_and_reports_on_stderr(model: Path, repo: Path) -> None:
    arguments = ("complete", "--repo", repo, "--file", "pkg/a.py", "--model", model, "--max-tokens", 8)
    result = megaspan(*arguments)
    assert result.exit_code == 0, result.exception
    as_json = megaspan(*arguments, "--json")
    assert as_json.exit_code == 0, as_json.exception
    report = json.loads(as_json.stdout)
    assert result.stdout.removesuffix("\n") == report["completion"].removesuffix("\n")
    for word in ("context", "files", "prefill", "decode", "KV rows", "index rows", "FLOPs per token"):
        assert word in result.stderr


def test_json_has_every_figure(model: Path, repo: Path) -> None:
    target = ("--repo", repo, "--file", "pkg/a.py", "--line", 2, "--model", model)
    how = ("--max-tokens", 5, "--context", 100, "--dtype", "float32", "--threads", 1)
    result = megaspan("complete", *target, *how, "--json")
    report = json.loads(result.stdout)
    assert report["context_tokens"] == 100
    assert report["files_included"] == ["pkg/b.py", "pkg/a.py"]
    assert report["files_left_out"] == ["README.md"]
    assert report["files_skipped"] == {"not text": 2}
    assert report["truncated"] == "pkg/b.py"
    assert (report["line"], report["dtype"], report["threads"]) == (2, "float32", 1)
    assert report["prefill_tokens_per_second"] == pytest.approx(100 / report["prefill_seconds"])
    if report["completion_tokens"] > 1:
        assert report["decode_tokens_per_second"] > 0
    assert report["latent_bytes"] > report["index_bytes"] > 0
    assert set(report["flops_per_token"]) == {"spent", "per_layer_indexers", "dense_attention"}


def test_the_same_seed_gives_the_same_text(model: Path, repo: Path) -> None:
    def text(*more: object) -> str:
        arguments = ("--repo", repo, "--file", "pkg/a.py", "--model", model, "--max-tokens", 12, "--json")
        return json.loads(megaspan("complete", *arguments, *more).stdout)["completion"]

    warm = ("--temperature", 1.5, "--seed")
    assert text() == text()
    assert text(*warm, 1) == text(*warm, 1)
    assert len({text(*warm, seed) for seed in range(4)}) > 1


def test_prompt_from_a_file_and_from_stdin_agree(model: Path, tmp_path: Path) -> None:
    text = "def greet(name):\n    return 'héllo ' + "
    (tmp_path / "prompt.txt").write_text(text)
    arguments = ("--model", model, "--max-tokens", 4, "--json")
    from_file = json.loads(megaspan("complete", "--prompt-file", tmp_path / "prompt.txt", *arguments).stdout)
    from_stdin = json.loads(megaspan("complete", "--prompt-file", "-", *arguments, stdin=text).stdout)
    assert from_file["completion"] == from_stdin["completion"]
    assert from_file["context_tokens"] == from_stdin["context_tokens"] == len(text.rstrip().encode())


# --- bad input -------------------------------------------------------------------------------------------


def test_targets_and_repositories_that_are_refused(model: Path, repo: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "outside.py").write_text("x")
    (tmp_path / "only-binary").mkdir()
    (tmp_path / "only-binary/a.bin").write_bytes(b"\0")
    for where, file, more, message in [
        (repo, "pkg/none.py", (), "no file at"),
        (repo, "pkg", (), "is a folder"),
        (repo, "../outside.py", (), "outside the repository"),
        (repo, tmp_path / "outside.py", (), "outside the repository"),
        (repo, "latin.py", (), "not UTF-8"),
        (repo, "picture.png", (), "is binary"),
        (repo, "pkg/a.py", ("--line", 0), "lines count from 1"),
        (repo, "pkg/a.py", ("--line", 6), "which has 4 lines: give at most 5"),
        (repo, "pkg/a.py", ("--context", 5), "too small"),
        (tmp_path / "nowhere", "a.py", (), "no repository at"),
        (tmp_path / "outside.py", "a.py", (), "is a file, not a repository"),
        (tmp_path / "empty", "a.py", (), "holds no text files"),
        (tmp_path / "only-binary", "a.bin", (), "holds no text files"),
    ]:
        said = refused("complete", "--repo", where, "--file", file, "--model", model, *more)
        assert message in said, said


def test_prompts_that_are_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "binary").write_bytes(b"\0\1")
    (tmp_path / "long.txt").write_text("a" * 4090)
    for file, more, message in [
        (tmp_path / "none.txt", (), "no file at"),
        (tmp_path, (), "is a folder"),
        (tmp_path / "binary", (), "is binary"),
        (tmp_path / "empty.txt", (), "prompt is empty"),
        (tmp_path / "long.txt", ("--max-tokens", 7), "more than the model's 4,096 positions"),
        (tmp_path / "long.txt", ("--max-tokens", 1, "--context", 99), "more than --context 99"),
    ]:
        assert message in refused("complete", "--prompt-file", file, "--model", model, *more)
    assert "not UTF-8" in refused("complete", "--prompt-file", "-", "--model", model, stdin=b"\xff\xfe")


def test_no_memory_for_the_context_is_said_before_the_work(
    model: Path, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model_without_weights := repo.parent / "no-weights").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (model_without_weights / name).write_bytes((model / name).read_bytes())
    config = ModelConfig.from_json(model)
    enough = memory.needed_memory(config, "float32", 1500, 512)
    monkeypatch.setattr(memory, "available_memory", lambda: enough)
    said = refused(
        "complete",
        "--repo",
        repo,
        "--file",
        "pkg/a.py",
        "--model",
        model_without_weights,
        "--context",
        3000,
        "--max-tokens",
        80,
    )
    assert "the largest context that fits is 1200 tokens" in said


def test_models_that_are_refused(model: Path, repo: Path, tmp_path: Path) -> None:
    def said(folder: Path) -> str:
        return refused("complete", "--repo", repo, "--file", "pkg/a.py", "--model", folder)

    def changed(name: str, **values: object) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        for file in model.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        config = json.loads((model / "config.json").read_text()) | values
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    assert "no model at" in said(tmp_path / "nowhere")
    assert "config.json" in said(tmp_path)
    assert "llama" in said(changed("other", model_type="llama"))
    assert "do not belong together" in said(changed("small", vocab_size=259 - 1, eos_token_id=[1]))
    truncated = changed("truncated") / "model.safetensors"
    truncated.write_bytes(truncated.read_bytes()[:-1000])
    assert "truncated" in said(truncated.parent)
    (changed("missing") / "model.safetensors").unlink()
    said(tmp_path / "missing")


def test_context_beyond_the_model(model: Path, repo: Path) -> None:
    said = refused("complete", "--repo", repo, "--file", "pkg/a.py", "--model", model, "--context", 4096)
    assert "more than the model's 4,096 positions" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["complete"], "nothing to complete"),
        (["complete", "--line", "x"], "--line"),
        (["complete", "--nonsense"], "--nonsense"),
        (["complete", "--dtype", "float8"], "float8"),
        (["complete", "--prompt-file", "-", "--temperature", "nan"], "--temperature"),
        (["complet"], "complet"),
        (["bench"], "command"),
        (["bench", "cpu", "--lengths", "8,x"], "--lengths"),
        (["plan", "--context", "0"], "--context"),
        (["plan", "--config", "nothing"], "nothing"),
        (["plan", "--config", "debug", "--context", "64", "--plot", "/nonexistent/plot.png"], "cannot write"),
    ],
)
def test_usage_errors_are_one_line(arguments: list[str], message: str) -> None:
    assert message in refused(*arguments)


def test_fields_of_a_config_are_told_as_the_options_that_set_them() -> None:
    """Those of the command only: `vocab_size` is an option of `tokenizer`, and a field of a config.json."""
    assert "--shared-share is 3.0" in refused("bench", "serving", "--shared-share", 3)
    assert "vocab_size" in refused("plan", "--config", "vocab_size")


def test_bench_serving_sets_the_threads_of_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(threads: int) -> None:
        raise UserError(f"{threads} threads")

    monkeypatch.setattr("torch.set_num_threads", told)
    assert refused("bench", "serving", "--sessions", 1, "--threads", 3) == "megaspan: 3 threads\n"


@pytest.mark.parametrize(
    ("command", "given", "expected"),
    [
        ("plan", {}, str(SPIN_COUNT)),
        ("plan", {"GOMP_SPINCOUNT": "7"}, "7"),
        ("plan", {"OMP_WAIT_POLICY": "active"}, None),
        ("bench", {}, None),
    ],
)
def test_parallel_loops_spin_briefly_unless_the_user_says_how(
    monkeypatch: pytest.MonkeyPatch, command: str, given: dict[str, str], expected: str | None
) -> None:
    monkeypatch.setattr(os, "environ", environment := dict(given))
    megaspan(command, "--help" if command == "bench" else "--json")
    assert environment.get("GOMP_SPINCOUNT") == expected


def test_a_read_only_folder_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", "out/documents.json")

    monkeypatch.setattr("megaspan.train.fit_tokenizer.fit_tokenizer", write)
    said = refused("tokenizer", "--manifest", "m.json", "--out", "out", "--wheels", "wheels")
    assert said == "megaspan: cannot use out/documents.json: Read-only file system\n"


def test_the_unforeseen_keeps_its_traceback(model: Path, repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megaspan.complete.read_repository", lambda *_: 1 / 0)
    result = megaspan("complete", "--repo", repo, "--file", "pkg/a.py", "--model", model)
    assert isinstance(result.exception, ZeroDivisionError)


# --- the rest --------------------------------------------------------------------------------------------


def test_plan_prints_a_table_or_one_object() -> None:
    result = megaspan("plan", "--config", "glm-5.2", "--context", 1048576, "--json")
    plan = json.loads(result.stdout)
    assert plan["parameters"] == 753_329_940_480
    assert plan["full_layers"] == 21
    assert plan["kv_bytes_per_token"] == 54_728
    assert "753,329,940,480" in megaspan("plan").stdout


def test_plan_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    image = tmp_path / "plot.png"
    assert megaspan("plan", "--config", "debug", "--context", 64, "--plot", image).exit_code == 0
    assert image.read_bytes().startswith(b"\x89PNG")


def test_help_and_plan_do_not_wait_for_torch() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from megaspan.cli import app\n"
        "for line in ([], ['--help'], ['complete', '--help'], ['plan']):\n"
        "    assert CliRunner().invoke(app, line).exit_code == 0\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


ENDLESS = """
import sys, time, torch
from megaspan import cli, complete

class Endless:
    cache = property(lambda self: self)
    memory = lambda self: {"latent": 0, "index": 0}
    prefill = lambda self, token_ids, on_progress: torch.eye(300)[97]
    def step(self, token_id):
        time.sleep(0.01)
        return torch.eye(300)[98]

complete.open_generation = lambda *_: Endless()
cli.main(sys.argv[1:])
"""


def test_control_c_ends_with_what_there_is(model: Path, repo: Path) -> None:
    arguments = ["complete", "--repo", repo, "--file", "pkg/a.py", "--max-tokens", "3000", "--model", model]
    running = subprocess.Popen(
        [sys.executable, "-c", ENDLESS, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert running.stdout is not None
    written = running.stdout.read(3)
    running.send_signal(signal.SIGINT)
    rest, said = running.communicate(timeout=30)
    assert running.returncode == 130
    # The first byte sampled stands for the line end that the prompt had already shown.
    assert re.fullmatch("b+\n", written + rest)
    assert "interrupted" in said
    assert "Traceback" not in said


def test_a_closed_pipe_is_no_crash() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "megaspan", "plan", "--json"]
    ended = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert "Traceback" not in ended.stderr
