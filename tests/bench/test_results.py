import json
import platform
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest

from megaspan.bench.results import Row, machine, read_area, render, write_pages, write_rows
from megaspan.errors import UserError

COMMITTED = Path(__file__).parents[2] / "docs" / "results"
ROW = Row(name="speed", value=1234.5, unit="tok/s", better="higher", target=1000.0, peer="other 1.0: 400",
          floor=5000.0, command="measure it", machine="2 cores", date="2026-01-31")  # fmt: skip


def test_rows_come_back_as_written(tmp_path):
    other = replace(ROW, name="memory", better="lower", unit="GiB", target=None, peer=None, floor=None)
    write_rows("cpu", [ROW, other], tmp_path)
    assert read_area("cpu", tmp_path).rows == [ROW, other]
    entries = json.loads((tmp_path / "cpu.json").read_text())["rows"]
    assert all(set(entry) == {field.name for field in fields(Row)} for entry in entries)


def test_a_row_of_the_same_name_is_replaced_in_place(tmp_path):
    second = replace(ROW, name="second")
    write_rows("cpu", [ROW, second], tmp_path)
    faster = replace(ROW, value=2000.0)
    write_rows("cpu", [faster], tmp_path)
    assert read_area("cpu", tmp_path).rows == [faster, second]


def test_the_paragraph_of_an_area_stays_until_replaced(tmp_path):
    write_rows("cpu", [ROW], tmp_path, about="Measured so.")
    write_rows("cpu", [replace(ROW, name="second")], tmp_path)
    assert "## How measured\n\nMeasured so.\n" in render("cpu", tmp_path)
    write_rows("cpu", [], tmp_path, about="Measured otherwise.")
    assert read_area("cpu", tmp_path).about == "Measured otherwise."


@pytest.mark.parametrize(
    ("better", "value", "met"),
    [("higher", 1000.0, True), ("higher", 999.0, False), ("lower", 1000.0, True), ("lower", 1001.0, False)],
)
def test_met(better, value, met):
    row = replace(ROW, better=better, value=value)
    assert row.met is met
    assert ("met" if met else "missed") in row.cells()


def test_without_a_target_nothing_is_met_or_missed():
    assert replace(ROW, target=None).met is None


def test_a_missing_value_has_a_reason_and_misses_its_target(tmp_path):
    absent = replace(ROW, value=None, note="not installed: pip install other")
    assert absent.met is False
    write_rows("cpu", [absent], tmp_path)
    assert "| speed | not installed: pip install other | ≥ 1,000 | missed |" in render("cpu", tmp_path)
    with pytest.raises(ValueError, match="says why"):
        replace(ROW, value=None)


def test_better_is_checked():
    with pytest.raises(ValueError, match="higher"):
        replace(ROW, better="more")


def test_page_says_what_was_reached_and_how(tmp_path):
    write_rows("cpu", [ROW, replace(ROW, name="odd | name", target=None, value=0.01234)], tmp_path)
    page = (tmp_path / "cpu.md").read_text()
    assert "| speed | 1,234 tok/s | ≥ 1,000 | met | other 1.0: 400 | 5,000 |" in page
    assert "| odd \\| name | 0.0123 tok/s |" in page
    assert "- 2026-01-31: `measure it` on 2 cores (2 figures)" in page


def test_figures_without_a_target_have_their_peers_and_floors_beside_them(tmp_path):
    other = replace(ROW, name="other", target=None, peer=None)
    write_rows("cpu", [ROW, replace(ROW, target=None, name="memory"), other], tmp_path)
    page = (tmp_path / "cpu.md").read_text()
    assert "| memory | 1,234 tok/s | other 1.0: 400 | 5,000 |" in page
    assert "| other | 1,234 tok/s |  | 5,000 |" in page


def test_the_page_leads_to_notes_that_are_written_by_hand(tmp_path):
    write_rows("cpu", [ROW], tmp_path)
    assert "notes" not in (tmp_path / "cpu.md").read_text()
    (tmp_path / "cpu-notes.md").write_text("# Notes\n")
    assert write_pages(tmp_path) == [tmp_path / "cpu.md"]
    assert "[notes](cpu-notes.md)" in (tmp_path / "cpu.md").read_text()
    assert (tmp_path / "cpu-notes.md").read_text() == "# Notes\n"


def test_a_file_with_other_keys_is_named(tmp_path):
    entry = asdict(ROW)
    del entry["machine"]
    (tmp_path / "cpu.json").write_text(json.dumps({"about": "", "rows": [entry]}))
    with pytest.raises(UserError, match="machine"):
        read_area("cpu", tmp_path)


def test_pages_are_generated_for_every_area(tmp_path):
    for area in ("cpu", "model"):
        write_rows(area, [ROW], tmp_path)
        (tmp_path / f"{area}.md").unlink()
    assert [path.name for path in write_pages(tmp_path)] == ["cpu.md", "model.md"]


def test_committed_pages_are_what_their_figures_generate():
    for figures in COMMITTED.glob("*.json"):
        assert figures.with_suffix(".md").read_text() == render(figures.stem, COMMITTED), figures.name


def test_machine_is_described_without_its_name():
    assert "core" in machine()
    assert "torch" in machine()
    assert platform.node() not in machine()
