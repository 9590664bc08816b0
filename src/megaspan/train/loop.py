"""The training loop: stages of a recipe, one step after the other, resumable bit for bit."""

import math
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from megaspan.cache.transient import TransientCache
from megaspan.config import ModelConfig
from megaspan.errors import UserError
from megaspan.model.folder import LanguageModel, load_folder, save_folder
from megaspan.model.observe import AttentionSeen, RoutingSeen
from megaspan.model.selection import EVERYTHING
from megaspan.tokenizer import Tokenizer
from megaspan.train.balance import LoadBalance
from megaspan.train.data import TokenFile, training_pack
from megaspan.train.index_loss import IndexLoss
from megaspan.train.losses import next_token_loss
from megaspan.train.optimizer import MasterWeights, Muon
from megaspan.train.progress import StageProgress
from megaspan.train.recipe import Recipe, Stage
from megaspan.train.state import FILE, load_state, save_state

SHOW_EVERY = 10  # steps; a figure makes the processor wait for the device


class StageTrainer:
    """The model, its optimizers and its place in one stage."""

    def __init__(self, model: LanguageModel, recipe: Recipe, stage: Stage, data: TokenFile):
        self.model, self.recipe, self.stage, self.data = model, recipe, stage, data
        self.step = 0
        self.seed = recipe.seed << 32 | zlib.crc32(stage.name.encode())  # stages read different packs
        chosen = dict(_learning(model, stage))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in chosen)
        self.weights = MasterWeights(chosen.values())
        self.optimizers = self._optimizers(dict(zip(chosen, self.weights.masters, strict=True)))
        self.balance = LoadBalance(recipe.balance_rate if stage.learn != "indexers" else 0.0)

    def train_step(self) -> dict[str, Tensor]:
        """Read one pack, change the weights, return what happened as scalars."""
        stage, device = self.stage, str(self.model.lm_head.weight.device)
        batch, targets = training_pack(
            self.data, self.seed, self.step, stage.tokens_per_step, stage.context, device
        )
        index_loss = None
        if stage.learn != "backbone":
            random = torch.Generator().manual_seed((self.seed * 1_000_003 + self.step) % 2**63)
            sampled = torch.randperm(len(targets), generator=random)[: stage.index_queries].sort().values
            index_loss = IndexLoss(batch, sampled.to(device))

        def observe(seen: AttentionSeen | RoutingSeen) -> None:
            self.balance(seen)
            if index_loss is not None:
                index_loss(seen)

        selection = EVERYTHING if stage.attention == "dense" else None
        results: dict[str, Tensor] = {}
        loss = torch.zeros((), device=device)
        with torch.set_grad_enabled(stage.learn != "indexers"):
            hidden = self.model(batch, TransientCache(), selection, observe)
            results["loss"] = next_token_loss(self.model, hidden, targets)
        if stage.learn != "indexers":
            loss = loss + results["loss"]
        if index_loss is not None:
            results["index_loss"] = index_loss.value()
            loss = loss + results["index_loss"]
        loss.backward()
        results["gradient_norm"] = self.weights.take_gradients(self.recipe.clip)
        rate = stage.rate(self.step)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * rate
            optimizer.step()
        self.weights.give_back()
        results["busiest_expert"] = self.balance.step()
        self.step += 1
        return {name: value.detach() for name, value in results.items()}

    def _optimizers(self, masters: dict[str, Tensor]) -> list[torch.optim.Optimizer]:
        stage = self.stage
        groups: dict[str, list[Tensor]] = {"matrix": [], "other": [], "indexer": []}
        for name, master in masters.items():
            groups[_kind(name, master)].append(master)
        optimizers: list[torch.optim.Optimizer] = []
        if groups["matrix"]:
            optimizers.append(
                Muon(groups["matrix"], stage.matrix_learning_rate, weight_decay=stage.weight_decay)
            )
        # By what they hold and not by their rate: an edited rate must not change which state is whose.
        rates = (("other", stage.learning_rate), ("indexer", stage.index_learning_rate))
        others = [{"params": groups[kind], "lr": rate} for kind, rate in rates if groups[kind]]
        if others:
            optimizers.append(
                torch.optim.AdamW(others, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, foreach=True)
            )
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["peak"] = group["lr"]
        return optimizers


