"""Whole runs on a tiny corpus: what each stage changes, and a stop anywhere that changes nothing."""

import errno
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend
from typer.testing import CliRunner

import megaspan
from megaspan.bench.training import measure
from megaspan.cli import app
from megaspan.config import ModelConfig
from megaspan.errors import UserError
from megaspan.tokenizer import byte_alphabet
from megaspan.train import loop
from megaspan.train.data import TokenFile
from megaspan.train.loop import StageTrainer, make_model, train
from megaspan.train.recipe import Recipe
from megaspan.train.state import load_state, save_state

TEXT = b"def add(a, b):\n    return a + b\n\n\n"
STAGES = {
    "dense": dict(attention="dense", learn="backbone", steps=4),
    "indexers": dict(attention="dense", learn="indexers", steps=3),
    "sparse": dict(attention="sparse", learn="all", steps=4),
}
RATES = dict(matrix_learning_rate=0.02, learning_rate=0.01, index_learning_rate=0.01, warmup_steps=2)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the config of a tiny model, a tokenizer of bytes and a corpus of repeated text."""
    folder = tmp_path_factory.mktemp("workplace")
    backend = Backend(models.BPE(vocab=byte_alphabet(), merges=[]))
    backend.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    backend.save(str(folder / "tokenizer.json"))
    config = ModelConfig.preset("debug").replace(
        num_nextn_predict_layers=0, num_hidden_layers=4, hidden_size=32, indexer_types=("full", "shared") * 2,
        mlp_layer_types=(), vocab_size=backend.get_vocab_size(), index_topk=6,
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    document = [*(TEXT * 20), 256]
    np.array(document * 3, dtype="<u2").tofile(folder / "train.bin")
    starts = [{"start": number * len(document)} for number in range(3)]
    (folder / "documents.json").write_text(
        json.dumps({"train": {"tokens": 3 * len(document), "documents": starts}})
    )
    return folder


WriteRecipe = Callable[..., Path]


@pytest.fixture
def recipe(workplace: Path, tmp_path: Path) -> WriteRecipe:
    def write(*stages: dict, dtype: str = "float32", **settings: object) -> Path:
        places = {name: str(workplace) for name in ("tokenizer", "corpus")}
        top = places | {"config": str(workplace / "config.json"), "dtype": dtype, "seed": 3} | settings
        lines = [f"{name} = {value!r}" for name, value in top.items()]
        for number, stage in enumerate(stages or STAGES.values()):
            values = dict(name=f"stage {number}", context=32, tokens_per_step=64) | RATES | stage
            lines += ["[[stage]]", *(f"{name} = {value!r}" for name, value in values.items())]
        path = tmp_path / "recipe.toml"
        path.write_text("\n".join(lines))
        return path

    return write


@pytest.fixture
def stop_after_steps(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, float]]:
    """`train`, but its clock counts the steps that this call has made."""

    def run(*arguments: object, steps: float, **keywords: object) -> dict[str, float]:
        clock, step = [0.0], StageTrainer.train_step

        def counted(trainer: StageTrainer) -> dict[str, torch.Tensor]:
            clock[0] += 1
            return step(trainer)

        with monkeypatch.context() as patch:
            patch.setattr(StageTrainer, "train_step", counted)
            patch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: clock[0]))
            return train(*arguments, stop_after=steps, **keywords)  # type: ignore[arg-type]

    return run


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def state_of(folder: Path) -> dict:
    return torch.load(folder / "state.pt", weights_only=True)


def assert_equal(actual: object, expected: object) -> None:
    """Bit for bit, through dictionaries and lists."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(actual, torch.Tensor)
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)
    elif isinstance(expected, dict):
        assert isinstance(actual, dict)
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            assert_equal(actual[name], value)
    elif isinstance(expected, list):
        assert isinstance(actual, list)
        for one, other in zip(actual, expected, strict=True):
            assert_equal(one, other)
    else:
        assert actual == expected


def trainer_of(recipe_path: Path, number: int = 0) -> StageTrainer:
    recipe = Recipe.read(recipe_path)
    data = TokenFile.open(recipe.corpus, "train")
    return StageTrainer(make_model(recipe, "cpu", None), recipe, recipe.stages[number], data)


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


# --- stopping and going on -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uninterrupted(workplace: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stops", [[2], [5], [9], [1, 3, 2, 1]], ids=str)
def test_resuming_changes_no_bit(
    recipe: WriteRecipe,
    stop_after_steps: Callable,
    uninterrupted: dict[str, Path],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    dtype: str,
    stops: list[int],
) -> None:
    """Stops inside each of the stages of 4, 3 and 4 steps, and after the last step of one."""
    path, out = recipe(dtype=dtype), tmp_path / "out"
    if dtype not in uninterrupted:
        uninterrupted[dtype] = tmp_path_factory.mktemp("whole")
        train(path, uninterrupted[dtype])
    for number, steps in enumerate(stops):
        figures = stop_after_steps(path, out, steps=steps, resume=number > 0)
        assert not (out / "model.safetensors").exists()
        assert figures["step"] == state_of(out)["step"]
    train(path, out, resume=True)
    assert_equal(weights(out), weights(uninterrupted[dtype]))
    assert_equal(state_of(out), state_of(uninterrupted[dtype]))


