"""Runs that stop and go on: a stop anywhere changes nothing."""

import errno
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megaspan.config import ModelConfig
from megaspan.errors import UserError
from megaspan.train import loop
from megaspan.train.loop import StageTrainer, train
from megaspan.train.recipe import Recipe
from megaspan.train.state import load_state, save_state
from tests.train.small_run import STAGES, WriteRecipe, assert_equal, state_of, trainer_of, weights


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
