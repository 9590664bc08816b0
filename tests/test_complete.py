"""The main job with a scripted model: what is read, when it stops, what it reports, what it refuses."""

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from megaspan import complete as job
from megaspan.complete import memory
from megaspan.complete.report import Completion
from megaspan.config import ModelConfig
from megaspan.costs.memory import cache_bytes_per_token
from megaspan.errors import UserError
from megaspan.tokenizer import Tokenizer, byte_alphabet

SPECIALS = ["<|repository|>", "<|file|>", "<|endoftext|>"]
END, FILE = 258, 257


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is checked here are figures of main memory."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder with a tokenizer of bytes and the debug config, but no weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    backend = Backend(models.BPE(vocab=byte_alphabet(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    backend.save(str(folder / "tokenizer.json"))
    config = ModelConfig.preset("debug").to_dict() | {"vocab_size": 300, "eos_token_id": [END]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "a.py").write_text("one\ntwo\n")
    (folder / "b.py").write_text("bee\n")
    (folder / "c.bin").write_bytes(b"\0")
    return folder


class Scripted:
    """A model that says `script` whatever it reads: first the line end that was taken off the prompt.

    An exception in the script is raised in its turn.
    """

    def __init__(self, script: list):
        self.script, self.read, self.cache = list(script), [], self

    def memory(self) -> dict[str, int]:
        return {"latent": 3 * len(self.read), "index": len(self.read)}

    def prefill(self, token_ids: list[int], on_progress) -> torch.Tensor:
        for token_id in token_ids:
            self.read.append(token_id)
            on_progress(len(self.read), len(token_ids))
        return self.answer()

    def step(self, token_id: int) -> torch.Tensor:
        self.read.append(token_id)
        return self.answer()

    def answer(self) -> torch.Tensor:
        token_id = self.script.pop(0)
        if isinstance(token_id, BaseException):
            raise token_id
        logits = torch.zeros(300)
        logits[token_id] = 1
        logits[260:] = 9  # beyond the tokenizer: padding of the vocabulary
        return logits


def run(
    monkeypatch: pytest.MonkeyPatch, request: job.Request, script: list
) -> tuple[Completion, Scripted, str]:
    scripted = Scripted(script)
    monkeypatch.setattr(job, "open_generation", lambda request, dtype, capacity: scripted)
    written: list[str] = []
    completion = job.complete(request, Console(file=io.StringIO()), written.append)
    return completion, scripted, "".join(written)


