"""`megaspan bench`: measure megaspan and its peers."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from megaspan.cli.shell import MODEL, AsJson, ModelFolder, Threads, print_json, share_processors
from megaspan.errors import UserError

app = typer.Typer(help="Measure megaspan and its peers.")


@app.command("cpu")
def bench_cpu(
    lengths: Annotated[str, typer.Option(help="Context lengths, by commas.")] = "1024,8192,32768,131072",
    peers: Annotated[str, typer.Option(help="Peers in the same run, by commas.")] = "transformers,llama.cpp",
    threads: Annotated[int, typer.Option(min=1, help="Threads of each system.")] = 2,
    record: Annotated[bool, typer.Option("--record", help="Put the figures into docs/results.")] = False,
    as_json: AsJson = False,
) -> None:
    """Read and decode on the processor, beside transformers and llama.cpp, in one run."""
    from rich.console import Console

    from megaspan.bench import cpu

    try:
        wanted = [int(length) for length in lengths.split(",")]
    except ValueError:
        raise UserError(f"--lengths {lengths} is not a list of whole numbers, such as 1024,8192") from None
    names = [peer for peer in peers.split(",") if peer]
    result = cpu.run(wanted, names, threads, say=lambda said: print(said, file=sys.stderr))
    if record:
        cpu.record(result)
    if as_json:
        print_json(result)
    else:
        Console().print(cpu.render(result))


@app.command("model")
def bench_model(
    corpus: Annotated[Path, typer.Option(help="Folder that `megaspan corpus` wrote.")],
    model: ModelFolder = MODEL,
    windows: Annotated[int, typer.Option(min=1, help="Held-out windows for bits per byte.")] = 100,
    completions: Annotated[int, typer.Option(min=1, help="Held-out functions to complete.")] = 100,
    record: Annotated[bool, typer.Option("--record", help="Put the figures into docs/results.")] = False,
    as_json: AsJson = False,
) -> None:
    """Held-out bits per byte, completions that parse, and speed at 32K of the shipped model."""
    from megaspan.bench import shipped

    figures = shipped.run(
        str(model), str(corpus), windows, completions, lambda said: print(said, file=sys.stderr)
    )
    if record:
        options = f"--windows {windows} --completions {completions} --record"
        shipped.record(figures, f"megaspan bench model --corpus {corpus} {options}")
    if as_json:
        print_json(figures)


@app.command("training")
def bench_training(
    recipe: Annotated[Path, typer.Option(help="A TOML recipe.")] = Path("recipes/span-code.toml"),
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    steps: Annotated[int, typer.Option(min=1, help="Steps of each stage to time.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Tokens per second and memory of each stage of a training recipe, from fresh weights."""
    from rich.console import Console

    from megaspan.bench import training

    stages = training.measure(recipe, device, steps, say=lambda said: print(said, file=sys.stderr))
    if as_json:
        print_json({"stages": stages})
    else:
        Console().print(training.render(stages))


@app.command("results")
def bench_results() -> None:
    """Write the pages of docs/results anew from their figures."""
    from megaspan.bench.results import write_pages

    for page in write_pages():
        print(page)


@app.command("serving")
def bench_serving(
    url: Annotated[str | None, typer.Option(help="An OpenAI-compatible server; else one is started.")] = None,
    model: Annotated[str, typer.Option(help="Folder to serve, or the model's name at --url.")] = str(MODEL),
    api_key: Annotated[str | None, typer.Option(help="Key for --url.")] = None,
    sessions: Annotated[int, typer.Option(help="Conversations in all.")] = 16,
    concurrency: Annotated[int, typer.Option(help="Conversations at once.")] = 4,
    turns: Annotated[int, typer.Option(help="Requests of a conversation.")] = 4,
    first_prompt: Annotated[str, typer.Option(help="Tokens of the first prompt, as 500-4000.")] = "500-4000",
    added: Annotated[str, typer.Option(help="Tokens added at each later turn.")] = "50-500",
    output: Annotated[str, typer.Option(help="Tokens of a reply.")] = "16-128",
    shared_share: Annotated[
        float,
        typer.Option(
            help="Share of the first prompt that all have; with --turns and --added it decides the hit rate."
        ),
    ] = 0.5,
    think_seconds: Annotated[float, typer.Option(help="Mean pause before a turn.")] = 0.0,
    abort_share: Annotated[float, typer.Option(help="Replies that the client leaves half-way.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the traffic.")] = 0,
    host_gib: Annotated[float, typer.Option(help="Host tier of the server that is started.")] = 0.0,
    cache_gib: Annotated[float, typer.Option(help="Device cache of the server that is started.")] = 2.0,
    threads: Threads = None,
    plot: Annotated[Path | None, typer.Option(help="Draw first-token times here.")] = None,
    as_json: AsJson = False,
) -> None:
    """Throughput and latencies under agents' multi-turn traffic, against any OpenAI-compatible server."""
    share_processors()
    from rich.console import Console

    from megaspan.bench import serving
    from megaspan.bench.traffic import Lengths, Traffic

    traffic = Traffic(
        sessions=sessions,
        concurrency=concurrency,
        turns=turns,
        first_prompt=Lengths.parse(first_prompt),
        added=Lengths.parse(added),
        output=Lengths.parse(output),
        shared_share=shared_share,
        think_seconds=think_seconds,
        abort_share=abort_share,
        seed=seed,
    )
    console = Console(stderr=True)

    def say(said: str) -> None:
        console.print(said)

    if url is not None:
        name = None if model == str(MODEL) else model
        result = serving.run(url, traffic, name, api_key, say)
    else:
        import torch

        from megaspan.engine.async_engine import AsyncEngine
        from megaspan.engine.config import EngineConfig
        from megaspan.engine.engine import Engine
        from megaspan.model.folder import LanguageModel, load_folder

        if threads is not None:
            torch.set_num_threads(threads)
        engine = Engine(
            load_folder(model, "auto", "cpu", LanguageModel),
            EngineConfig(host_gib=host_gib, cache_gib=cache_gib),
        )
        engine.warm_up()
        with serving.served(AsyncEngine(engine), Path(model).name) as started:
            result = serving.run(started, traffic, say=say)
    if plot is not None:
        serving.plot(result, plot)
    if as_json:
        print_json(result)
    else:
        Console().print(serving.render(result))


