"""The engine's bench: every part runs, measures in turns what it divides, and says how to run it again."""

import json
import shlex
from functools import partial
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from megaspan.bench import engine, latency, pairs, steps
from megaspan.cli import app
from megaspan.config import ModelConfig
from megaspan.engine.config import EngineConfig
from megaspan.errors import UserError
from megaspan.model.folder import save_folder
from tests.model.models import random_model

CONFIG = ModelConfig.preset("debug").replace(max_position_embeddings=16384)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    save_folder(random_model(CONFIG), path)
    return str(path)


@pytest.fixture
def short(monkeypatch):
    """The parts at lengths that a test has time for."""
    monkeypatch.setattr(engine, "LONG", 700)
    monkeypatch.setattr(engine, "CONVERSATION", 300)
    monkeypatch.setattr(engine, "MILLION", 9000)
    monkeypatch.setattr(engine, "step_work", partial(steps.step_work, running=2, steps=20))
    monkeypatch.setattr(
        engine, "summary_seconds", lambda rows, vocabulary: steps.summary_seconds(1, vocabulary, 1)
    )
    monkeypatch.setattr(engine, "in_turns", partial(pairs.in_turns, pairs=2))
    monkeypatch.setattr(latency, "EngineConfig", partial(EngineConfig, max_chunk=128))
    monkeypatch.setattr(latency, "streams", partial(latency.streams, prompt=4, answer=4))
    reading = latency.reading
    monkeypatch.setattr(latency, "reading", lambda model, context: reading(model, 300))


@pytest.mark.parametrize("part", engine.PARTS)
def test_a_part_runs_and_its_rows_say_how_to_run_it_again(folder, short, part):
    said: list[str] = []
    rows = engine.run(folder, [part], said.append, threads=1)
    assert said[0] == f"{part} (1 of 1)"
    assert said[-1].startswith(f"{part} took ")
    assert all(row.value is not None and row.value > 0 for row in rows)
    assert len({row.name for row in rows}) == len(rows)
    (command,) = {row.command for row in rows}
    assert command == f"megaspan bench engine --model {folder} --parts {part} --threads 1"


def test_the_command_of_a_row_gives_the_row(folder):
    row, _ = engine.run(folder, ["bytes"], lambda said: None)
    name, *arguments = shlex.split(row.command)
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert (name, result.exit_code) == ("megaspan", 0), result.output
    again, _ = json.loads(result.stdout)["rows"]
    assert (again["name"], again["value"], again["command"]) == (row.name, row.value, row.command)
    assert "bytes took" in result.stderr


def test_the_modes_are_measured_in_turns_and_the_default_is_left(folder, monkeypatch):
    model = engine.load_folder(folder, "auto", "cpu", engine.LanguageModel)
    modes: list[bool] = []

    def measured(model, **_) -> SimpleNamespace:
        modes.append(model.batch_invariant)
        return SimpleNamespace(tokens_per_second=5.0 if model.batch_invariant else 10.0)

    for name in ("streams", "reading"):
        monkeypatch.setattr(latency, name, measured)
    figures = engine.measure_invariance(model, lambda said: None)
    assert modes[:4] == [False, True, True, False]
    assert modes.count(False) == modes.count(True) == 3 * pairs.PAIRS
    assert [figure["value"] for figure in figures] == pytest.approx([2.0] * 3)
    assert not model.batch_invariant


def test_a_mode_that_fails_leaves_the_default(folder, monkeypatch):
    model = engine.load_folder(folder, "auto", "cpu", engine.LanguageModel)

    def failing(model, **_) -> SimpleNamespace:
        if model.batch_invariant:
            raise RuntimeError("no memory")
        return SimpleNamespace(tokens_per_second=1.0)

    monkeypatch.setattr(latency, "streams", failing)
    with pytest.raises(RuntimeError, match="no memory"):
        engine.measure_invariance(model, lambda said: None)
    assert not model.batch_invariant


def test_the_figures_of_steps_say_what_is_in_them(folder, short):
    rows = {row.name: row for row in engine.run(folder, ["steps"], lambda said: None)}
    assert [row.unit for row in rows.values()] == ["µs", "µs", "", "ms"]
    of_step, of_logits = next(iter(rows.values())), list(rows.values())[-1]
    assert "sampling from a vocabulary of 128" in of_step.note
    assert "out: the forward pass" in of_step.note
    assert of_logits.name.endswith("vocabulary of 154,880")


def test_an_unknown_part_is_refused_before_the_model_is_read():
    with pytest.raises(UserError, match="no part 'stream'; there are steps, "):
        engine.run("nowhere", ["steps", "stream"], lambda said: None)


def test_what_is_recorded_was_measured_by_these_parts():
    recorded = json.loads((engine.FOLDER / "serving.json").read_text())
    assert recorded["about"] == engine.ABOUT
    parts = [shlex.split(row["command"])[6] for row in recorded["rows"]]
    assert set(parts) == set(engine.PARTS)
