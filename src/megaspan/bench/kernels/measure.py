"""Checks the cases of `megaspan bench kernels`, then times them and their peers."""

import gc
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from megaspan.bench.device_time import Calls, Stopwatch, require_device
from megaspan.bench.kernels.registry import (
    OPERATIONS,
    SCALES,
    Case,
    NotHere,
    Scale,
    Trial,
    WrongResult,
    cases,
)
from megaspan.errors import UserError


@dataclass(frozen=True)
class Measured:
    """One case. seconds: None where note says why. peers: their seconds, or why there are none."""

    case: Case
    seconds: float | None
    floor: float
    memory: int | None = None
    peers: dict[str, float | str] = field(default_factory=dict)
    note: str = ""
    failed: bool = False

    def line(self) -> str:
        """The figure in words."""
        if self.seconds is None:
            return f"{self.case.name}: {self.note}"
        figure = f"{self.case.figure(self.seconds):.4g} {self.case.unit}"
        return f"{self.case.name}: {figure}, {self.over_floor}"

    @property
    def over_floor(self) -> str:
        return "" if self.seconds is None else f"{self.seconds / self.floor:.2f} times the floor"


@dataclass(frozen=True)
class Run:
    """copy_rate: bytes per second, read and written."""

    scale: Scale
    only: str | None
    copy_rate: float
    measured: list[Measured]

    @property
    def failures(self) -> list[str]:
        """A line for each case that was wrong or broke."""
        return [f"{one.case.name}: {one.note}" for one in self.measured if one.failed]


def run(only: str | None, scale: str, device: str, say: Callable[[str], None]) -> Run:
    """Check and time the cases. Raises UserError where there are none, or where the device is not there."""
    if scale not in SCALES:
        raise UserError(f"there is no scale {scale!r}; there are {', '.join(SCALES)}")
    chosen = [case for _, case in cases(SCALES[scale], only)]
    if not chosen:
        raise UserError(f"no case has {only!r} in its name; there are operations {', '.join(OPERATIONS)}")
    require_device(device, without="--device cpu --scale tiny runs every case on the CPU")
    if torch.device(device).type == "cpu" and scale == "real":
        raise UserError("GLM-5.2's shapes are too large for a CPU: give --scale tiny with --device cpu")
    stopwatch = Stopwatch(torch.device(device))
    say(f"copies: {stopwatch.copy_rate / 1e9:,.0f} GB/s read and written")
    measured = []
    for number, case in enumerate(chosen, 1):
        measured.append(measure(case, stopwatch))
        say(f"{number} of {len(chosen)}: {measured[-1].line()}")
        if stopwatch.is_cuda:
            gc.collect()
            torch.cuda.empty_cache()
    return Run(SCALES[scale], only, stopwatch.copy_rate, measured)


def measure(case: Case, stopwatch: Stopwatch) -> Measured:
    """Check a case and, if it is right, time it and its peers. What it raises becomes its note."""
    floor = stopwatch.floor(case.flops, case.kind, case.nbytes)
    if case.through_host:
        floor = case.nbytes / stopwatch.host_rate
    try:
        torch.manual_seed(1)
        trial = case.make(stopwatch.device)
        trial.check()
        seconds = _seconds(case, trial.calls, stopwatch)
        memory = stopwatch.working_bytes(trial.calls[0]) if case.shows_memory else None
        return Measured(case, seconds, floor, memory, _peers(case, trial, stopwatch))
    except NotHere as reason:
        return Measured(case, None, floor, note=str(reason))
    except WrongResult as reason:
        return Measured(case, None, floor, note=f"wrong: {reason}", failed=True)
    except torch.OutOfMemoryError as error:
        return Measured(case, None, floor, note=_first_line(error))
    except Exception as error:
        return Measured(case, None, floor, note=_first_line(error), failed=True)


def _peers(case: Case, trial: Trial, stopwatch: Stopwatch) -> dict[str, float | str]:
    found: dict[str, float | str] = {}
    for name, calls in trial.peers.items():
        try:
            found[name] = _seconds(case, calls, stopwatch)
        except Exception as error:  # a peer may be of another version, or need more memory
            found[name] = _first_line(error)
    return found


def _seconds(case: Case, calls: Calls, stopwatch: Stopwatch) -> float:
    return stopwatch.in_graph(calls) if case.decode else stopwatch.cold(calls)


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"
