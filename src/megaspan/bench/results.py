"""Measured figures: rows in docs/results/<area>.json, and the page that is generated from them."""

import json
import os
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from datetime import date
from pathlib import Path

import torch

from megaspan.errors import UserError

FOLDER = Path("docs/results")
FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure. value is None when it could not be had, and then note says why.

    target: what was to be reached (None: nothing was asked). peer: the best other system and its figure
    in the same run. floor: what the machine's arithmetic or memory allows at best, in the same unit.
    """

    name: str
    value: float | None
    unit: str
    better: str
    target: float | None = None
    peer: str | None = None
    floor: float | None = None
    command: str
    machine: str
    date: str
    note: str = ""

    def __post_init__(self) -> None:
        if self.better not in ("higher", "lower"):
            raise ValueError(f"{self.name}: better is {self.better!r}, not 'higher' or 'lower'")
        if self.value is None and not self.note:
            raise ValueError(f"{self.name}: a row without a value needs a note that says why")

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None when there is no target."""
        if self.target is None:
            return None
        if self.value is None:
            return False
        return self.value >= self.target if self.better == "higher" else self.value <= self.target

    def cells(self) -> list[str]:
        """The row as text: figure, value, target, met or missed, best peer, floor."""
        sign = "≥" if self.better == "higher" else "≤"
        verdict = {None: "", True: "met", False: "missed"}[self.met]
        target = "" if self.target is None else f"{sign} {_number(self.target)}"
        return [self.name, self.figure(), target, verdict, self.peer or "", _number(self.floor)]

    def figure(self) -> str:
        """Value, unit and note; the note alone when there is no value."""
        if self.value is None:
            return self.note
        return f"{_number(self.value)} {self.unit}".rstrip() + (f" ({self.note})" if self.note else "")


@dataclass(frozen=True)
class Area:
    """The figures of one subject. about: what was measured and how, a paragraph for the page."""

    rows: list[Row]
    about: str = ""


def read_area(area: str, folder: Path = FOLDER) -> Area:
    """Rows in the order in which they were first written; none if the area has no file."""
    path = folder / f"{area}.json"
    if not path.exists():
        return Area([])
    known = {field.name for field in fields(Row)}
    content = json.loads(path.read_text())
    for entry in content["rows"]:
        if set(entry) != known:
            wrong = ", ".join(sorted(set(entry) ^ known))
            raise UserError(f"{path}: row {entry.get('name')!r} has missing or unknown keys: {wrong}")
    return Area([Row(**entry) for entry in content["rows"]], content["about"])


def write_rows(area: str, rows: Iterable[Row], folder: Path = FOLDER, about: str | None = None) -> None:
    """Add rows to an area, replacing those of the same name, and write its page anew.

    about: the area's paragraph; the one it has stays unless given.
    """
    before = read_area(area, folder)
    merged = {row.name: row for row in (*before.rows, *rows)}
    content = {
        "about": before.about if about is None else about,
        "rows": [asdict(row) for row in merged.values()],
    }
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=1, ensure_ascii=False)
    (folder / f"{area}.json").write_text(text + "\n", encoding="utf-8")
    write_page(area, folder)


def write_page(area: str, folder: Path = FOLDER) -> Path:
    path = folder / f"{area}.md"
    path.write_text(render(area, folder), encoding="utf-8")
    return path


def write_pages(folder: Path = FOLDER) -> list[Path]:
    """Generate the page of every area in the folder."""
    return [write_page(path.stem, folder) for path in sorted(folder.glob("*.json"))]


def render(area: str, folder: Path = FOLDER) -> str:
    """The page of an area as Markdown: figures with a target first, then the others, then how measured.

    What is to be said about a figure that misses its target is written by hand, in <area>-notes.md.
    """
    content = read_area(area, folder)
    rows = content.rows
    asked, others = [row for row in rows if row.met is not None], [row for row in rows if row.met is None]
    lines = [f"# Results: {area}", "", f"Generated from `{area}.json` by `megaspan bench results`.", ""]
    if asked:
        lines += ["## Against the targets", "", *_asked_table(asked), ""]
    if (folder / f"{area}-notes.md").exists():
        lines += [f"What is missed, by how much, and what was tried: [notes]({area}-notes.md).", ""]
    if others:
        lines += ["## Also measured", "", *_others_table(others), ""]
    lines += ["## How measured", "", *([content.about, ""] if content.about else []), *_origins(rows)]
    return "\n".join(lines) + "\n"


def _asked_table(rows: list[Row]) -> list[str]:
    lines = ["| figure | value | target | | best peer, same run | floor |", "|---|---|---|---|---|---|"]
    return lines + [_line(row.cells()) for row in rows]


def _others_table(rows: list[Row]) -> list[str]:
    if all(row.peer is None and row.floor is None for row in rows):
        return ["| figure | value |", "|---|---|", *(_line([row.name, row.figure()]) for row in rows)]
    lines = ["| figure | value | best peer, same run | floor |", "|---|---|---|---|"]
    return lines + [_line([row.name, row.figure(), row.peer or "", _number(row.floor)]) for row in rows]


def _origins(rows: list[Row]) -> list[str]:
    origins: dict[tuple[str, str, str], int] = {}
    for row in rows:
        origin = (row.date, row.command, row.machine)
        origins[origin] = origins.get(origin, 0) + 1
    return [
        f"- {when}: `{command}` on {machine} ({count} figure{'s' * (count != 1)})"
        for (when, command, machine), count in origins.items()
    ]


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _number(value: float | None) -> str:
    """Three significant digits, whole thousands with commas; empty for None."""
    if value is None:
        return ""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def machine() -> str:
    """What ran: cores, processor, the features that decide speed, memory, accelerators, torch. No names."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    model, flags = _processor()
    features = [name for name in FEATURES if name in flags]
    described = f"{cores} core{'s' * (cores != 1)} {model}"
    if features:
        described += f" ({', '.join(features)})"
    parts = [described, f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"]
    if torch.cuda.is_available():
        parts.append(f"{torch.cuda.device_count()} of {torch.cuda.get_device_name(0)}")
    return ", ".join([*parts, f"torch {torch.__version__.split('+')[0]}"])


def today() -> str:
    return date.today().isoformat()


def _processor() -> tuple[str, set[str]]:
    """Model name and feature flags of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine(), set()
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = facts.get("flags", facts.get("Features", ""))
    return facts.get("model name", platform.machine()), set(flags.split())
