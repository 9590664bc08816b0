"""How CUDA files are compiled and kept, with a compiler that only pretends."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megaspan.ops import cuda

DEVICE = torch.device("cuda")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file, on a machine that seems to have a Hopper GPU and compiles to the source and a count."""
    file = tmp_path / "some" / "kernel.cu"
    file.parent.mkdir()
    file.write_text("code")

    class Compiler:
        @staticmethod
        def nvrtcVersion(*_: object) -> int:
            return 0

    compiled = []

    def compile_it(_nvrtc: object, source: Path, _options: object) -> bytes:
        if source.read_text() == "wrong":
            raise RuntimeError("error on line 1")
        compiled.append(source)
        return f"{source.read_text()} {len(compiled)}".encode()

    monkeypatch.setenv("MEGASPAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(cuda, "_nvrtc", Compiler)
    monkeypatch.setattr(cuda, "_compile", compile_it)
    forget()
    yield file
    forget()


def forget() -> None:
    """As in a new process."""
    cuda.can_run.cache_clear()
    cuda._machine_code.cache_clear()


def test_a_later_start_compiles_nothing(source: Path) -> None:
    assert cuda.can_run(DEVICE, source)
    forget()
    assert cuda._machine_code(source) == b"code 1"


def test_a_changed_file_is_compiled_anew(source: Path) -> None:
    assert cuda._machine_code(source) == b"code 1"
    forget()
    source.write_text("other")
    assert cuda._machine_code(source) == b"other 2"


@pytest.mark.parametrize("damage", [lambda code: code[:-1], lambda code: b"", lambda code: b"x" * len(code)])
def test_a_damaged_file_in_the_cache_is_made_anew(source: Path, damage: Callable[[bytes], bytes]) -> None:
    cuda._machine_code(source)
    (kept,) = (source.parents[1] / "cache").glob("*.cubin")
    kept.write_bytes(damage(kept.read_bytes()))
    forget()
    assert cuda._machine_code(source) == b"code 2"
    forget()
    assert cuda._machine_code(source) == b"code 2"


def test_what_does_not_compile_leaves_the_work_to_triton(source: Path) -> None:
    source.write_text("wrong")
    with pytest.warns(UserWarning, match="slower Triton version of some/kernel.cu: error on line 1"):
        assert not cuda.can_run(DEVICE, source)


def test_without_a_compiler_the_work_is_left_to_triton(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise OSError("there is no libnvrtc")

    monkeypatch.setattr(cuda, "_nvrtc", missing)
    with pytest.warns(UserWarning, match="there is no libnvrtc"):
        assert not cuda.can_run(DEVICE, source)


def test_a_cache_folder_that_takes_no_files_stops_nothing(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = source.parent / "taken"
    taken.write_text("")
    monkeypatch.setenv("MEGASPAN_CACHE", str(taken / "cache"))
    with pytest.warns(UserWarning, match="not kept for the next start"):
        assert cuda.can_run(DEVICE, source)


def test_another_generation_of_gpus_is_left_to_triton(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    assert not cuda.can_run(DEVICE, source)
