"""Save and load all that a run needs to go on exactly where it stopped."""

import os
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
        "model": trainer.model.state_dict(),
        "masters": trainer.weights.masters,
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
    }
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{FILE}.{os.getpid()}"
    torch.save(state, unfinished)
    unfinished.replace(folder / FILE)


def load_state(folder: Path, make: Callable[[int], "StageTrainer"]) -> tuple[int, "StageTrainer"]:
    """Return the saved stage's number and a trainer made by `make(number)` in the saved state."""
    if not (folder / FILE).exists():
        raise UserError(f"{folder} holds no {FILE} to resume from: start without --resume")
    state = torch.load(folder / FILE, map_location="cpu", weights_only=True)
    trainer = make(state["stage"])
    trainer.step = state["step"]
    trainer.model.load_state_dict(state["model"])
    with torch.no_grad():
        for master, saved in zip(trainer.weights.masters, state["masters"], strict=True):
            master.copy_(saved)
    for optimizer, saved in zip(trainer.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return state["stage"], trainer
