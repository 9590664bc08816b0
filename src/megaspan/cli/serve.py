"""`megaspan serve`: an HTTP server on a model."""

from pathlib import Path
from typing import Annotated, Any

import typer

from megaspan.cli.shell import MODEL, DType, Threads


def serve(
    model: Annotated[Path, typer.Argument(help="Folder of a Hugging Face glm_moe_dsa checkpoint.")] = MODEL,
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at; 0 for any free one.")] = 8000,
    name: Annotated[str | None, typer.Option(help="What clients call the model; the folder's name.")] = None,
    api_key: Annotated[list[str] | None, typer.Option(help="Key that clients must send; may repeat.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[DType, typer.Option(help="What to compute in.")] = DType.auto,
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="Same bits whatever shares the batch; slower.")
    ] = False,
    max_context: Annotated[int | None, typer.Option(help="Most tokens of a request.")] = None,
    max_running: Annotated[int, typer.Option(help="Requests that run at once.")] = 64,
    max_waiting: Annotated[int, typer.Option(help="Requests that may queue.")] = 256,
    cache_gib: Annotated[
        float | None, typer.Option(help="GiB for cached rows on the device; 2 on a CPU, the rest of a GPU.")
    ] = None,
    latent_rows: Annotated[str, typer.Option(help="auto, float32, bfloat16 or fp8.")] = "auto",
    index_rows: Annotated[str, typer.Option(help="auto, float32, bfloat16 or fp8.")] = "auto",
    host_gib: Annotated[float, typer.Option(help="GiB of the tier in host memory; 0: none.")] = 0.0,
    disk_folder: Annotated[Path | None, typer.Option(help="Folder of the tier on disk.")] = None,
    disk_gib: Annotated[float, typer.Option(help="GiB of the tier on disk.")] = 8.0,
    write_policy: Annotated[str, typer.Option(help="write_through or write_back.")] = "write_through",
    step_seconds: Annotated[float, typer.Option(help="Budget of a step that reads prompts.")] = 0.25,
    drain_seconds: Annotated[float, typer.Option(help="For running requests after SIGTERM.")] = 30.0,
    cors: Annotated[list[str] | None, typer.Option(help="Origin whose pages may call; may repeat.")] = None,
    threads: Threads = None,
) -> None:
    """Serve a model: OpenAI and Anthropic clients, /generate, /metrics, and a playground at /."""
    from megaspan.engine.config import EngineConfig
    from megaspan.server.options import ServerOptions

    options = ServerOptions(
        model_name=name or model.resolve().name,
        host=host,
        port=port,
        api_keys=tuple(api_key or ()),
        drain_seconds=drain_seconds,
        cors=tuple(cors or ()),
    )
    config = EngineConfig(
        max_running=max_running,
        max_waiting=max_waiting,
        max_context=max_context,
        cache_gib=cache_gib,
        latent_rows=latent_rows,  # pyright: ignore[reportArgumentType]
        index_rows=index_rows,  # pyright: ignore[reportArgumentType]
        host_gib=host_gib,
        disk_folder=disk_folder,
        disk_gib=disk_gib,
        write_policy=write_policy,  # pyright: ignore[reportArgumentType]
        step_seconds=step_seconds,
    )
    _run(model, dtype.value, device, batch_invariant, threads, config, options)


def _run(
    model: Path,
    dtype: str,
    device: str,
    batch_invariant: bool,
    threads: int | None,
    config: Any,
    options: Any,
) -> None:
    import torch

    from megaspan.engine.async_engine import AsyncEngine
    from megaspan.engine.engine import Engine
    from megaspan.model.folder import LanguageModel, load_folder
    from megaspan.server.serve import bind, run

    bind(options.host, options.port).close()  # a taken port is told before the model is read
    if threads is not None:
        torch.set_num_threads(threads)
    loaded = load_folder(model, dtype, device, LanguageModel, batch_invariant)
    engine = Engine(loaded, config)
    engine.warm_up()
    run(AsyncEngine(engine), options)
