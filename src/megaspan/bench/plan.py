"""What a config costs at a context length: parameters, FLOPs, bytes, and what fits on some GPUs.

Pure arithmetic; the conventions are those of `flops` and `memory`.
"""

from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megaspan.config import ModelConfig
from megaspan.costs import memory
from megaspan.costs.flops import DENSE, PARTS, Schedule, flops_per_token, index_flops, prefill_flops
from megaspan.errors import UserError

PART_TITLES = {
    "projections": "attention projections",
    "attention": "attention",
    "indexer": "indexer",
    "moe": "experts",
    "dense_mlp": "dense layers' MLP",
    "head": "head",
}


def plan(
    config: ModelConfig, context: int, gpus: int = 8, gpu_gib: float = 141, reserve: float = 0.1
) -> dict[str, Any]:
    """One JSON object; FLOPs per token are those of the last of `context` tokens.

    Cache bytes without a format in their name are FP8 with the multi-token prediction layers. Ratios
    compare the same token with an indexer in every layer, and are rounded to two decimals as they are quoted;
    `flops_ratio_quarter` lets exactly a quarter of the layers index. gpu_gib: GiB of one GPU, of which
    the share `reserve` is kept free.
    """
    _check(config, context, gpus, gpu_gib, reserve)
    schedules = {
        "published": Schedule.published(config),
        "all_full": Schedule.all_full(config),
        "quarter": Schedule.quarter(config),
        "dense": DENSE,
    }
    per_token = {name: flops_per_token(config, context - 1, schedule) for name, schedule in schedules.items()}
    prefill = {name: prefill_flops(config, 0, context, schedule) for name, schedule in schedules.items()}
    total = {name: sum(parts.values()) for name, parts in per_token.items()}
    bytes_per_token = memory.cache_bytes_per_token(config)
    return {
        "context": context,
        "parameters": memory.parameters(config),
        "active_parameters": memory.active_parameters(config),
        "layers": config.num_hidden_layers,
        "full_layers": len(config.full_layers),
        "full_layer_indices": list(config.full_layers),
        "kv_bytes_per_token": bytes_per_token,
        "kv_bytes_total": bytes_per_token * context,
        "cache": {dtype: _cache(config, context, dtype) for dtype in memory.FORMATS},
        "weight_bytes": {dtype: memory.weight_bytes(config, dtype) for dtype in memory.FORMATS},
        "index_flops_per_full_layer": index_flops(config, context),
        "flops_per_token": total["published"],
        "flops_per_token_all_full": total["all_full"],
        "flops_per_token_dense": total["dense"],
        "flops_ratio": round(total["all_full"] / total["published"], 2),
        "flops_ratio_quarter": round(total["all_full"] / total["quarter"], 2),
        "flops_per_token_by_part": per_token,
        "prefill_flops": sum(prefill["published"].values()),
        "prefill_flops_by_part": prefill,
        "gpus": {"count": gpus, "gib": gpu_gib, "reserve": reserve},
        "fits": [
            {
                "weights": fit.weights,
                "cache": fit.cache,
                "layer_split": fit.layer_split,
                "weights_fit": fit.free_bytes >= 0,
                "bytes_per_token_per_gpu": fit.bytes_per_token,
                "tokens": fit.tokens,
                "largest_context": fit.largest_context,
                "sequences": fit.sequences,
            }
            for fit in memory.fits(config, context, gpus, gpu_gib, reserve)
        ],
    }


def render(result: dict[str, Any]) -> RenderableType:
    """The tables of a plan, for a rich console."""
    heading = Text.assemble(
        (f"{result['parameters']:,}", "bold"),
        " parameters, ",
        (f"{result['active_parameters']:,}", "bold"),
        " active per token, ",
        (f"{result['full_layers']}", "bold"),
        f" of {result['layers']} layers index",
    )
    return Group(heading, _flops_table(result), _bytes_table(result), _fits_table(result))


