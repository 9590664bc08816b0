"""What a training run does, read from a TOML file and checked before anything starts."""

import math
import tomllib
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from megaspan.errors import UserError

CHOICES = {
    "attention": ("dense", "sparse"),
    "learn": ("backbone", "indexers", "all"),
    "dtype": ("bfloat16", "float32"),
}
# The least and the most that a number may be; from 0 on when it is not named here.
RANGES = {
    "context": (2, math.inf),
    "tokens_per_step": (1, math.inf),
    "steps": (1, math.inf),
    "index_queries": (1, math.inf),
    "save_every": (1, math.inf),
    "decay_share": (0, 1),
    "final_rate": (0, 1),
    "clip": (1e-6, math.inf),
    "seed": (0, 2**32 - 1),
}


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One part of a run with its own attention, context length and learning rates.

    attention: "dense" sees every position, "sparse" what the indexers select. learn: "backbone"
    (all but the indexers, from the next-token loss), "indexers" (from the index loss, all else
    frozen) or "all" (both losses, each to its own weights).
    """

    name: str
    attention: str
    learn: str
    context: int  # tokens of the longest sequence
    tokens_per_step: int
    steps: int
    matrix_learning_rate: float  # Muon, for the matrices inside the layers
    learning_rate: float  # AdamW, for all else
    index_learning_rate: float = 1e-3  # AdamW, for the indexers
    warmup_steps: int = 100
    decay_share: float = 0.3  # the last share of the steps, in which the rates fall linearly
    final_rate: float = 0.05  # of the peak, at the end
    weight_decay: float = 0.1
    index_queries: int = 2048  # tokens a step whose attention the indexers learn from

    def __post_init__(self) -> None:
        where = f"stage {self.name!r}: "
        _check_settings(self, where)
        if self.tokens_per_step % self.context:
            raise UserError(f"{where}tokens_per_step must be a multiple of context ({self.context})")

    def rate(self, step: int) -> float:
        """The share of the peak learning rate at a step, counted from 0: warm-up, plateau, linear decay."""
        decay_steps = max(1, round(self.steps * self.decay_share))
        falling = self.final_rate + (1 - self.final_rate) * (self.steps - step) / decay_steps
        return min(1.0, (step + 1) / max(1, self.warmup_steps), falling)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole run: the model's preset or config file, the data, and the stages in order."""

    config: str
    tokenizer: str
    corpus: str
    dtype: str
    seed: int
    stages: tuple[Stage, ...]
    clip: float = 1.0  # of the gradient's norm
    balance_rate: float = 0.001  # step of the routers' bias, DeepSeek-V3 section 2.1.2
    save_every: int = 1000  # steps
    fp8: bool = False  # write the model in 128×128-block FP8, as the GLM-5.2 release

    def __post_init__(self) -> None:
        _check_settings(self, "")

    @classmethod
    def read(cls, path: str | Path) -> "Recipe":
        """Read a TOML recipe; raise UserError that names the file and what is wrong in it."""
        try:
            table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(f"{path} does not exist: give a recipe such as recipes/span-code.toml") from None
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{path} is not valid TOML: {error}") from None
        stages = table.pop("stage", [])
        if not isinstance(stages, list) or not all(isinstance(stage, dict) for stage in stages):
            raise UserError(f"{path}: write each stage as a table of its own, headed [[stage]]")
        if not stages:
            raise UserError(f"{path} has no [[stage]]: a recipe needs at least one")
        if "stages" in table:
            raise UserError(f"{path}: unknown setting 'stages'; head each stage with [[stage]]")
        return _build(cls, {**table, "stages": tuple(_build(Stage, stage, path) for stage in stages)}, path)


def _build(kind: type, table: dict[str, Any], path: str | Path) -> Any:
    known = {field.name: field for field in fields(kind)}
    if unknown := [name for name in table if name not in known]:
        raise UserError(f"{path}: unknown setting {unknown[0]!r}; there are {', '.join(sorted(known))}")
    needed = [name for name, field in known.items() if field.default is MISSING and name not in table]
    if needed:
        where = f"stage {table.get('name', '')!r}" if kind is Stage else "the recipe"
        raise UserError(f"{path}: {where} lacks the setting {needed[0]!r}")
    try:
        return kind(**table)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _check_settings(settings: Stage | Recipe, where: str) -> None:
    """Raise UserError for the first setting that is of the wrong type or out of range."""
    for field in fields(settings):
        name, value = field.name, getattr(settings, field.name)
        if field.type is str:
            if name in CHOICES and value not in CHOICES[name]:
                choices = " or ".join(map(repr, CHOICES[name]))
                raise UserError(f"{where}{name} must be {choices}, not {value!r}")
            if not isinstance(value, str) or not value:
                raise UserError(f"{where}{name} must be a text, not {value!r}")
        elif field.type is bool:
            if not isinstance(value, bool):
                raise UserError(f"{where}{name} must be true or false, not {value!r}")
        elif field.type in (int, float):
            kinds, called = (int, "whole number") if field.type is int else (int | float, "number")
            low, high = RANGES.get(name, (0, math.inf))
            right = isinstance(value, kinds) and not isinstance(value, bool)
            if not (right and math.isfinite(value) and low <= value <= high):
                limit = f"from {low:g} to {high:g}" if high < math.inf else f"of at least {low:g}"
                raise UserError(f"{where}{name} must be a {called} {limit}, not {value!r}")
