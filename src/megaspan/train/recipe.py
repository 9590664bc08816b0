"""What a training run does, read from a TOML file and checked before anything starts."""

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from megaspan.errors import UserError


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
        where = f"stage {self.name!r}"
        if self.attention not in ("dense", "sparse"):
            raise UserError(f"{where}: attention is {self.attention!r}, it must be 'dense' or 'sparse'")
        if self.learn not in ("backbone", "indexers", "all"):
            raise UserError(f"{where}: learn is {self.learn!r}, it must be 'backbone', 'indexers' or 'all'")
        if self.steps < 1 or self.context < 2:
            raise UserError(f"{where}: steps must be at least 1 and context at least 2")
        if self.tokens_per_step % self.context:
            raise UserError(f"{where}: tokens_per_step must be a multiple of context ({self.context})")

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

    @classmethod
    def read(cls, path: str | Path) -> "Recipe":
        """Read a TOML recipe; raise UserError that names the file and what is wrong in it."""
        try:
            table = tomllib.loads(Path(path).read_text())
        except FileNotFoundError:
            raise UserError(f"{path} does not exist: give a recipe such as recipes/span-code.toml") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{path} is not valid TOML: {error}") from None
        stages = tuple(_build(Stage, stage, path) for stage in table.pop("stage", []))
        if not stages:
            raise UserError(f"{path} has no [[stage]]: a recipe needs at least one")
        return _build(cls, {**table, "stages": stages}, path)


def _build(kind: type, table: dict[str, Any], path: str | Path) -> Any:
    known = {field.name for field in fields(kind)}
    if unknown := sorted(set(table) - known):
        raise UserError(f"{path}: unknown setting {unknown[0]!r}; there are {', '.join(sorted(known))}")
    try:
        return kind(**table)
    except TypeError as error:
        raise UserError(f"{path}: {error}".replace("__init__() ", "")) from None
