"""The systems that `megaspan bench cpu` compares, behind one face.

Each module here has `PACKAGES`, the packages it needs, and runners that read the same checkpoint.
"""

import importlib
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Protocol

from torch import Tensor

CHUNK = 512
RUNNERS = {
    "megaspan": ("ours", "Runner"),
    "megaspan, bf16 index": ("ours", "RoundedIndexRunner"),
    "transformers": ("transformers", "Runner"),
    "llama.cpp": ("llama_cpp", "Runner"),
    "llama.cpp, flash attention off": ("llama_cpp", "ExactRunner"),
}
Progress = Callable[[int, int], None]


class Runner(Protocol):
    """One sequence in one system, with room for `capacity` tokens, float32, in chunks of CHUNK."""

    def __init__(self, checkpoint: Path, capacity: int, threads: int): ...

    def prefill(self, token_ids: list[int], on_progress: Progress) -> Tensor:
        """Read the prompt; return the float32 logits [V] after it. on_progress(done, total) may raise."""
        ...

    def step(self, token_id: int) -> Tensor:
        """Read one more token; return the float32 logits [V] after it."""
        ...


def missing(name: str) -> str | None:
    """Why the system cannot run here, with the command that mends it; None when it can."""
    absent = [package for package in _module(name).PACKAGES if not _installed(package)]
    return f"not installed: pip install {' '.join(absent)}" if absent else None


def label(name: str) -> str:
    """The system's name with its version, such as "transformers 5.24.0"."""
    packages = _module(name).PACKAGES
    return f"{name} {version(packages[0])}" if packages and _installed(packages[0]) else name


def open_runner(name: str, checkpoint: Path, capacity: int, threads: int) -> Runner:
    return getattr(_module(name), RUNNERS[name][1])(checkpoint, capacity, threads)


def _module(name: str):
    return importlib.import_module(f"{__name__}.{RUNNERS[name][0]}")


def _installed(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False
