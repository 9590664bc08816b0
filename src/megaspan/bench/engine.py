"""`megaspan bench engine`: the figures of docs/results/serving, each part on its own or all of them."""

import shlex
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from megaspan.bench import latency
from megaspan.bench.pairs import in_turns
from megaspan.bench.results import FOLDER, Row, machine, today, write_rows
from megaspan.bench.steps import VOCABULARY, StepWork, step_work, summary_seconds
from megaspan.cache.pool import PagePools
from megaspan.config import ModelConfig
from megaspan.costs.memory import cache_bytes_per_token
from megaspan.errors import UserError
from megaspan.model.batch_invariance import set_batch_invariant
from megaspan.model.folder import LanguageModel, load_folder

Say = Callable[[str], None]
Figures = list[dict[str, Any]]
LONG, CONVERSATION, MILLION = 131072, 32768, 1 << 20
ABOUT = (
    "Step work: processor time of a step, all threads, with a stand-in model that takes no time; 64 requests "
    "decode, 600 steps. The other figures run span-code in process, random prompts, greedy. Budget: the "
    "default time of a step that reads prompts, 0.25 s. After eviction: every device page was taken and "
    "overwritten, so that the prefix had to come from the host. From the disk: a new engine on the same "
    "folder. What is divided was measured in turns, the median of the pairs' quotients; a step's work is the "
    "median of 3 engines."
)


