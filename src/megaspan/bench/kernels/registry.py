"""What is measured: operations at the shapes of a scale, each with its check, its floor and its peers."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch

from megaspan.bench.device_time import Calls
from megaspan.config import ModelConfig

Unit = Literal["ms", "µs", "TFLOP/s", "GB/s"]


class WrongResult(Exception):
    """An operation's result is not its reference's."""


class NotHere(Exception):
    """An operation cannot run on this device or with these packages; the text says why."""


@dataclass(frozen=True)
class Scale:
    """The sizes that the cases are made of.

    contexts: cached tokens of a sequence. queries: of a prefill chunk. tokens: that go through a mixture of
    experts at once. batches: sequences that decode. rotation_bytes: operands of decoding calls take turns
    until so many bytes have passed, more than any cache holds.
    """

    name: str
    config: ModelConfig
    contexts: tuple[int, ...]
    queries: int
    tokens: int
    batches: tuple[int, ...]
    page_size: int
    rotation_bytes: int
    sampled: int = 4  # queries or tokens that are compared with the reference

    def copies(self, nbytes: float) -> int:
        """How many sets of operands of so many bytes are in rotation."""
        return max(1, -(-self.rotation_bytes // max(1, int(nbytes))))


SCALES = {
    "real": Scale(
        "real", ModelConfig.preset("glm-5.2"), (131072, 1048576), 4096, 8192, (1, 8, 32), 64, 320 << 20
    ),
    "tiny": Scale("tiny", ModelConfig.preset("debug"), (64, 200), 24, 40, (1, 3), 4, 1 << 14),
}


@dataclass(frozen=True)
class Trial:
    """An operation on inputs that are there. check: raises WrongResult. peers: others' calls, by name."""

    calls: Calls
    check: Callable[[], None]
    peers: dict[str, Calls] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Case:
    """An operation at one shape. make: makes its inputs on a device; raises NotHere.

    unit: of the figure. flops, nbytes: what cannot be avoided, for the floor; kind: of the arithmetic, see
    `device_time.PEAK_FLOPS`. decode: whether it is timed within a CUDA graph. shows_memory: whether its
    working memory is a figure as well. through_host: whether its bytes come from the host or go there.
    """

    name: str
    make: Callable[[torch.device], Trial]
    unit: Unit
    nbytes: float
    flops: float = 0.0
    kind: str = "bfloat16"
    decode: bool = False
    shows_memory: bool = False
    through_host: bool = False

    def figure(self, seconds: float) -> float:
        """A time in the case's unit."""
        match self.unit:
            case "ms":
                return 1e3 * seconds
            case "µs":
                return 1e6 * seconds
            case "TFLOP/s":
                return self.flops / seconds / 1e12
            case "GB/s":
                return self.nbytes / seconds / 1e9


OPERATIONS: dict[str, Callable[[Scale], Iterable[Case]]] = {}


def operation(name: str) -> Callable[[Callable[[Scale], Iterable[Case]]], Callable[[Scale], Iterable[Case]]]:
    """Adds a function that gives an operation's cases at a scale."""

    def register(cases: Callable[[Scale], Iterable[Case]]) -> Callable[[Scale], Iterable[Case]]:
        OPERATIONS[name] = cases
        return cases

    return register


def cases(scale: Scale, only: str | None = None) -> Iterator[tuple[str, Case]]:
    """The operations and their cases, in order; `only` those in whose operation or name it occurs."""
    for name, of_operation in OPERATIONS.items():
        for case in of_operation(scale):
            if only is None or only in name or only in case.name:
                yield name, case


def require_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Compares by the Frobenius norm of the difference, relative to that of what is expected."""
    actual, expected = actual.double(), expected.double()
    norm = float(expected.norm())
    difference = float((actual - expected).norm()) / norm if norm else float(actual.norm())
    if not difference <= tolerance:
        raise WrongResult(f"differs from the reference by {difference:.1e}, more than {tolerance:.0e}")


def size(count: int) -> str:
    """128K, 1M; other counts as they are."""
    for unit, name in ((1 << 20, "M"), (1 << 10, "K")):
        if count >= unit and count % unit == 0:
            return f"{count // unit}{name}"
    return str(count)
