"""How long calls take on a device: CUDA events on a GPU, the clock of the machine elsewhere."""

import time
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import cycle, islice
from statistics import median
from typing import Any

import torch

from megaspan.costs.memory import GIB
from megaspan.errors import UserError

Calls = Sequence[Callable[[], Any]]
"""One operation on several sets of inputs, to be called in rotation."""

FLUSHED_BYTES = 256 << 20  # written before a call, so that no operand is left in the cache of a GPU
COPIED_BYTES = {"cuda": 4 << 30, "cpu": 64 << 20}
CALLS_IN_GRAPH = (20, 200)
REPLAYS = 15
PEAK_FLOPS = {"fp8": 1979e12, "bfloat16": 989e12}
"""FLOP/s of the data sheet of an H100 or H200 (SXM), without sparsity."""


def require_device(name: str, without: str) -> None:
    """UserError for a device that figures cannot be taken on. without: the options that need no GPU."""
    if name not in COPIED_BYTES:
        raise UserError(f"--device {name}: figures are taken on {' and on '.join(COPIED_BYTES)}")
    if name == "cpu":
        return
    if not torch.cuda.is_available():
        raise UserError(f"there is no CUDA device here: {without}")
    free, needed = torch.cuda.mem_get_info()[0], 2 * COPIED_BYTES[name] + FLUSHED_BYTES
    if free < needed:
        raise UserError(
            f"{free / GIB:.1f} GiB of the GPU's memory are free, and its copies alone take "
            f"{needed / GIB:.1f} GiB: end what else runs on it"
        )


class Stopwatch:
    """Times calls on one device. All figures are medians, in seconds."""

    def __init__(self, device: torch.device):
        self.device, self.is_cuda = device, device.type == "cuda"

    def wait(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def once(self, call: Callable[[], Any]) -> float:
        """One call on the clock, with all that the CPU does for it."""
        self.wait()
        began = time.perf_counter()
        call()
        self.wait()
        return time.perf_counter() - began

    def cold(self, calls: Calls, budget_s: float = 0.4) -> float:
        """A call whose operands are not in the GPU's cache. The calls are made once before they are timed."""
        for call in calls:
            call()
        estimate = self.once(calls[0])
        repeats = int(min(30, max(5, budget_s / estimate)))
        if not self.is_cuda:
            return median(self.once(call) for call in islice(cycle(calls), repeats))
        flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device=self.device)
        marks = []
        for call in islice(cycle(calls), repeats):
            flushed.zero_()
            marks.append(self._between(call))
        self.wait()
        return median(first.elapsed_time(last) / 1e3 for first, last in marks)

    def in_graph(self, calls: Calls, budget_s: float = 2e-3) -> float:
        """A call among many in a CUDA graph, as decoding makes it: without what launching costs the CPU."""
        if not self.is_cuda:
            return self.cold(calls)
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):  # what compiles or allocates once does so before the capture
            for call in calls:
                call()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        least, most = CALLS_IN_GRAPH
        count = max(len(calls), int(min(most, max(least, budget_s / self.once(calls[0])))))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in islice(cycle(calls), count):
                call()
        graph.replay()
        marks = [self._between(graph.replay) for _ in range(REPLAYS)]
        self.wait()
        return median(first.elapsed_time(last) / 1e3 / count for first, last in marks)

    def working_bytes(self, call: Callable[[], Any]) -> int | None:
        """The most memory that a call holds beside its operands, its result included. None on a CPU."""
        if not self.is_cuda:
            return None
        self.wait()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        call()
        return torch.cuda.max_memory_allocated(self.device) - before

    @cached_property
    def copy_rate(self) -> float:
        """Bytes per second, read and written, of a large copy on this device just now."""
        source = torch.zeros(COPIED_BYTES[self.device.type], dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * source.nbytes / self.cold([lambda: target.copy_(source)])

    @cached_property
    def host_rate(self) -> float:
        """Bytes per second of a large copy from pinned host memory to this device just now."""
        source = torch.zeros(
            1 << 30 if self.is_cuda else 64 << 20, dtype=torch.uint8, pin_memory=self.is_cuda
        )
        target = torch.empty_like(source, device=self.device)
        return source.nbytes / self.cold([lambda: target.copy_(source, non_blocking=True)])

    def floor(self, flops: float, kind: str, nbytes: float) -> float:
        """Seconds that so much takes at best: arithmetic by the data sheet, memory as measured.

        kind: of PEAK_FLOPS. Where the data sheet's figure is not known, memory alone decides.
        """
        arithmetic = flops / PEAK_FLOPS[kind] if self.has_known_peak else 0.0
        return max(arithmetic, nbytes / self.copy_rate)

    @cached_property
    def memory_bytes(self) -> int | None:
        """All that a GPU has. None on a CPU."""
        return torch.cuda.get_device_properties(self.device).total_memory if self.is_cuda else None

    @cached_property
    def has_known_peak(self) -> bool:
        return self.is_cuda and torch.cuda.get_device_capability(self.device) == (9, 0)

    def _between(self, call: Callable[[], Any]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        call()
        last.record()
        return first, last
