import asyncio
import json
import random
import socket
from io import StringIO

import pytest

pytest.importorskip("fastapi", reason="no server's packages here")
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from megaspan.bench import serving
from megaspan.bench.traffic import Lengths, Traffic, Turn, words
from megaspan.errors import UserError
from tests.server.fake_engine import FakeEngine
from tests.server.live_server import live_server

SMALL = Traffic(
    sessions=4,
    concurrency=2,
    turns=3,
    first_prompt=Lengths(40, 200),
    added=Lengths(5, 20),
    output=Lengths(8, 8),
)


def quiet(line: str) -> None:
    pass


def render(result: dict) -> str:
    out = StringIO()
    Console(file=out, width=120).print(serving.render(result))
    return out.getvalue()


def test_figures_of_a_served_engine(tmp_path) -> None:
    engine = FakeEngine(script="one two three four five six seven eight nine ten", max_context=100_000)
    with serving.served(engine, "fake") as url:
        result = serving.run(url, SMALL, say=quiet)
    assert result["model"] == "fake"
    assert (result["requests"], result["finished"], result["error"]) == (12, 12, 0)
    asked = engine.submitted[2:]  # behind the two that calibrate
    assert result["prompt_tokens"] == sum(len(request.prompt) for request in asked)
    assert result["output_tokens"] == sum(turn["output_tokens"] for turn in result["turns"]) > 0
    assert all(request.params.max_tokens == 8 and request.params.ignore_eos for request in asked)
    assert set(result["latency"]["first_token"]) == {"p50", "p90", "p99"}
    json.dumps(result)
    assert "between tokens" in render(result)
    serving.plot(result, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_every_turn_begins_with_the_one_before() -> None:
    """What makes the traffic an agent's: nearly all of a prompt has been seen."""
    engine = FakeEngine(max_context=100_000)
    with serving.served(engine, "fake") as url:
        serving.run(url, Traffic(sessions=1, turns=3, first_prompt=Lengths(60, 60)), say=quiet)
    first, second, third = (request.prompt for request in engine.submitted[2:])
    assert second[: len(first)] == first
    assert third[: len(second)] == second


def test_sessions_share_the_beginning_and_follow_the_seed() -> None:
    def prompts(seed: int) -> list[list[int]]:
        engine = FakeEngine(max_context=100_000)
        traffic = Traffic(sessions=2, concurrency=1, turns=1, first_prompt=Lengths(200, 200), seed=seed)
        with serving.served(engine, "fake") as url:
            serving.run(url, traffic, say=quiet)
        return [request.prompt for request in engine.submitted[2:]]

    one, two = prompts(3)
    common = next(place for place, (a, b) in enumerate(zip(one, two, strict=False)) if a != b)
    assert 80 <= common < min(len(one), len(two))
    assert abs(len(one) - 200) < 60  # the template adds some
    assert [one, two] == prompts(3) != prompts(4)


def test_clients_leave_when_they_are_told_to() -> None:
    engine = FakeEngine(script="word " * 200, delay=0.004, max_context=100_000)
    traffic = Traffic(
        sessions=3, turns=2, abort_share=1.0, output=Lengths(50, 50), first_prompt=Lengths(20, 20)
    )
    with serving.served(engine, "fake") as url:
        result = serving.run(url, traffic, say=quiet)
        assert result["aborted"] == 6
    assert len(engine.aborted) == 6
    assert not engine.running


def fake_server(status: int = 200, lines: tuple[str, ...] = ()) -> FastAPI:
    """A server that answers its first two requests well, and all others as it is told to."""
    app = FastAPI()
    app.state.asked = 0
    good = (
        '{"choices": [{"delta": {"content": "x"}, "finish_reason": "stop"}]}',
        '{"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 1}}',
        "[DONE]",
    )

    @app.get("/v1/models")
    def models() -> dict:
        return {"data": [{"id": "m"}]}

    @app.post("/v1/chat/completions")
    async def chat(_: Request):
        app.state.asked += 1
        if app.state.asked > 2 and status != 200:
            return JSONResponse({"error": "no"}, status)
        said = good if app.state.asked <= 2 else lines

        async def events():
            for line in said:
                yield f"data: {line}\n\n"
                await asyncio.sleep(0)

        return StreamingResponse(events(), media_type="text/event-stream")

    return app


@pytest.mark.parametrize(
    ("status", "lines", "says"),
    [
        (503, (), "503"),
        (200, ('{"error": {"message": "pages ran out"}}',), "pages ran out"),
        (200, ('{"choices": [{"delta": {"content": "x"}}]}',), "without a finish"),
        (200, ("{",), "Expecting"),
    ],
)
def test_failures_are_counted_and_told(status: int, lines: tuple[str, ...], says: str) -> None:
    with live_server(fake_server(status, lines)) as url:
        result = serving.run(f"{url}/v1", Traffic(sessions=2, turns=3), say=quiet)
    assert (result["requests"], result["error"]) == (2, 2)  # a session ends with its first error
    assert says in result["errors"][0]
    assert says in render(result)


def test_a_server_that_reports_no_cached_tokens_has_no_hit_rate() -> None:
    lines = (
        '{"choices": [{"delta": {"content": "x"}, "finish_reason": "stop"}]}',
        '{"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 1}}',
    )
    with live_server(fake_server(200, lines)) as url:
        result = serving.run(url, Traffic(sessions=1, turns=1), say=quiet)
    assert result["hit_rate"] is None
    assert "not reported" in render(result)


def test_no_server_is_one_clear_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(UserError, match="no server answers"):
            serving.run(f"http://127.0.0.1:{taken.getsockname()[1]}", SMALL, say=quiet)
    with pytest.raises(UserError, match="no server answers"):
        serving.run("nowhere", SMALL, say=quiet)


def test_a_first_request_that_fails_is_one_clear_line() -> None:
    with (
        serving.served(FakeEngine(max_context=20), "fake") as url,
        pytest.raises(UserError, match="first request: 400"),
    ):
        serving.run(url, SMALL, say=quiet)


def test_rates_and_percentiles() -> None:
    turns = [
        Turn(0, 0, 0.0, [1.0, 1.5, 3.0], 3.0, "finished", 100, 0, 3),
        Turn(0, 1, 4.0, [4.5], 5.0, "finished", 200, 150, 1),
        Turn(1, 0, 0.0, [], 0.0, "error", error="no"),
    ]
    result = serving.figures(turns, seconds=10.0)
    assert result["hit_rate"] == 0.5
    assert result["output_tokens_per_second"] == 0.4
    assert result["latency"]["first_turn_first_token"]["p50"] == 1.0
    assert result["latency"]["later_turn_first_token"]["p99"] == 0.5
    assert result["latency"]["inter_token"]["p50"] == 1.0
    assert (result["requests"], result["finished"], result["error"]) == (3, 2, 1)
    assert serving.figures(turns[2:], seconds=1.0)["latency"]["request"] is None


@given(st.integers(1, 100_000), st.integers(0, 100_000), st.integers())
def test_lengths_stay_within_their_bounds(low: int, more: int, seed: int) -> None:
    lengths = Lengths.parse(f"{low}-{low + more}")
    assert low <= lengths.draw(random.Random(seed)) <= low + more
    assert Lengths.parse(str(low)).draw(random.Random(seed)) == low


@pytest.mark.parametrize("text", ["", "x", "5-", "0", "9-3", "1.5", "-4"])
def test_lengths_that_are_none(text: str) -> None:
    if text == "5-":
        assert Lengths.parse(text) == Lengths(5, 5)
        return
    with pytest.raises(UserError, match="length"):
        Lengths.parse(text)


@pytest.mark.parametrize(
    "field",
    [{"sessions": 0}, {"turns": 0}, {"abort_share": 1.5}, {"shared_share": -1}, {"think_seconds": -1}],
)
def test_traffic_that_cannot_be(field: dict) -> None:
    with pytest.raises(UserError, match=next(iter(field))):
        Traffic(**field)


def test_words_go_on_as_they_began() -> None:
    assert words(40, random.Random(1)).startswith(words(30, random.Random(1)))
    assert words(0, random.Random(1)) == ""
