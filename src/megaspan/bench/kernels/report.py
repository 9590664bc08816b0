"""The figures of a run of `megaspan bench kernels`: a table, and rows of docs/results."""

import shlex
from pathlib import Path
from typing import Any

from rich.table import Table

from megaspan.bench.kernels.measure import Measured, Run
from megaspan.bench.kernels.published import GOALS, Goal
from megaspan.bench.kernels.registry import Case, Scale
from megaspan.bench.results import FOLDER, Row, machine, today, write_rows
from megaspan.costs.memory import GIB
from megaspan.errors import UserError

ABOUT = (
    "One GPU, random operands. Every case is checked against its reference first. Prefill and other long "
    "calls: median of single calls, the cache flushed before each. Decoding (µs, and GB/s of few tokens): a "
    "call among 20 to 200 in a CUDA graph over operands in rotation, median of 15 replays. A floor is the "
    "longer of two times: FLOPs at the data sheet's peak, and the bytes that must be moved at the rate of a "
    "large copy in the same run. Peers' figures marked as published are of another run on a machine of the "
    "same kind."
)


def render(run: Run) -> Table:
    table = Table(title=f"{machine()}; copies {run.copy_rate / 1e9:,.0f} GB/s", title_justify="left")
    for column in ("case", "figure", "TFLOP/s", "GB/s", "over floor", "peers", "working memory", "target"):
        table.add_column(column)
    for one in run.measured:
        table.add_row(*cells(one, run.scale))
    return table


def cells(one: Measured, scale: Scale) -> list[str]:
    case, goal = one.case, _goal(one.case, scale)
    peers = [
        f"{name} {case.figure(seconds):.4g}" if isinstance(seconds, float) else f"{name}: {seconds}"
        for name, seconds in one.peers.items()
    ]
    peers += [f"{goal.peer} (published)"] if goal.peer else []
    target = "" if goal.target is None else f"{goal.target:g} {case.unit}"
    if one.seconds is None:
        return [case.name, one.note, "", "", "", "; ".join(peers), "", target]
    return [
        case.name,
        f"{case.figure(one.seconds):.4g} {case.unit}",
        f"{case.flops / one.seconds / 1e12:.3g}",
        f"{case.nbytes / one.seconds / 1e9:,.0f}",
        f"{one.seconds / one.floor:.2f}",
        "; ".join(peers),
        "" if one.memory is None else f"{one.memory / GIB:.2f} GiB",
        target,
    ]


def _goal(case: Case, scale: Scale) -> Goal:
    return GOALS.get(case.name, Goal()) if scale.name == "real" else Goal()


def figures(run: Run) -> list[Row]:
    """The rows of a run: a figure for each case, and its working memory where that is one."""
    command = "megaspan bench kernels" + (f" --only {shlex.quote(run.only)}" if run.only else "")
    origin: dict[str, Any] = {"command": command, "machine": machine(), "date": today()}
    made = []
    for one in run.measured:
        case, goal = one.case, _goal(one.case, run.scale)
        made.append(
            Row(
                name=case.name,
                value=None if one.seconds is None else case.figure(one.seconds),
                unit=case.unit,
                better="lower" if case.unit in ("ms", "µs") else "higher",
                target=goal.target,
                peer=_best_peer(one, goal),
                floor=case.figure(one.floor),
                note=one.note or one.over_floor,
                **origin,
            )
        )
        if one.memory is not None:
            name = f"working memory of {case.name}"
            gib = one.memory / GIB
            made.append(Row(name=name, value=gib, unit="GiB", better="lower", target=goal.memory, **origin))
    return made


def _best_peer(one: Measured, goal: Goal) -> str | None:
    """The fastest peer of the run, then what is published."""
    timed = {name: seconds for name, seconds in one.peers.items() if isinstance(seconds, float)}
    found = []
    if timed:
        best = min(timed, key=lambda name: timed[name])
        found.append(f"{best}: {one.case.figure(timed[best]):.4g} {one.case.unit}")
    found += [f"{goal.peer} (published)"] if goal.peer else []
    return "; ".join(found) or None


def record(run: Run, folder: Path = FOLDER) -> None:
    """Put the rows of a run into docs/results. UserError where a case failed, or at another scale."""
    refuse(run)
    if run.scale.name != "real":
        raise UserError("only figures at real shapes are recorded: leave --scale out")
    write_rows("kernels", figures(run), folder, ABOUT)


def refuse(run: Run) -> None:
    """UserError, one line, where a case failed."""
    if run.failures:
        raise UserError(f"{len(run.failures)} of the cases give no figures: {'; '.join(run.failures)}")
