"""The training loop: stages of a recipe, one step after the other, resumable bit for bit."""

import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from megaspan.cache.transient import TransientCache
from megaspan.config import ModelConfig
from megaspan.errors import UserError
from megaspan.model.observe import AttentionSeen, RoutingSeen
from megaspan.model.selection import EVERYTHING
from megaspan.pretrained import PretrainedModel, save
from megaspan.tokenizer import Tokenizer
from megaspan.train.balance import LoadBalance
from megaspan.train.data import TokenFile, training_pack
from megaspan.train.index_loss import IndexLoss
from megaspan.train.losses import next_token_loss
from megaspan.train.optimizer import MasterWeights, Muon
from megaspan.train.recipe import Recipe, Stage
from megaspan.train.state import load_state, save_state


class StageTrainer:
    """The model, its optimizers and its place in one stage."""

    def __init__(self, model: PretrainedModel, recipe: Recipe, stage: Stage, data: TokenFile):
        self.model, self.recipe, self.stage, self.data = model, recipe, stage, data
        self.step = 0
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
            self.data, self.recipe.seed, self.step, stage.tokens_per_step, stage.context, device
        )
        index_loss = None
        if stage.learn != "backbone":
            random = torch.Generator().manual_seed(self.recipe.seed * 1_000_003 + self.step)
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
        matrices = [master for name, master in masters.items() if _is_matrix(name, master)]
        others: dict[float, list[Tensor]] = {stage.learning_rate: [], stage.index_learning_rate: []}
        for name, master in masters.items():
            if not _is_matrix(name, master):
                others[stage.index_learning_rate if ".indexer." in name else stage.learning_rate].append(
                    master
                )
        optimizers: list[torch.optim.Optimizer] = []
        if matrices:
            optimizers.append(Muon(matrices, stage.matrix_learning_rate, weight_decay=stage.weight_decay))
        groups = [{"params": members, "lr": rate} for rate, members in others.items() if members]
        if groups:
            optimizers.append(
                torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, foreach=True)
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

    resume: go on from the state in `out`. start_from: begin with the weights of this checkpoint.
    stop_after: seconds after which to save the state and return. Returns the last step's figures.
    """
    recipe = Recipe.read(recipe_path)
    out = Path(out)
    data = TokenFile.open(recipe.corpus, "train")
    model = make_model(recipe, device, start_from)
    started = time.monotonic()
    number, trainer = 0, StageTrainer(model, recipe, recipe.stages[0], data)
    if resume:
        number, trainer = load_state(out, lambda n: StageTrainer(model, recipe, recipe.stages[n], data))
    elif (out / "state.pt").exists():
        raise UserError(f"{out} holds the state of another run: go on with --resume, or give another folder")
    figures: dict[str, float] = {}
    while True:
        for figures in _run_stage(trainer, out, number):
            if time.monotonic() - started > stop_after:
                save_state(out, number, trainer)
                return figures
        number += 1
        if number == len(recipe.stages):
            break
        trainer = StageTrainer(model, recipe, recipe.stages[number], data)
        save_state(out, number, trainer)
    save(model, out)
    return figures


def _run_stage(trainer: StageTrainer, out: Path, number: int) -> Iterator[dict[str, float]]:
    """Train to the end of the stage; yield figures every few steps, having shown and logged them."""
    from torch.utils.tensorboard import SummaryWriter

    stage, every = trainer.stage, 10
    columns = ("[bold]{task.description}", BarColumn(), MofNCompleteColumn(), "{task.fields[figures]}")
    with (
        SummaryWriter(str(out / "tensorboard" / f"{number}-{stage.name}")) as writer,
        Progress(
            *(TextColumn(c) if isinstance(c, str) else c for c in columns), TimeRemainingColumn()
        ) as bar,
    ):
        task = bar.add_task(stage.name, total=stage.steps, completed=trainer.step, figures="")
        clock, since = time.monotonic(), trainer.step
        while trainer.step < stage.steps:
            results = trainer.train_step()
            if trainer.step % every == 0 or trainer.step == stage.steps:
                figures = {name: float(value) for name, value in results.items()}  # waits for the device
                if not all(math.isfinite(value) for value in figures.values()):
                    raise UserError(f"{stage.name}, step {trainer.step}: {figures}; lower the learning rate")
                now = time.monotonic()
                rate = (trainer.step - since) * stage.tokens_per_step / (now - clock)
                clock, since = now, trainer.step
                figures |= {"step": trainer.step, "tokens_per_second": rate}
                for name, value in figures.items():
                    writer.add_scalar(name, value, trainer.step)
                shown = " ".join(f"{name} {value:.4g}" for name, value in figures.items() if name != "step")
                bar.update(task, completed=trainer.step, figures=shown)
                if not bar.console.is_terminal and trainer.step % (10 * every) == 0:
                    print(f"{stage.name} {trainer.step}/{stage.steps} {shown}", flush=True)
                yield figures
            if trainer.step % trainer.recipe.save_every == 0:
                save_state(out, number, trainer)


def make_model(recipe: Recipe, device: str, start_from: str | Path | None) -> PretrainedModel:
    from megaspan.pretrained import load

    if start_from is not None:
        return load(start_from, recipe.dtype, device).train()
    config = ModelConfig.named(recipe.config)
    model = PretrainedModel(config)
    model.initialise(recipe.seed)
    routers = {id(p) for name, p in model.named_parameters() if name.endswith("mlp.gate.weight")}
    for parameter in model.parameters():
        if id(parameter) not in routers:
            parameter.data = parameter.data.to(getattr(torch, recipe.dtype))
    model.tokenizer = Tokenizer.load(recipe.tokenizer)
    return model.to(device)


def _learning(model: PretrainedModel, stage: Stage) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters that a stage changes."""
    for name, parameter in model.named_parameters():
        is_indexer = ".indexer." in name
        if stage.learn == "all" or is_indexer == (stage.learn == "indexers"):
            yield name, parameter


def _is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon takes it: a matrix inside a layer, but neither the router's nor an indexer's."""
    inside = ".layers." in name and ".indexer." not in name and not name.endswith("mlp.gate.weight")
    return inside and parameter.dim() >= 2