def measure_steps(model: LanguageModel, say: Say) -> Figures:
    """The engine's own work per step at 8K and at 1M tokens, and the pass over the logits beside it."""
    seen: dict[int, list[StepWork]] = {8192: [], MILLION: []}

    def work(context: int) -> float:
        seen[context].append(step_work(context, say=say))
        return seen[context][-1].work

    turns = in_turns(partial(work, 8192), partial(work, MILLION), say, pairs=3)
    short, long = (sorted(each, key=lambda one: one.work)[len(each) // 2] for each in seen.values())
    vocabulary = ModelConfig.preset("glm-5.2").vocab_size
    say(f"the pass over {long.running} rows of {vocabulary:,} logits")
    summary = summary_seconds(long.running, vocabulary)
    name = f"CPU work of a step outside the forward pass, {long.running} running requests at"

    def note(seen: StepWork) -> str:
        return (
            "in: schedule, pages, batch, hand-over to the forward thread, sampling from a vocabulary of "
            f"{VOCABULARY}, outputs; out: the forward pass, and what a larger vocabulary adds to the pass "
            f"over the logits; on the clock {seen.median:.0f} in the median, 99th percentile "
            f"{seen.percentile_99:.0f}"
        )

    apart = max(turns.ratio, 1 / turns.ratio)
    return [
        _figure(f"{name} 1M tokens", long.work, "µs", target=300, note=note(long)),
        _figure(f"{name} 8K tokens", short.work, "µs", target=300, note=note(short)),
        _figure("the same, the larger ÷ the smaller", apart, "", target=1.2, note=turns.spread()),
        _figure(
            f"the pass over the logits of {long.running} requests, vocabulary of {vocabulary:,}",
            1e3 * summary,
            "ms",
            note="where the logits are, after the forward pass; not in the figures above",
        ),
    ]


def measure_interference(model: LanguageModel, say: Say) -> Figures:
    """Decoding and short arrivals while a long prompt is read."""
    say(f"a prompt of {LONG:,} tokens is read beside a decoding request")
    seen = latency.interference(model, LONG, say=say)
    return [
        _figure(
            "largest gap of a decoding request while a 128K prompt is read",
            seen.largest_gap,
            "s",
            target=2 * seen.budget,
            note=f"median {seen.median_gap:.3f} s",
        ),
        _figure(
            "a 100-token request arriving in the middle of it, first token (worst of 8)",
            seen.short_first_token,
            "s",
            target=3 * seen.budget,
        ),
        _figure("reading that 128K prompt beside them", LONG / seen.reading, "tokens/s", better="higher"),
    ]


def measure_second_turn(model: LanguageModel, say: Say) -> Figures:
    """The second turn of a conversation, its prefix on the device, on the host, on the disk."""
    say(f"a conversation of {CONVERSATION:,} tokens, asked again from device, host and disk")
    seen = latency.second_turn(model, CONVERSATION, say=say)
    name = "second turn of a 32K conversation, time to first token ÷ the first turn's"
    parts = (
        ("", seen.device, 5),
        (", after eviction to host", seen.host, 10),
        (", from the disk", seen.disk, 25),
    )
    return [
        _figure("first turn of a 32K conversation, time to first token", seen.first, "s"),
        *(
            _figure(name + where, 100 * seconds / seen.first, "%", target=target, note=f"{seconds:.2f} s")
            for where, seconds, target in parts
        ),
    ]


def measure_streams(model: LanguageModel, say: Say) -> Figures:
    """Tokens per second of sixteen concurrent requests against one."""
    say("1 stream and 16 in turns, tokens/s")
    one, many = (partial(latency.streams, model, count) for count in (1, 16))
    seen = in_turns(lambda: one().tokens_per_second, lambda: many().tokens_per_second, say)
    return [
        _figure("1 stream", median(seen.first), "tokens/s", better="higher"),
        _figure("16 concurrent streams", median(seen.second), "tokens/s", better="higher"),
        _figure(
            "16 concurrent streams ÷ 1", seen.ratio, "times", better="higher", target=4, note=seen.spread()
        ),
    ]


def measure_invariance(model: LanguageModel, say: Say) -> Figures:
    """What batch-invariant arithmetic costs."""
    figures = []
    for name, measure in (
        ("1 stream", partial(latency.streams, count=1)),
        ("16 streams", partial(latency.streams, count=16)),
        ("reading a prompt of 8K", partial(latency.reading, context=8192)),
    ):

        def seconds_per_token(invariant: bool, measure: Callable[..., latency.Streams] = measure) -> float:
            set_batch_invariant(model, invariant)
            try:
                return 1 / measure(model).tokens_per_second
            finally:
                set_batch_invariant(model, False)

        say(f"{name}: default and batch-invariant arithmetic in turns, seconds for each token")
        seen = in_turns(partial(seconds_per_token, False), partial(seconds_per_token, True), say)
        figures.append(
            _figure(f"batch-invariant mode ÷ default, time, {name}", seen.ratio, "times", note=seen.spread())
        )
    return figures


def measure_bytes(model: LanguageModel, say: Say) -> Figures:
    """Bytes of the pools for each token, against the plan: the larger ÷ the smaller."""
    config = ModelConfig.preset("glm-5.2")
    figures = []
    for mtp, name in ((True, ""), (False, ", without the draft layer, as the engine has them")):
        pools = PagePools(config, 1, latent_format="fp8", device="meta", mtp=mtp)
        planned = cache_bytes_per_token(config, mtp=mtp)
        stored = pools.nbytes / pools.page_size
        note = f"{stored:,.0f} B of {planned:,} B, glm-5.2 in FP8"
        apart = max(stored / planned, planned / stored)
        figures.append(_figure(f"pool bytes per token ÷ the plan's{name}", apart, "", target=1, note=note))
    return figures


PARTS = {
    "steps": measure_steps,
    "interference": measure_interference,
    "second-turn": measure_second_turn,
    "streams": measure_streams,
    "invariance": measure_invariance,
    "bytes": measure_bytes,
}


def run(folder: str, parts: Sequence[str], say: Say, threads: int | None = None) -> list[Row]:
    """Measure some of PARTS on the model in `folder`.

    threads: what the caller was asked to set, for the command that a row gives to measure it again.
    """
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise UserError(f"there is no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    model = load_folder(folder, "auto", "cpu", LanguageModel)
    rows = []
    for number, part in enumerate(parts, 1):
        command = ["megaspan", "bench", "engine", "--model", folder, "--parts", part]
        command += [] if threads is None else ["--threads", str(threads)]
        say(f"{part} ({number} of {len(parts)})")
        began = time.perf_counter()
        figures = PARTS[part](model, say)
        say(f"{part} took {time.perf_counter() - began:.0f} s")
        rows += [
            Row(**figure, command=shlex.join(command), machine=machine(), date=today()) for figure in figures
        ]
    return rows


def record(rows: Sequence[Row], folder: Path = FOLDER) -> None:
    write_rows("serving", rows, folder, ABOUT)


def render(rows: Sequence[Row]) -> Table:
    table = Table()
    for column in ("figure", "value", "target", "", "best peer", "floor"):
        table.add_column(column)
    for row in rows:
        table.add_row(*row.cells())
    return table


def _figure(
    name: str, value: float, unit: str, better: str = "lower", target: float | None = None, note: str = ""
) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit, "better": better, "target": target, "note": note}