def test_it_reads_the_packed_repository_and_streams_until_the_file_ends(
    model: Path, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = job.Request(model=model, repo=repo, file="a.py", line=2)
    completion, scripted, written = run(monkeypatch, request, [*b"\nx\xc3\xa9", FILE])
    tokenizer = Tokenizer.load(model)
    read = tokenizer.decode(scripted.read)
    assert read == "<|repository|>project\n<|file|>b.py\nbee\n<|file|>a.py\none\nx\xe9"
    assert written == completion.text == "x\xe9"
    assert completion.stopped_by == "end"
    assert completion.files_included == ("b.py", "a.py")
    assert completion.skipped == {"not text": 1}
    assert completion.decode_steps == 4
    assert completion.prompt_tokens == completion.tokens_read == len(scripted.read) - 4
    assert completion.latent_bytes == 3 * completion.index_bytes == 3 * len(scripted.read)


@pytest.mark.parametrize("end", [END, FILE])
def test_each_end_stops_before_it_is_written(model: Path, monkeypatch: pytest.MonkeyPatch, end: int) -> None:
    text = model / "prompt.txt"
    text.write_text("go on")
    request = job.Request(model=model, prompt_file=str(text))
    completion, scripted, written = run(monkeypatch, request, [97, end])
    assert (completion.stopped_by, written, scripted.read) == ("end", "a", [*b"go on", 97])
    assert completion.files_included == ()


def test_max_tokens_reads_no_token_in_vain(model: Path, repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = job.Request(model=model, repo=repo, file="a.py", max_tokens=3)
    completion, scripted, written = run(monkeypatch, request, [*b"\nab"])
    assert (completion.stopped_by, written, scripted.script) == ("max_tokens", "ab", [])


def test_interrupted_while_generating(model: Path, repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = job.Request(model=model, repo=repo, file="a.py")
    completion, _, written = run(monkeypatch, request, [*b"\nab", KeyboardInterrupt()])
    assert (completion.stopped_by, written, completion.decode_steps) == ("interrupt", "ab", 2)
    assert completion.decode_speed is not None


def test_interrupted_while_reading(model: Path, repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = job.Request(model=model, repo=repo, file="a.py")
    completion, _, written = run(monkeypatch, request, [KeyboardInterrupt()])
    assert (completion.stopped_by, written, completion.decode_speed) == ("interrupt", "", None)
    assert completion.tokens_read > 0
    json.dumps(completion.to_dict())


def test_flops_are_those_of_the_plan(model: Path, repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    completion, _, _ = run(monkeypatch, job.Request(model=model, repo=repo, file="a.py"), [97, END])
    flops = completion.flops_per_token()
    assert 0 < flops["spent"] < flops["per_layer_indexers"]
    full, layers = len(completion.config.full_layers), completion.config.num_hidden_layers
    one_layer = (flops["per_layer_indexers"] - flops["spent"]) / (layers - full)
    assert one_layer * full < flops["spent"]


def test_context_is_what_fits_unless_it_is_asked(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P22: what is free is read anew each time, not once when the program starts."""
    repo = tmp_path / "large"
    repo.mkdir()
    for name in "abc":
        (repo / f"{name}.py").write_text("0123456789" * 200)
    config = ModelConfig.from_json(model)
    fixed = memory.fixed_memory(config, "float32", job.CHUNKS["cpu"])
    row = cache_bytes_per_token(config, "float32", mtp=False)
    free = fixed + 1100 * row
    monkeypatch.setattr(memory, "available_memory", lambda: free)
    request = job.Request(model=model, repo=repo, file="a.py", max_tokens=10)
    completion, _, _ = run(monkeypatch, request, [END])
    assert completion.prompt_tokens == 1024 - 10
    free = fixed + 2300 * row
    completion, _, _ = run(monkeypatch, request, [END])
    assert completion.prompt_tokens == 2304 - 256 - 10
    asked = job.Request(model=model, repo=repo, file="a.py", max_tokens=10, context=3000)
    with pytest.raises(UserError, match="largest context that fits is 2038 tokens"):
        run(monkeypatch, asked, [])
    free = fixed - 1
    with pytest.raises(UserError, match="none fits beside the weights"):
        run(monkeypatch, request, [])
    monkeypatch.setattr(memory, "available_memory", lambda: None)
    completion, _, _ = run(monkeypatch, asked, [END])
    assert completion.prompt_tokens == 3000


def test_bad_requests(model: Path, repo: Path, tmp_path: Path) -> None:
    for values, message in [
        ({}, "nothing to complete"),
        ({"repo": repo}, "nothing to complete"),
        ({"repo": repo, "file": "a.py", "prompt_file": "-"}, "of its own"),
        ({"prompt_file": "-", "line": 3}, "of its own"),
        ({"prompt_file": "-", "max_tokens": 0}, "--max-tokens is 0"),
        ({"prompt_file": "-", "context": -5}, "--context is -5"),
        ({"prompt_file": "-", "threads": 0}, "--threads is 0"),
        ({"prompt_file": "-", "temperature": float("nan")}, "--temperature is nan"),
        ({"prompt_file": "-", "temperature": -0.1}, "--temperature is -0.1"),
        ({"prompt_file": "-", "seed": -1}, "--seed is -1"),
    ]:
        with pytest.raises(UserError, match=message):
            job.Request(model=model, **values)


# --- memory ----------------------------------------------------------------------------------------------


def files(root: Path, content: dict[str, str]) -> Path:
    for name, text in content.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_the_machine_says_what_is_available(tmp_path: Path) -> None:
    files(tmp_path, {"meminfo": "MemTotal: 99 kB\nMemAvailable:   12 kB\n"})
    assert memory._machine_room(tmp_path / "meminfo") == [12 * 1024]
    assert memory._machine_room(tmp_path / "nothing") == []


def test_control_groups_of_version_two_count_at_every_level(tmp_path: Path) -> None:
    files(
        tmp_path,
        {
            "self": "0::/outer/inner\n",
            "outer/inner/memory.max": "max\n",
            "outer/inner/memory.current": "5\n",
            "outer/inner/memory.stat": "",
            "outer/memory.max": "1000\n",
            "outer/memory.current": "700\n",
            "outer/memory.stat": "anon 600\ninactive_file 50\n",
        },
    )
    assert memory._group_rooms(tmp_path / "self", tmp_path) == [350]


def test_control_groups_of_version_one_and_a_path_of_the_host(tmp_path: Path) -> None:
    files(
        tmp_path,
        {
            "self": "4:cpu:/x\n3:memory,hugetlb:/docker/not-visible-here\n0::/\n",
            "memory/memory.limit_in_bytes": "1000\n",
            "memory/memory.usage_in_bytes": "400\n",
            "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 30\n",
        },
    )
    assert memory._group_rooms(tmp_path / "self", tmp_path) == [630]


def test_the_limit_of_the_process_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1 << 50, 1 << 50))
    (room,) = memory._process_room()
    assert 0 < room < 1 << 50
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1 << 20, 1 << 20))
    assert memory.available_memory() == 0


def test_needed_memory_grows_by_the_rows_of_full_and_shared_layers() -> None:
    config = ModelConfig.preset("span-code")
    rows = 12 * (128 + 16) + 5 * 32
    shorter, longer = (memory.needed_memory(config, "bfloat16", tokens, 512) for tokens in (1000, 1001))
    assert longer - shorter == 2 * rows


def test_a_gpu_is_taken_where_there_is_one(model: Path, repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory and not the machine's then bounds the context, and the report says where it ran."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 40, 1 << 40))
    monkeypatch.setattr(memory, "available_memory", lambda: 0)
    request = job.Request(model=model, repo=repo, file="a.py")
    completion, _, _ = run(monkeypatch, request, [*b"\n", END])
    assert completion.to_dict()["device"] == "cuda"
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 20, 1 << 40))
    with pytest.raises(UserError, match="none fits beside the weights"):
        run(monkeypatch, request, [])
    with pytest.raises(UserError, match="none fits beside the weights"):
        run(monkeypatch, job.Request(model=model, repo=repo, file="a.py", device="cpu"), [])
    with pytest.raises(UserError, match="no device 'gpu' here"):
        run(monkeypatch, job.Request(model=model, repo=repo, file="a.py", device="gpu"), [])