def train(
    recipe_path: str | Path,
    out: str | Path,
    device: str = "cpu",
    resume: bool = False,
    start_from: str | Path | None = None,
    stop_after: float = math.inf,
) -> dict[str, float]:
    """Run a recipe and write the model to `out`.

    resume: go on from the state in `out`, by the recipe as it is now. start_from: begin with the weights
    of this checkpoint. stop_after: seconds after which to save the state and return. Returns the last
    step's figures, none when nothing was left to do.
    """
    deadline = time.monotonic() + stop_after
    recipe, out = Recipe.read(recipe_path), Path(out)
    if not resume and (out / FILE).exists():
        raise UserError(f"{out} holds the state of another run: go on with --resume, or give another folder")
    data = TokenFile.open(recipe.corpus, "train")
    model = make_model(recipe, device, start_from)
    _check_fit(model, recipe, data)

    def begin(number: int) -> StageTrainer:
        if number >= len(recipe.stages):
            raise UserError(f"the state is in stage {number + 1}, but the recipe has {len(recipe.stages)}")
        return StageTrainer(model, recipe, recipe.stages[number], data)

    number, trainer = load_state(out, begin) if resume else (0, begin(0))
    while True:
        figures = _run_stage(trainer, out, number, deadline)
        if trainer.step < trainer.stage.steps:
            return figures
        number += 1
        if number >= len(recipe.stages):
            break
        trainer = begin(number)
    save_folder(model, out, fp8=recipe.fp8)
    return figures


def _run_stage(trainer: StageTrainer, out: Path, number: int, deadline: float) -> dict[str, float]:
    """Train to the end of the stage or to the deadline, and save the state there and every so often."""
    stage, figures = trainer.stage, {}
    with StageProgress(stage, out / "tensorboard" / f"{number}-{stage.name}", trainer.step) as progress:
        while trainer.step < stage.steps:
            results = trainer.train_step()
            progress.advance(trainer.step)
            stopping = trainer.step >= stage.steps or time.monotonic() >= deadline
            saving = stopping or trainer.step % trainer.recipe.save_every == 0
            if saving or trainer.step % SHOW_EVERY == 0:
                figures = {name: float(value) for name, value in results.items()}  # waits for the device
                _require_finite(figures, trainer)
                figures = progress.show(trainer.step, figures)
            if saving:
                save_state(out, number, trainer)
            if stopping:
                break
    return figures


def _require_finite(figures: dict[str, float], trainer: StageTrainer) -> None:
    for name, value in figures.items():
        if not math.isfinite(value):
            raise UserError(
                f"stage {trainer.stage.name!r}, step {trainer.step}: {name} is {value}; lower the learning"
                " rates and go on from the last saved state with --resume"
            )


def _check_fit(model: LanguageModel, recipe: Recipe, data: TokenFile) -> None:
    """Raise UserError where the model cannot read what the recipe gives it."""
    data.require_vocabulary(model.config.vocab_size)
    for stage in recipe.stages:
        if stage.context > (limit := model.config.max_position_embeddings):
            raise UserError(
                f"stage {stage.name!r}: context {stage.context} is more than the model's {limit} positions"
            )


def make_model(recipe: Recipe, device: str, start_from: str | Path | None) -> LanguageModel:
    """The model that a run begins with: fresh weights, or those of the checkpoint `start_from`."""
    if device != "cpu" and not (device.split(":")[0] == "cuda" and torch.cuda.is_available()):
        raise UserError(f"there is no device {device!r} here: give cpu, or cuda on a machine with a GPU")
    if start_from is not None:
        return load_folder(start_from, recipe.dtype, device, LanguageModel).train()
    config = ModelConfig.named(recipe.config)
    tokenizer = Tokenizer.load(recipe.tokenizer)
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"{recipe.tokenizer} has {tokenizer.vocab_size} tokens, but the config's vocab_size is"
            f" {config.vocab_size}"
        )
    model = LanguageModel(config)
    model.initialise(recipe.seed)
    routers = {id(p) for name, p in model.named_parameters() if name.endswith("mlp.gate.weight")}
    for parameter in model.parameters():
        if id(parameter) not in routers:
            parameter.data = parameter.data.to(getattr(torch, recipe.dtype))
    model.tokenizer = tokenizer
    return model.to(device)


def _learning(model: LanguageModel, stage: Stage) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters that a stage changes."""
    for name, parameter in model.named_parameters():
        is_indexer = ".indexer." in name
        if stage.learn == "all" or is_indexer == (stage.learn == "indexers"):
            yield name, parameter


def _kind(name: str, parameter: Tensor) -> str:
    """Muon takes the "matrix" ones: those inside a layer but for the router's and the indexers'."""
    if ".indexer." in name:
        return "indexer"
    inside = ".layers." in name and not name.endswith("mlp.gate.weight")
    return "matrix" if inside and parameter.dim() >= 2 else "other"
