"""Tokens per second and memory of each stage of a training recipe, on the machine at hand."""

import time

import torch

from megaspan.train.data import TokenFile
from megaspan.train.loop import StageTrainer, make_model
from megaspan.train.recipe import Recipe


def measure(
    recipe_path: str, device: str, steps: int = 10, warmup: int = 3, profile: bool = False
) -> list[dict]:
    """Run a few steps of every stage from fresh weights; one dict of figures for each stage."""
    recipe = Recipe.read(recipe_path)
    data = TokenFile.open(recipe.corpus, "train")
    results = []
    for stage in recipe.stages:
        trainer = StageTrainer(make_model(recipe, device, None), recipe, stage, data)
        for _ in range(warmup):
            trainer.train_step()
        _wait(device)
        if device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        for _ in range(steps):
            figures = trainer.train_step()
        _wait(device)
        seconds = (time.perf_counter() - started) / steps
        peak = torch.cuda.max_memory_allocated() / 2**30 if device != "cpu" else None
        results.append(
            {
                "stage": stage.name,
                "tokens_per_second": stage.tokens_per_step / seconds,
                "seconds_per_step": seconds,
                "peak_gib": peak,
            }
            | {name: float(value) for name, value in figures.items()}
        )
        print(results[-1], flush=True)
        if profile:
            _profile(trainer, device)
    return results


def _profile(trainer: StageTrainer, device: str) -> None:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device != "cpu":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        trainer.train_step()
        _wait(device)
    order = "self_cuda_time_total" if device != "cpu" else "self_cpu_time_total"
    print(profiler.key_averages().table(sort_by=order, row_limit=22, max_name_column_width=60))


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()
