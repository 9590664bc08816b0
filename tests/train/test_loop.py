"""Whole runs on a tiny corpus: what each stage changes, how a run begins, and the commands."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import megaspan
from megaspan.bench.training import measure
from megaspan.cli import app
from megaspan.errors import UserError
from megaspan.train.loop import make_model, train
from megaspan.train.recipe import Recipe
from tests.train.small_run import STAGES, TEXT, WriteRecipe, assert_equal, state_of, trainer_of, weights

# --- learning --------------------------------------------------------------------------------------------


def test_the_loss_falls_and_the_model_can_be_loaded(recipe: WriteRecipe, tmp_path: Path) -> None:
    path = recipe(STAGES["dense"] | {"steps": 25}, STAGES["indexers"] | {"steps": 10}, STAGES["sparse"])
    first = float(trainer_of(path).train_step()["loss"])
    last = train(path, tmp_path / "out")
    assert first == pytest.approx(np.log(257), rel=0.05)
    assert last["loss"] < first / 2
    assert last["step"] == 4
    assert last["tokens_per_second"] > 0
    model = megaspan.load(tmp_path / "out", dtype="float32")
    assert model.tokenizer is not None
    logits = model.logits(list(TEXT))
    assert torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(list(TEXT[1:]))) < first / 2
    curves = {folder.name for folder in (tmp_path / "out" / "tensorboard").iterdir()}
    assert curves == {"0-stage 0", "1-stage 1", "2-stage 2"}


def test_a_recipe_can_write_fp8_weights(recipe: WriteRecipe, tmp_path: Path) -> None:
    path = recipe(STAGES["dense"])
    path.write_text("fp8 = true\n" + path.read_text())
    train(path, tmp_path / "out")
    assert torch.float8_e4m3fn in {tensor.dtype for tensor in weights(tmp_path / "out").values()}
    assert megaspan.load(tmp_path / "out").logits(list(TEXT)).isfinite().all()


def test_the_index_loss_falls(recipe: WriteRecipe) -> None:
    trainer = trainer_of(recipe(STAGES["indexers"] | {"steps": 30, "decay_share": 0.0}))
    losses = [float(trainer.train_step()["index_loss"]) for _ in range(30)]
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:2])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_changes_what_it_learns_and_nothing_else(recipe: WriteRecipe, stage: str, dtype: str) -> None:
    trainer = trainer_of(recipe(STAGES[stage] | {"warmup_steps": 0}, dtype=dtype))
    model = trainer.model
    before = {name: value.clone() for name, value in model.state_dict().items()}
    results = trainer.train_step()
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    indexers = {name for name in before if ".indexer." in name}
    expected = {"dense": before.keys() - indexers, "indexers": indexers, "sparse": set(before)}[stage]
    if dtype == "float32":
        assert changed == expected
    else:  # a small step may round away
        assert changed <= expected
        assert len(changed) > 0.8 * len(expected)
    assert set(results) == {"loss", "gradient_norm", "busiest_expert"} | (
        set() if stage == "dense" else {"index_loss"}
    )
    assert all(p.grad is None for p in model.parameters())
    for parameter, master in zip(trainer.weights.parameters, trainer.weights.masters, strict=True):
        assert master.dtype == torch.float32
        assert torch.equal(parameter, master.to(parameter.dtype))


def test_which_optimizer_takes_what(recipe: WriteRecipe) -> None:
    trainer = trainer_of(recipe(STAGES["sparse"]))
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    muon, adam = trainer.optimizers
    (matrices,) = ([names[id(p)] for p in group["params"]] for group in muon.param_groups)
    others, indexers = ([names[id(p)] for p in group["params"]] for group in adam.param_groups)
    assert all(".indexer." in name for name in indexers)
    assert {name.split(".")[-2] for name in matrices} == {
        "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj",
        "gate_proj", "up_proj", "down_proj", "experts",
    }  # fmt: skip
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.layers.1.mlp.gate.weight"} < set(others)
    assert len(matrices) + len(others) + len(indexers) == len(names)


# --- beginnings ------------------------------------------------------------------------------------------


def test_a_run_can_begin_with_a_checkpoint(recipe: WriteRecipe, tmp_path: Path) -> None:
    path = recipe(STAGES["dense"] | {"steps": 1})
    train(path, tmp_path / "first")
    model = make_model(Recipe.read(path), "cpu", tmp_path / "first")
    assert model.training
    loaded = megaspan.load(tmp_path / "first", dtype="float32").state_dict()
    assert_equal(dict(model.state_dict()), dict(loaded))


def test_beginnings_that_are_refused(
    recipe: WriteRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path, message: str, device: str = "cpu") -> None:
        with pytest.raises(UserError, match=message):
            train(path, tmp_path / "out", device)
        assert not (tmp_path / "out").exists()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused(recipe(), "no device 'cuda'", "cuda")
    refused(recipe(), "no device 'gpu'", "gpu")
    refused(recipe(config="debug"), "vocab_size is 97")
    refused(recipe(corpus=str(tmp_path)), "holds no train split")
    refused(recipe(tokenizer=str(tmp_path)), r"no tokenizer\.json")
    refused(
        recipe(STAGES["dense"] | {"context": 8192, "tokens_per_step": 8192}), "more than the model's 4096"
    )
    np.array([300] * 99, dtype="<u2").tofile(tmp_path / "train.bin")
    (tmp_path / "documents.json").write_text(
        json.dumps({"train": {"tokens": 99, "documents": [{"start": 0}]}})
    )
    refused(recipe(corpus=str(tmp_path)), "token 300, but the vocabulary has 257")


# --- commands --------------------------------------------------------------------------------------------


def test_the_train_command_stops_and_goes_on(recipe: WriteRecipe, tmp_path: Path) -> None:
    command = ["train", str(recipe(STAGES["dense"])), "--out", str(tmp_path / "out")]
    stopped = CliRunner().invoke(app, [*command, "--stop-after", "0"])
    assert stopped.exit_code == 0, stopped.exception
    assert stopped.stdout == ""
    assert "tokens/s" in stopped.stderr
    assert state_of(tmp_path / "out")["step"] == 1
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 2
    assert "--resume" in again.stderr
    assert CliRunner().invoke(app, [*command, "--resume"]).exit_code == 0
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_the_bench_measures_every_stage(recipe: WriteRecipe) -> None:
    command = ["bench", "training", "--recipe", str(recipe()), "--steps", "1"]
    result = CliRunner().invoke(app, [*command, "--json"])
    assert result.exit_code == 0, result.exception
    stages = json.loads(result.stdout)["stages"]
    assert [stage["stage"] for stage in stages] == ["stage 0", "stage 1", "stage 2"]
    for stage in stages:
        assert stage["tokens_per_second"] == pytest.approx(64 / stage["seconds_per_step"])
        assert stage["peak_gib"] is None
        assert stage["loss"] > 0
    table = CliRunner().invoke(app, command)
    assert table.exit_code == 0, table.exception
    assert "stage 2" in table.stdout


def test_the_bench_can_say_where_the_time_goes(recipe: WriteRecipe) -> None:
    said: list[str] = []
    measure(recipe(STAGES["dense"]), "cpu", steps=1, warmup=0, profile=True, say=said.append)
    assert any("aten::mm" in line for line in said)
