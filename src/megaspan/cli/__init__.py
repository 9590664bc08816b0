"""The `megaspan` command: parses, calls, prints. A command imports what it needs, so that help is quick."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from megaspan.cli import bench, serve
from megaspan.cli.shell import (
    MODEL,
    AsJson,
    Commands,
    DType,
    ModelFolder,
    Threads,
    print_json,
    share_processors,
)
from megaspan.errors import UserError

app = typer.Typer(cls=Commands, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
app.add_typer(bench.app, name="bench")
app.command()(serve.serve)
main = app


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """The GLM-5.2 million-token system: read a repository, complete its code, plan, train, measure."""
    if context.invoked_subcommand != "bench":  # peers are to find the runtime as it comes
        share_processors()
    if version:
        from importlib.metadata import version as installed

        print(installed("megaspan"))
    elif context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def complete(
    repo: Annotated[Path | None, typer.Option(help="The repository to read.")] = None,
    file: Annotated[str | None, typer.Option(help="The file in it to complete.")] = None,
    line: Annotated[int | None, typer.Option(help="Complete from this line; else at the end.")] = None,
    prompt_file: Annotated[str | None, typer.Option(help="Go on from a plain text; - is stdin.")] = None,
    context: Annotated[int | None, typer.Option(help="Most prompt tokens; 32768, or what fits.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 256,
    model: ModelFolder = MODEL,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the random numbers above temperature 0.")] = 0,
    dtype: Annotated[DType, typer.Option(help="What to compute in.")] = DType.auto,
    index_dtype: Annotated[DType, typer.Option(help="Of the index keys; auto: the model's.")] = DType.auto,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Complete a file with the rest of its repository in the context.

    The completion goes to standard output as it is made, progress and figures to standard error.
    """
    from rich.console import Console

    from megaspan import complete as job

    request = job.Request(
        model=model,
        repo=repo,
        file=file,
        line=line,
        prompt_file=prompt_file,
        context=context,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        dtype=dtype.value,
        index_dtype=index_dtype.value,
        device=device,
        threads=threads,
    )
    console = Console(stderr=True)
    if as_json:
        completion = job.complete(request, console)
        print_json(completion.to_dict())
    else:
        completion = job.complete(request, console, _write)
        if not completion.text.endswith("\n"):
            _write("\n")
        console.print(completion.table())
    if completion.stopped_by == "interrupt":
        raise typer.Exit(130)


def _write(text: str) -> None:
    if sys.stdout is None:
        raise UserError("standard output is closed: the completion has nowhere to go")
    sys.stdout.write(text)
    sys.stdout.flush()


@app.command()
def plan(
    config: Annotated[str, typer.Option(help="glm-5.2, span-code, debug, or a config.json.")] = "glm-5.2",
    context: Annotated[int, typer.Option(help="Tokens of context.")] = 1048576,
    gpus: Annotated[int, typer.Option(help="GPUs of one node.")] = 8,
    gpu_memory: Annotated[float, typer.Option(help="GiB of each GPU.")] = 141.0,
    plot: Annotated[Path | None, typer.Option(help="Draw FLOPs per token against context here.")] = None,
    as_json: AsJson = False,
) -> None:
    """Work out parameters, FLOPs, cache bytes and what fits, for any config and context."""
    from rich.console import Console

    from megaspan.bench import plan as plans
    from megaspan.config import ModelConfig

    chosen = ModelConfig.named(config)
    result = plans.plan(chosen, context, gpus, gpu_memory)
    if plot is not None:
        plans.plot(chosen, plot)
    if as_json:
        print_json(result)
    else:
        Console().print(plans.render(result))


@app.command()
def corpus(
    manifest: Annotated[Path, typer.Option(help="The pinned list of projects.")],
    out: Annotated[Path, typer.Option(help="Folder for the token files.")],
    tokenizer: Annotated[Path, typer.Option(help="Folder of the tokenizer.")] = MODEL,
    wheels: Annotated[Path | None, typer.Option(help="Folder that keeps the fetched projects.")] = None,
    as_json: AsJson = False,
) -> None:
    """Fetch the projects of a manifest, de-duplicate them, and write them as training and held-out tokens."""
    from megaspan.train.corpus import build_corpus

    documents = build_corpus(manifest, tokenizer, out, wheels)
    splits = {
        name: {"tokens": split["tokens"], "bytes": split["bytes"], "documents": len(split["documents"])}
        for name, split in documents.items()
    }
    if as_json:
        print_json(splits)
        return
    for name, split in splits.items():
        print(f"{name}: {split['documents']} projects, {split['bytes']:,} bytes, {split['tokens']:,} tokens")


@app.command()
def tokenizer(
    manifest: Annotated[Path, typer.Option(help="The pinned list of projects.")],
    out: Annotated[Path, typer.Option(help="Folder for the tokenizer.")],
    wheels: Annotated[Path, typer.Option(help="Folder that keeps the fetched projects.")],
    vocab_size: Annotated[int, typer.Option(min=512, help="Entries, special tokens included.")] = 12288,
) -> None:
    """Fit a byte-level BPE on the training projects of a manifest."""
    from megaspan.train.fit_tokenizer import fit_tokenizer

    fit_tokenizer(manifest, out, wheels, vocab_size)


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="A TOML recipe.")],
    out: Annotated[Path, typer.Option(help="Folder for the state, the logs and the model.")],
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the state in the folder.")] = False,
    start_from: Annotated[Path | None, typer.Option(help="Begin with this checkpoint's weights.")] = None,
    stop_after: Annotated[
        float, typer.Option(min=0, help="Seconds after which to save the state and stop.")
    ] = float("inf"),
) -> None:
    """Train a model by a recipe."""
    from megaspan.train.loop import train as run

    run(recipe, out, device, resume, start_from, stop_after)


@app.command("eval")
def evaluate(
    corpus: Annotated[Path, typer.Option(help="Folder that `megaspan corpus` wrote.")],
    model: ModelFolder = MODEL,
    context: Annotated[int, typer.Option(min=2, help="Tokens of each window.")] = 4096,
    windows: Annotated[int | None, typer.Option(min=1, help="How many; all unless given.")] = None,
    dtype: Annotated[DType, typer.Option(help="What to compute in.")] = DType.auto,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    as_json: AsJson = False,
) -> None:
    """Bits per byte on the held-out projects of a corpus."""
    from rich.console import Console
    from rich.progress import Progress

    from megaspan import load
    from megaspan.eval.bits import bits_per_byte

    loaded = load(model, dtype=dtype.value, device=device)
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("held-out windows", total=windows)

        def advance(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        result = bits_per_byte(loaded, str(corpus), context, windows, on_progress=advance)
    if as_json:
        print_json(result)
    else:
        print(f"{result['bits_per_byte']:.3f} bits per byte over {result['tokens']:,.0f} tokens")
