"""Save and load all that a run needs to go on exactly where it stopped."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megaspan.errors import UserError

if TYPE_CHECKING:
    from megaspan.train.loop import StageTrainer

FILE = "state.pt"


def save_state(folder: Path, number: int, trainer: "StageTrainer") -> None:
    """Write the state of stage `number` to folder/state.pt, whole or not at all."""
    state = {
        "stage": number,
        "step": trainer.step,
        "learn": trainer.stage.learn,
        "model": trainer.model.state_dict(),
        "masters": trainer.weights.masters,
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
    }
    unfinished = folder / f"{FILE}.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with unfinished.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())  # else a power cut may keep the new name without its content
        unfinished.replace(folder / FILE)
    except (OSError, RuntimeError) as error:  # torch's writer turns a full disk into a RuntimeError
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise UserError(f"cannot write the state to {folder / FILE}: {reason}") from error
    finally:
        unfinished.unlink(missing_ok=True)


def load_state(folder: Path, make: Callable[[int], "StageTrainer"]) -> tuple[int, "StageTrainer"]:
    """Return the saved stage's number and a trainer made by `make(number)` in the saved state.

    Rates and other settings are those that `make` gave: a recipe edited since then counts.
    """
    path = folder / FILE
    if not path.exists():
        raise UserError(f"{folder} holds no {FILE} to resume from: start without --resume")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except PermissionError:
        raise
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise UserError(f"{path} is damaged: start again in another folder") from error
    trainer = make(state["stage"])
    if trainer.stage.learn != state["learn"]:
        raise UserError(
            f"{path} is in a stage that learns {state['learn']!r}, but stage {trainer.stage.name!r} of the"
            f" recipe learns {trainer.stage.learn!r}: resume with the recipe it was made with"
        )
    trainer.step = state["step"]
    try:
        trainer.model.load_state_dict(state["model"])
    except RuntimeError as error:
        raise UserError(f"{path} is of a model with another config than the recipe's") from error
    with torch.no_grad():
        for master, saved in zip(trainer.weights.masters, state["masters"], strict=True):
            master.copy_(saved)
    for optimizer, saved in zip(trainer.optimizers, state["optimizers"], strict=True):
        settings = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": saved["state"], "param_groups": settings})
    return state["stage"], trainer