def test_a_stop_at_the_end_of_a_stage_is_inside_the_run(
    recipe: WriteRecipe, stop_after_steps: Callable, tmp_path: Path
) -> None:
    path = recipe()
    stop_after_steps(path, tmp_path / "out", steps=4)
    # The stage was over, so the next one had begun when the time was up.
    assert (state_of(tmp_path / "out")["stage"], state_of(tmp_path / "out")["step"]) == (1, 1)


def test_a_crash_goes_on_from_the_last_save(
    recipe: WriteRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, step = recipe(STAGES["dense"], save_every=3), StageTrainer.train_step

    def crash_at_the_end(trainer: StageTrainer) -> dict[str, torch.Tensor]:
        if trainer.step == 3:
            raise KeyboardInterrupt
        return step(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(StageTrainer, "train_step", crash_at_the_end)
        with pytest.raises(KeyboardInterrupt):
            train(path, tmp_path / "out")
    assert state_of(tmp_path / "out")["step"] == 3
    train(path, tmp_path / "out", resume=True)
    train(path, tmp_path / "whole")
    assert_equal(weights(tmp_path / "out"), weights(tmp_path / "whole"))


def test_a_finished_run_has_nothing_left_to_do(recipe: WriteRecipe, tmp_path: Path) -> None:
    path = recipe(STAGES["dense"])
    train(path, tmp_path)
    before = weights(tmp_path)
    assert train(path, tmp_path, resume=True) == {}
    assert_equal(weights(tmp_path), before)
    # A stage that the recipe has won since then is trained from there.
    train(recipe(STAGES["dense"], STAGES["indexers"]), tmp_path, resume=True)
    changed = {name for name, value in weights(tmp_path).items() if not torch.equal(value, before[name])}
    assert changed
    assert all(".indexer." in name for name in changed)


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_state(
    recipe: WriteRecipe, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    train(recipe(STAGES["dense"]), out)
    good = (out / "state.pt").read_bytes()
    model = (out / "model.safetensors").read_bytes()
    hopeless = STAGES["dense"] | {"learning_rate": 1e30, "matrix_learning_rate": 1e30, "steps": 9}
    with pytest.raises(UserError, match=r"stage 'stage 0', step \d: .* is (nan|inf); lower"):
        train(recipe(hopeless, save_every=3), out, resume=True)
    assert (out / "state.pt").read_bytes() == good
    assert (out / "model.safetensors").read_bytes() == model


def test_the_rates_are_those_of_the_recipe_as_it_is_now(recipe: WriteRecipe, tmp_path: Path) -> None:
    before = trainer_of(recipe(STAGES["sparse"]))
    before.train_step()
    save_state(tmp_path, 0, before)
    rates = dict(matrix_learning_rate=0.5, learning_rate=0.25, index_learning_rate=0.25, weight_decay=0.7)
    edited = recipe(STAGES["sparse"] | rates)
    number, after = load_state(tmp_path, lambda n: trainer_of(edited, n))
    assert (number, after.step) == (0, 1)
    assert [[g["peak"] for g in o.param_groups] for o in after.optimizers] == [[0.5], [0.25, 0.25]]
    assert after.optimizers[0].param_groups[0]["weight_decay"] == 0.7
    for new, old in zip(after.optimizers, before.optimizers, strict=True):
        assert_equal(new.state_dict()["state"], old.state_dict()["state"])
    after.train_step()
    assert after.optimizers[1].param_groups[0]["lr"] == 0.25 * after.stage.rate(1)


def test_a_state_is_written_whole_or_not_at_all(
    recipe: WriteRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, out = trainer_of(recipe()), tmp_path / "out"
    save_state(out, 0, trainer)
    good = (out / "state.pt").read_bytes()
    trainer.train_step()
    full = OSError(errno.ENOSPC, "No space left on device")
    for error in (full, RuntimeError("PytorchStreamWriter failed"), None):  # None: Control-C

        def write_half(state: dict, file, error=error) -> None:
            file.write(pickle.dumps(list(state))[:10])
            raise error or KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(torch, "save", write_half)
            with pytest.raises(UserError if error else KeyboardInterrupt):
                save_state(out, 0, trainer)
        assert (out / "state.pt").read_bytes() == good
        assert [file.name for file in out.iterdir()] == ["state.pt"]


def test_states_that_are_refused(recipe: WriteRecipe, tmp_path: Path) -> None:
    path, out = recipe(), tmp_path / "out"
    with pytest.raises(UserError, match=r"no state\.pt to resume from"):
        train(path, out, resume=True)
    save_state(out, 1, trainer_of(path, 1))
    with pytest.raises(UserError, match="go on with --resume"):
        train(path, out)
    with pytest.raises(UserError, match="stage 2, but the recipe has 1"):
        train(recipe(STAGES["dense"]), out, resume=True)
    with pytest.raises(UserError, match=r"learns 'indexers', but stage 'stage 1' .* learns 'all'"):
        train(recipe(STAGES["dense"], STAGES["sparse"]), out, resume=True)
    other = ModelConfig.from_json(Recipe.read(path).config).replace(q_lora_rank=40)
    (tmp_path / "config.json").write_text(json.dumps(other.to_dict()))
    with pytest.raises(UserError, match="another config"):
        train(recipe(config=str(tmp_path / "config.json")), out, resume=True)
    for damaged in ((out / "state.pt").read_bytes()[:5000], b"", b"nonsense"):
        (out / "state.pt").write_bytes(damaged)
        with pytest.raises(UserError, match="is damaged"):
            train(recipe(), out, resume=True)


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
