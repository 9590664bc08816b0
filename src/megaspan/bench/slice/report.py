"""The figures of a run as they come, what is to be reached, and what failed."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from rich.table import Table

from megaspan.bench.kernels.published import Goal
from megaspan.bench.results import FOLDER, Row, machine, today, write_rows
from megaspan.errors import UserError

ABOUT = (
    "One GPU, bf16 random weights, random tokens. The layers are one that selects and three that share its "
    "selection, or four that select. Prefill: the sum of the chunks' times on the clock, the logits of each "
    "chunk's last token included. Decode: a step as a CUDA graph on the clock, from the token ids on the "
    "host to the logits on the GPU, median of 30; every sequence is as long. Attention: index scores, top-k, "
    "row numbers and sparse attention of all layers, run alone on the operands of such a pass. Floors: for "
    "decoding the bytes that are read at the rate of a large copy in the same run, for the prefill the "
    "matrix products at the data sheet's peak; of a ratio, that of the floors. The peer's cache was filled "
    "with random numbers."
)


FEWER_FLOPS = "2.9 times fewer FLOPs (published)"
INVARIANT_ELSEWHERE = "about 1.6 (published)"

# At glm-5.2's widths on one H200, by the ends of the figures' names.
GOALS = {
    "decode at 128K, batch 1, FP8 rows": Goal(1.5),
    "decode at 128K, batch 1, bf16 rows": Goal(1.5),
    "decode at 1M, batch 1, FP8 rows": Goal(1.6),
    "decode at 1M, batch 1, bf16 rows": Goal(1.6),
    "prefill of 1M tokens, FP8 rows": Goal(20.0),
    "prefill of 1M tokens, bf16 rows": Goal(20.0),
    "latent rows of 1M tokens, FP8 rows": Goal(2.6),
    "latent rows of 1M tokens, bf16 rows": Goal(4.5),
    "attention at 1M, decode of batch 1, an indexer in every layer ÷ IndexShare": Goal(2.4, FEWER_FLOPS),
    "attention at 1M, decode of batch 32, an indexer in every layer ÷ IndexShare": Goal(3.3, FEWER_FLOPS),
    "attention at 1M, the last chunk of the prefill, an indexer in every layer ÷ IndexShare": Goal(
        3.0, FEWER_FLOPS
    ),
    "batch-invariant mode ÷ default, decode at 128K, batch 8, FP8 rows": Goal(1.3, INVARIANT_ELSEWHERE),
}


@dataclass
class Report:
    """prefix: what every figure's name begins with. has_goals: whether those above apply."""

    prefix: str
    command: str
    has_goals: bool
    say: Callable[[str], None]
    rows: list[Row] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def add(
        self,
        name: str,
        value: float | None,
        unit: str,
        better: str = "lower",
        floor: float | None = None,
        note: str = "",
    ) -> None:
        """A figure, under its name without the prefix."""
        goal = GOALS.get(name, Goal()) if self.has_goals else Goal()
        row = Row(
            name=f"{self.prefix}, {name}",
            value=value,
            unit=unit,
            better=better,
            target=goal.target,
            peer=goal.peer,
            floor=floor,
            command=self.command,
            machine=machine(),
            date=today(),
            note=note,
        )
        self.rows.append(row)
        self.say(" | ".join(cell for cell in row.cells() if cell))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What is measured inside. Where memory runs out there is a row that says so, and the run goes on."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            self.add(name, None, "", note=f"out of memory: {str(error).splitlines()[0][:200]}")
        except Exception as error:
            lines = str(error).splitlines() or [""]
            self.failures.append(f"{name}: {type(error).__name__}: {lines[0][:200]}")
            self.say(self.failures[-1])

    def compare(self, names: Sequence[str], peer: str) -> None:
        """Put a peer's figure beside those of ours."""
        compared = {f"{self.prefix}, {name}" for name in names}
        self.rows = [replace(row, peer=peer) if row.name in compared else row for row in self.rows]


def record(report: Report, folder: Path = FOLDER) -> None:
    """Put a run's rows into docs/results. UserError where a part of it failed."""
    refuse(report)
    write_rows("slice", report.rows, folder, ABOUT)


def refuse(report: Report) -> None:
    """UserError, one line, where a part failed."""
    if report.failures:
        raise UserError(f"parts of the run failed: {'; '.join(report.failures)}")


def render(report: Report) -> Table:
    table = Table()
    for column in ("figure", "value", "target", "", "best peer", "floor"):
        table.add_column(column)
    for row in report.rows:
        table.add_row(*row.cells())
    return table
