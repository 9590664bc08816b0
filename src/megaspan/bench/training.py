"""Tokens per second and memory of each stage of a training recipe, on the machine at hand."""

import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.table import Table

from megaspan.train.data import TokenFile
from megaspan.train.loop import StageTrainer, make_model
from megaspan.train.recipe import Recipe


def measure(
    recipe_path: str | Path,
    device: str,
    steps: int = 10,
    warmup: int = 3,
    profile: bool = False,
    say: Callable[[str], None] = print,
) -> list[dict]:
    """Run a few steps of every stage from fresh weights; one dict of figures for each stage.

    profile: say where one more step spends its time. `peak_gib` is the device's memory, None on a CPU.
    """
    recipe = Recipe.read(recipe_path)
    data = TokenFile.open(recipe.corpus, "train")
    results = []
    for stage in recipe.stages:
        trainer = StageTrainer(make_model(recipe, device, None), recipe, stage, data)
        for _ in range(warmup):
            trainer.train_step()
        _wait(device)
        if device != "cpu":
            torch.cuda.reset_peak_memory_stats(device)
        started = time.perf_counter()
        figures = [trainer.train_step() for _ in range(steps)][-1]
        _wait(device)
        seconds = (time.perf_counter() - started) / steps
        results.append(
            {
                "stage": stage.name,
                "tokens_per_second": stage.tokens_per_step / seconds,
                "seconds_per_step": seconds,
                "peak_gib": torch.cuda.max_memory_allocated(device) / 2**30 if device != "cpu" else None,
            }
            | {name: float(value) for name, value in figures.items()}
        )
        say(f"{stage.name}: {stage.tokens_per_step / seconds:,.0f} tokens/s")
        if profile:
            say(_profile(trainer, device))
    return results


def render(stages: list[dict]) -> Table:
    table = Table("stage", "tokens/s", "seconds per step", "peak GiB", "loss")
    for stage in stages:
        peak = "-" if stage["peak_gib"] is None else f"{stage['peak_gib']:.1f}"
        speed = f"{stage['tokens_per_second']:,.0f}"
        table.add_row(stage["stage"], speed, f"{stage['seconds_per_step']:.3g}", peak, f"{stage['loss']:.3f}")
    return table


def _profile(trainer: StageTrainer, device: str) -> str:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device != "cpu":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        trainer.train_step()
        _wait(device)
    order = "self_cuda_time_total" if device != "cpu" else "self_cpu_time_total"
    return profiler.key_averages().table(sort_by=order, row_limit=22, max_name_column_width=60)


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)
