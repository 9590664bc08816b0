"""One run of `megaspan bench slice`: slice after slice, each figure into one report."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megaspan.bench.device_time import Stopwatch
from megaspan.bench.kernels.registry import size
from megaspan.bench.slice.model import contexts_that_fit, slice_config
from megaspan.bench.slice.options import ROWS, Options
from megaspan.bench.slice.parts import Alone, Slice, TooSlow
from megaspan.bench.slice.peer import transformers_cache_bytes, transformers_decode
from megaspan.bench.slice.report import Report
from megaspan.cache.pool import PAGE_SIZE
from megaspan.config import ModelConfig
from megaspan.costs.memory import GIB, Format, parameters

ROW_NAMES = {"fp8": "FP8 rows", "bfloat16": "bf16 rows"}
BATCHES = (1, 8, 32)
RESERVED_BYTES = 24 << 30  # of a GPU's memory: activations of a chunk, graphs, what operations work in
PREFILL_LIMIT_S = 150.0
IMPLEMENTATIONS = ("eager", "sdpa")  # of attention, in transformers
IN_EVERY_LAYER = "an indexer in every layer"


def run(options: Options, say: Callable[[str], None]) -> Report:
    """Measure what the options ask for. UserError for options that cannot be."""
    options.check()
    config = ModelConfig.named(options.config)
    slice_config(config, options.layers, options.experts, share=True)  # refuses what no model can be
    prefix = f"{options.layers}-layer slice of {options.config}"
    prefix += f" with {options.experts} experts" if options.experts else ""
    # The goals are for the layers that are asked for without options, on a GPU.
    is_default = (options.config, options.layers, options.experts) == ("glm-5.2", 4, 0)
    report = Report(prefix, options.command, is_default, say)
    stopwatch = Stopwatch(torch.device(options.device))
    say(f"copies: {stopwatch.copy_rate / 1e9:,.0f} GB/s read and written")
    Runner(options, config, report, stopwatch).measure()
    return report


@dataclass(frozen=True)
class Runner:
    """What the parts of one run share."""

    options: Options
    config: ModelConfig
    report: Report
    stopwatch: Stopwatch

    def measure(self) -> None:
        options, report = self.options, self.report
        first, *others = ROWS[options.rows]
        shared = self._measure_slice(first, share=True, parts=options.parts)
        for rows in others:
            parts = [part for part in options.parts if part in ("decode", "batches")]
            self._measure_slice(rows, share=True, parts=parts)
        if "attention" in options.parts:
            parts = [part for part in options.parts if part != "invariant"]
            for name, every in self._measure_slice(first, share=False, parts=parts).items():
                if name in shared:
                    ratio, floor = every.over(shared[name])
                    report.add(f"{name}, {IN_EVERY_LAYER} ÷ IndexShare", ratio, "times", "higher", floor)
        if "transformers" in options.parts:
            self._measure_transformers()

    def _measure_slice(self, rows: Format, share: bool, parts: Sequence[str]) -> dict[str, Alone]:
        """Figures of one slice. Returns its attention, by the figures' names, if that is among the parts."""
        label = ROW_NAMES[rows] + ("" if share else f", {IN_EVERY_LAYER}")
        attention: dict[str, Alone] = {}
        with self.report.part(f"prefill of {self.options.whole} tokens, {label}"):
            one = self._slice(rows, share)
            if self._prefill(one, label):
                wanted = [batch for batch in BATCHES if ("decode" if batch == 1 else "batches") in parts]
                self._decode(one, label, wanted)
                if "attention" in parts:
                    attention = self._attention(one, label)
                if "invariant" in parts:
                    self._invariance(one, label)
            del one
        self._free()
        return attention

    def _slice(self, rows: Format, share: bool) -> Slice:
        options, slots = self.options, BATCHES[-1]
        config = slice_config(self.config, options.layers, options.experts, share)
        distinct = slots
        if self.stopwatch.is_cuda:
            self._free()
            free = torch.cuda.mem_get_info()[0] - 2 * parameters(config) - RESERVED_BYTES
            distinct = contexts_that_fit(config, rows, options.context, slots, free)
        page_size = PAGE_SIZE if options.context > 64 * PAGE_SIZE else 4
        return Slice(config, rows, options.context, slots, distinct, page_size, self.stopwatch)

    def _prefill(self, one: Slice, label: str) -> bool:
        """Whether the context was read."""
        report, whole = self.report, self.options.whole
        try:
            seen = one.prefill(self.options.chunk, PREFILL_LIMIT_S)
        except TooSlow as reason:
            report.add(f"prefill of {whole} tokens, {label}", None, "s", note=str(reason))
            return False
        report.add(f"prefill of {whole} tokens, {label}", seen.seconds, "s", floor=one.prefill_floor())
        if seen.peak_bytes is not None:
            held, weights = (count / GIB for count in (one.contexts.pools.nbytes, one.weight_bytes()))
            note = f"weights {weights:.1f}, {one.contexts.distinct} contexts {held:.1f}"
            name = f"most memory held by the prefill of {whole} tokens, {label}"
            report.add(name, seen.peak_bytes / GIB, "GiB", note=note)
        for pool in ("latent", "index"):
            nbytes = one.contexts.row_bytes(pool)
            report.add(f"{pool} rows of {whole} tokens, {label}", nbytes / GIB, "GiB")
        return True

    def _decode(self, one: Slice, label: str, batches: Sequence[int]) -> None:
        for length in self.options.lengths:
            for batch in batches:
                name = f"decode at {size(length)}, batch {batch}, {label}"
                with self.report.part(name):
                    floor, seconds = one.decode_floor(batch, length), one.decode(batch, length)
                    note = self._shared_pages(one, batch)
                    self.report.add(name, 1e3 * seconds, "ms", floor=1e3 * floor, note=note)

    def _attention(self, one: Slice, label: str) -> dict[str, Alone]:
        found: dict[str, Alone] = {}
        for batch in BATCHES:
            name = f"attention at {self.options.whole}, decode of batch {batch}"
            with self.report.part(f"{name}, {label}"):
                found[name] = one.decode_attention(batch)
                self._add_attention(f"{name}, {label}", found[name], self._shared_pages(one, batch))
        name = f"attention at {self.options.whole}, the last chunk of the prefill"
        with self.report.part(f"{name}, {label}"):
            found[name] = one.prefill_attention(self.options.chunk)
            self._add_attention(f"{name}, {label}", found[name])
        return found

    def _add_attention(self, name: str, alone: Alone, note: str = "") -> None:
        floor = None if alone.floor is None else 1e3 * alone.floor
        self.report.add(name, 1e3 * alone.seconds, "ms", floor=floor, note=note)

    def _invariance(self, one: Slice, label: str) -> None:
        length, batch = self.options.lengths[0], BATCHES[1]
        name = f"batch-invariant mode ÷ default, decode at {size(length)}, batch {batch}, {label}"
        with self.report.part(name):
            seen = one.invariance(batch, length, self.report.say)
            self.report.add(name, seen.ratio, "times", note=seen.spread())

    def _measure_transformers(self) -> None:
        length = self.options.lengths[0]
        config = slice_config(self.config, self.options.layers, self.options.experts, share=True)
        found: dict[str, float] = {}
        for implementation in IMPLEMENTATIONS:
            name = f"decode at {size(length)}, batch 1, transformers, {implementation}"
            with self.report.part(name):
                version, seconds = transformers_decode(config, length, implementation, self.stopwatch)
                found[version] = 1e3 * seconds
                self.report.add(name, found[version], "ms", note="its cache filled with random numbers")
            self._free()
        if found:
            best = min(found, key=lambda version: found[version])
            ours = [f"decode at {size(length)}, batch 1, {label}" for label in ROW_NAMES.values()]
            self.report.compare(ours, f"{best}: {found[best]:.3g}")
        self._compare_caches(config)

    def _compare_caches(self, config: ModelConfig) -> None:
        """What transformers would keep of the whole context. Where that does not fit it cannot follow."""
        held, whole = transformers_cache_bytes(config, self.options.context), self.options.whole
        kept = f"{held / GIB:.3g} GiB of keys and values"
        names = [f"latent rows of {whole} tokens, {label}" for label in ROW_NAMES.values()]
        self.report.compare(names, f"transformers: {kept}")
        memory = self.stopwatch.memory_bytes
        if memory is not None and held > memory:
            ends = f"prefill of {whole} tokens", f"decode at {whole}, batch 1"
            names = [f"{end}, {label}" for end in ends for label in ROW_NAMES.values()]
            self.report.compare(names, f"transformers: impossible, {kept}")

    def _shared_pages(self, one: Slice, batch: int) -> str:
        distinct = one.contexts.distinct
        return f"{batch} sequences read the pages of {distinct} contexts" if batch > distinct else ""

    def _free(self) -> None:
        gc.collect()
        if self.stopwatch.is_cuda:
            torch.cuda.empty_cache()