@app.command("engine")
def bench_engine(
    model: ModelFolder = MODEL,
    parts: Annotated[
        str, typer.Option(help="steps, interference, second-turn, streams, invariance, bytes; by commas.")
    ] = "steps,interference,second-turn,streams,invariance,bytes",
    threads: Threads = None,
    record: Annotated[bool, typer.Option("--record", help="Put the figures into docs/results.")] = False,
    as_json: AsJson = False,
) -> None:
    """The engine's figures: its own work per step, gaps, second turns, concurrent streams."""
    share_processors()
    import torch
    from rich.console import Console

    from megaspan.bench import engine

    if threads is not None:
        torch.set_num_threads(threads)
    rows = engine.run(str(model), parts.split(","), lambda said: print(said, file=sys.stderr), threads)
    if record:
        engine.record(rows)
    if as_json:
        print_json({"rows": [asdict(row) for row in rows]})
    else:
        Console().print(engine.render(rows))


@app.command("kernels")
def bench_kernels(
    only: Annotated[
        str | None, typer.Option(help="Cases with this in their name, such as index_topk; all unless given.")
    ] = None,
    scale: Annotated[
        str, typer.Option(help="real: GLM-5.2's shapes; tiny: shapes for a test, on any machine.")
    ] = "real",
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    record: Annotated[bool, typer.Option("--record", help="Put the figures into docs/results.")] = False,
    as_json: AsJson = False,
) -> None:
    """Time every hot operation beside its floor and its peers, once its result is the reference's."""
    from rich.console import Console

    from megaspan.bench import kernels

    run = kernels.run(only, scale, device, lambda said: print(said, file=sys.stderr))
    if as_json:
        print_json({"rows": [asdict(row) for row in kernels.figures(run)]})
    else:
        Console(width=None if sys.stdout.isatty() else 200).print(kernels.render(run))
    kernels.refuse(run)
    if record:
        kernels.record(run)


@app.command("slice")
def bench_slice(
    config: Annotated[
        str, typer.Option(help="A preset or a config.json whose widths are taken.")
    ] = "glm-5.2",
    layers: Annotated[int, typer.Option(help="Layers; one of four selects.")] = 4,
    context: Annotated[int, typer.Option(help="Tokens that are read; a multiple of --chunk.")] = 1048576,
    experts: Annotated[int, typer.Option(help="Experts of the last layer; 0: all MLPs are dense.")] = 0,
    rows: Annotated[str, typer.Option(help="Cached rows: fp8, bfloat16 or both.")] = "both",
    chunk: Annotated[int, typer.Option(help="Tokens that are read at once.")] = 8192,
    parts: Annotated[
        str,
        typer.Option(
            help="Besides the prefill, by commas: decode (batch 1), batches (8, 32), attention (alone, and "
            "with an indexer in every layer), invariant (that mode), transformers."
        ),
    ] = "decode,batches,attention,invariant,transformers",
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    record: Annotated[bool, typer.Option("--record", help="Put the figures into docs/results.")] = False,
    as_json: AsJson = False,
) -> None:
    """Read a long context whole and decode after it, in some layers of real widths with random weights."""
    from rich.console import Console

    from megaspan.bench import slice

    wanted = tuple(part for part in parts.split(",") if part)
    options = slice.Options(config, layers, context, experts, rows, chunk, wanted, device)
    report = slice.run(options, lambda said: print(said, file=sys.stderr))
    if as_json:
        print_json({"rows": [asdict(row) for row in report.rows]})
    else:
        Console(width=None if sys.stdout.isatty() else 200).print(slice.render(report))
    slice.refuse(report)
    if record:
        slice.record(report)
