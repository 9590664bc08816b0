"""`megaspan bench serving`: throughput and latencies of a server under agents' traffic."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megaspan.bench.traffic import TIMEOUT_SECONDS, Clients, Traffic, Turn
from megaspan.errors import UserError

PERCENTILES = (50, 90, 99)
LATENCIES = {
    "first_token": "first token",
    "first_turn_first_token": "first token, first turns",
    "later_turn_first_token": "first token, later turns",
    "inter_token": "between tokens",
    "request": "whole request",
}
START_SECONDS = 60.0


def run(
    base_url: str,
    traffic: Traffic,
    model: str | None = None,
    api_key: str | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Play the traffic against a server; returns its figures, with each turn's under "turns".

    base_url: of an OpenAI-compatible server, with or without its `/v1`. model: its first one unless given.
    Raises UserError when the server does not answer or answers the first request with an error.
    """
    try:
        import httpx
    except ImportError:
        raise UserError("bench serving needs httpx; install it with: pip install httpx") from None

    async def play() -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=traffic.concurrency)
        url = base_url.rstrip("/").removesuffix("/v1") + "/v1/"
        async with httpx.AsyncClient(
            base_url=url, headers=headers, timeout=TIMEOUT_SECONDS, limits=limits
        ) as client:
            name = model or await _first_model(client)
            clients = Clients(client, name, traffic)
            seconds = await clients.run(lambda done: say(f"{done} of {traffic.sessions} sessions"))
        return {
            "server": base_url,
            "model": name,
            "traffic": asdict(traffic),
            **figures(clients.turns, seconds),
        }

    try:
        return asyncio.run(play())
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UserError(f"no server answers at {base_url}: {error}; start one or name another") from error


async def _first_model(client: Any) -> str:
    answer = await client.get("models")
    if answer.status_code != 200:
        raise UserError(f"the server answers {answer.status_code} to /v1/models; give its key or its address")
    try:
        return answer.json()["data"][0]["id"]
    except (ValueError, LookupError, TypeError):
        raise UserError("the server lists no model at /v1/models; name one") from None


def figures(turns: Sequence[Turn], seconds: float) -> dict[str, Any]:
    """Sums, rates and percentiles of what the clients saw in so many seconds. Latencies are in seconds."""
    answered = [turn for turn in turns if turn.outcome != "error"]
    told = [turn for turn in answered if turn.cached_tokens is not None]
    prompt = sum(turn.prompt_tokens for turn in answered)
    output = sum(turn.completion_tokens for turn in answered)
    told_prompt = sum(turn.prompt_tokens for turn in told)
    cached = sum(turn.cached_tokens or 0 for turn in told)
    outcomes = {
        name: sum(turn.outcome == name for turn in turns) for name in ("finished", "aborted", "error")
    }
    return {
        "seconds": seconds,
        "requests": len(turns),
        **outcomes,
        "errors": sorted({turn.error for turn in turns if turn.error}),
        "prompt_tokens": prompt,
        "cached_tokens": cached if told else None,
        "output_tokens": output,
        "hit_rate": cached / told_prompt if told_prompt else None,
        "requests_per_second": len(answered) / seconds,
        "prompt_tokens_per_second": prompt / seconds,
        "output_tokens_per_second": output / seconds,
        "latency": {name: _percentiles(values) for name, values in _latencies(answered).items()},
        "turns": [_turn_figures(turn) for turn in turns],
    }


def _latencies(turns: Sequence[Turn]) -> dict[str, list[float]]:
    started = [turn for turn in turns if turn.token_times]
    return {
        "first_token": [turn.token_times[0] - turn.started for turn in started],
        "first_turn_first_token": [t.token_times[0] - t.started for t in started if t.number == 0],
        "later_turn_first_token": [t.token_times[0] - t.started for t in started if t.number > 0],
        "inter_token": [gap for turn in turns for gap in turn.gaps],
        "request": [turn.ended - turn.started for turn in turns if turn.outcome == "finished"],
    }


def _percentiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {
        f"p{p}": float(value)
        for p, value in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True)
    }


def _turn_figures(turn: Turn) -> dict[str, Any]:
    return {
        "session": turn.session,
        "turn": turn.number,
        "outcome": turn.outcome,
        "prompt_tokens": turn.prompt_tokens,
        "cached_tokens": turn.cached_tokens,
        "output_tokens": turn.completion_tokens,
        "first_token_seconds": turn.first_token_seconds,
        "seconds": turn.ended - turn.started,
    }


def render(result: dict[str, Any]) -> RenderableType:
    """The tables of a result, for a rich console."""
    hit_rate = result["hit_rate"]
    heading = Text.assemble(
        (f"{result['output_tokens_per_second']:,.1f}", "bold"),
        " output tok/s, ",
        (f"{result['prompt_tokens_per_second']:,.0f}", "bold"),
        " prompt tok/s, ",
        ("not reported" if hit_rate is None else f"{hit_rate:.1%}", "bold"),
        " of the prompts' tokens from the cache",
    )
    counts = (
        f"{result['requests']} requests in {result['seconds']:.1f} s: {result['finished']} finished, "
        f"{result['aborted']} aborted by the client, {result['error']} failed"
    )
    table = Table("latency (ms)", *(f"p{p}" for p in PERCENTILES))
    for column in table.columns[1:]:
        column.justify = "right"
    for name, label in LATENCIES.items():
        values = result["latency"][name]
        if values:
            table.add_row(label, *(f"{1000 * values[f'p{p}']:,.1f}" for p in PERCENTILES))
    errors = [Text(error, style="red") for error in result["errors"][:5]]
    return Group(heading, Text(counts), *errors, table)


def plot(result: dict[str, Any], path: str | Path) -> None:
    """Draw time to first token against prompt length, for first and later turns, into an image file."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("--plot needs matplotlib; install it with: pip install matplotlib") from None
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for later, label, colour in ((False, "first turns", "#c8553d"), (True, "later turns", "#2a6f97")):
        turns = [
            turn for turn in result["turns"] if (turn["turn"] > 0) == later and turn["first_token_seconds"]
        ]
        lengths = [turn["prompt_tokens"] for turn in turns]
        waits = [1000 * turn["first_token_seconds"] for turn in turns]
        axes.scatter(lengths, waits, s=18, color=colour, alpha=0.7, label=label)
    axes.set(xlabel="prompt (tokens)", ylabel="time to first token (ms)", yscale="log")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.legend(frameon=False)
    try:
        figure.savefig(path, dpi=160)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write the plot {path}: {error}") from None


@contextmanager
def served(engine: Any, name: str) -> Iterator[str]:
    """The base URL of a server on the AsyncEngine, on a free port of this machine, in a thread."""
    from megaspan.server.app import create_app
    from megaspan.server.options import ServerOptions
    from megaspan.server.serve import bind, make_server

    listener = bind("127.0.0.1", 0)
    server = make_server(create_app(engine, ServerOptions(model_name=name)))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    with listener:
        thread.start()
        deadline = time.monotonic() + START_SECONDS
        while not server.started and thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        if not server.started:
            raise UserError(f"the server on {name} did not start")
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(START_SECONDS)