def plot(config: ModelConfig, path: str | Path) -> None:
    """Draw FLOPs per token against context, with and without sharing, into an image file."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("--plot needs matplotlib; install it with: pip install matplotlib") from None
    longest = config.max_position_embeddings
    contexts = [max(1, longest * step // 64) for step in range(2, 65)]
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    full, layers = len(config.full_layers), config.num_hidden_layers
    lines = (
        (Schedule.all_full(config), f"an indexer in each of {layers} layers", "#c8553d"),
        (Schedule.published(config), f"shared: {full} of {layers} layers index", "#2a6f97"),
    )
    largest = sum(flops_per_token(config, longest - 1, Schedule.all_full(config)).values())
    unit, divisor = _scale(largest * 2)  # 0.8 T reads better than 800 G
    for schedule, label, colour in lines:
        totals = [sum(flops_per_token(config, context - 1, schedule).values()) for context in contexts]
        axes.plot(contexts, [total / divisor for total in totals], color=colour, linewidth=2)
        end = (contexts[-1], totals[-1] / divisor)
        axes.annotate(label, end, (-8, 8), textcoords="offset points", ha="right", color=colour)
    ticks = [longest * eighth // 8 for eighth in range(9)]
    axes.set_xticks(ticks, [_tokens(tick) for tick in ticks])
    axes.set(xlabel="context (tokens)", ylabel=f"{unit}FLOPs per token", xlim=(0, longest), ylim=(0, None))
    axes.margins(y=0.15)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    try:
        figure.savefig(path, dpi=160)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write the plot {path}: {error}") from None


def _check(config: ModelConfig, context: int, gpus: int, gpu_gib: float, reserve: float) -> None:
    longest = config.max_position_embeddings
    if not 1 <= context <= longest:
        raise UserError(f"--context must be between 1 and the model's {longest:,} positions, not {context:,}")
    if gpus < 1 or gpu_gib <= 0 or not 0 <= reserve < 1:
        raise UserError("a plan needs at least 1 GPU, more than 0 GiB, and a reserve from 0 to below 1")


def _cache(config: ModelConfig, context: int, dtype: memory.Format) -> dict[str, int]:
    per_token = memory.cache_bytes_per_token(config, dtype)
    return {
        "latent_bytes_per_layer": memory.latent_row_bytes(config, dtype),
        "index_bytes_per_full_layer": memory.index_row_bytes(config, dtype),
        "bytes_per_token": per_token,
        "bytes_total": per_token * context,
    }


def _flops_table(result: dict[str, Any]) -> Table:
    table = Table(title=f"FLOPs at a context of {result['context']:,} tokens", title_justify="left")
    table.add_column("")
    for column in ("last token", "every layer indexes", "dense attention", "whole prefill"):
        table.add_column(column, justify="right")
    by_part = result["flops_per_token_by_part"]
    prefill = result["prefill_flops_by_part"]["published"]
    columns = (by_part["published"], by_part["all_full"], by_part["dense"], prefill)
    for part in PARTS:
        table.add_row(PART_TITLES[part], *(_number(column[part]) for column in columns))
    table.add_section()
    table.add_row("total", *(_number(sum(column.values())) for column in columns), style="bold")
    times = [sum(column.values()) / result["flops_per_token"] for column in columns[:3]]
    table.add_row("relative", *(f"{ratio:.2f}" for ratio in times), "")
    return table


def _bytes_table(result: dict[str, Any]) -> Table:
    table = Table(title="Memory", title_justify="left")
    table.add_column("")
    context = f"cache of {_tokens(result['context'])}"
    for column in ("weights", "latent row", "index row", "cache per token", context):
        table.add_column(column, justify="right")
    for dtype, cache in result["cache"].items():
        rows = ("latent_bytes_per_layer", "index_bytes_per_full_layer", "bytes_per_token")
        counts = [f"{cache[name]:,} B" for name in rows]
        table.add_row(dtype, _bytes(result["weight_bytes"][dtype]), *counts, _bytes(cache["bytes_total"]))
    return table


def _fits_table(result: dict[str, Any]) -> Table:
    gpus = result["gpus"]
    title = f"On {gpus['count']} GPUs of {gpus['gib']:g} GiB, {gpus['reserve']:.0%} kept free"
    table = Table(title=title, title_justify="left")
    for column in ("weights", "cache", "cache rows"):
        table.add_column(column)
    for column in ("largest context", "tokens in all", f"sequences of {_tokens(result['context'])}"):
        table.add_column(column, justify="right")
    for fit in result["fits"]:
        where = "split by layer" if fit["layer_split"] else "on every GPU"
        counts = ("largest_context", "tokens", "sequences")
        cells = [f"{fit[name]:,}" for name in counts] if fit["weights_fit"] else ["weights too large", "", ""]
        table.add_row(fit["weights"], fit["cache"], where, *cells)
    return table


def _scale(value: float) -> tuple[str, float]:
    """The largest unit prefix that keeps `value` at 1 or more, and what to divide by."""
    prefixes = (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))
    return next(((name, size) for name, size in prefixes if value >= size), ("", 1.0))


def _number(value: float) -> str:
    unit, divisor = _scale(value)
    return f"{value / divisor:.2f} {unit}".rstrip()


def _bytes(count: int) -> str:
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count} B"


def _tokens(count: int) -> str:
    """A token count in binary thousands where it is a whole number of them: 128K, 1M."""
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if count and count % size == 0:
            return f"{count // size}{unit}"
    return f"{count:,}"
