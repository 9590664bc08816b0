"""Streams of an engine on a thread of its own."""

import asyncio
import logging
import threading
from dataclasses import replace

import pytest

from megaspan.engine.async_engine import AsyncEngine
from megaspan.engine.sampling import SamplingParams
from megaspan.errors import UserError
from tests.engine.engines import BOUND, GREEDY, assert_idle, assert_solo, make_engine, prompt

LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)


@pytest.fixture
def serve(model):
    """Run a coroutine function with a started engine, within the bound; the engine is stopped after."""

    def serve(scenario, **options):
        engine = AsyncEngine(make_engine(model, pages=256, **options))

        async def run():
            await engine.start()
            try:
                return await asyncio.wait_for(scenario(engine), BOUND)
            finally:
                await asyncio.wait_for(engine.stop(), BOUND)

        result = asyncio.run(run())
        assert not engine.is_alive
        return result

    return serve


async def collect(stream):
    return [output async for output in stream]


async def until(holds):
    while not holds():
        await asyncio.sleep(0.002)


def test_a_stream_gives_a_token_at_a_time_and_ends(model, serve):
    async def scenario(engine):
        return await collect(engine.submit(prompt(30), GREEDY, "one"))

    outputs = serve(scenario)
    assert [len(output.token_ids) for output in outputs] == [1] * 6
    assert_solo(model, prompt(30), GREEDY, outputs)


def test_many_streams_at_once_each_get_their_own(model, serve):
    prompts = [prompt(5 + number, number) for number in range(24)]

    async def scenario(engine):
        streams = [engine.submit(ids, GREEDY) for ids in prompts]
        assert len({stream.request_id for stream in streams}) == 24
        results = await asyncio.gather(*map(collect, streams))
        assert engine.stats().requests_total["length"] == 24
        assert_idle(engine.engine)
        return results

    for ids, outputs in zip(prompts, serve(scenario), strict=True):
        assert_solo(model, ids, GREEDY, outputs)


@pytest.mark.parametrize("started", [False, True])
def test_closing_a_stream_aborts_its_request(serve, started):
    """P63: a client that goes away leaves nothing behind, whether it had read anything or not."""

    async def scenario(engine):
        stream = engine.submit(prompt(30), LONG)
        if started:
            async for _ in stream:
                break
        await stream.aclose()
        await stream.aclose()
        await until(lambda: not engine.engine.has_work)
        assert engine.stats().requests_total["abort"] == 1
        assert_idle(engine.engine)

    serve(scenario)


def test_cancelling_the_reader_aborts_its_request(serve):
    async def scenario(engine):
        stream = engine.submit(prompt(30), LONG)
        reader = asyncio.create_task(collect(stream))
        await until(lambda: engine.stats().generation_tokens_total > 3)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        await until(lambda: not engine.engine.has_work)
        assert engine.stats().requests_total["abort"] == 1

    serve(scenario)


def test_closing_a_finished_stream_aborts_nobody(serve):
    async def scenario(engine):
        stream = engine.submit(prompt(30), GREEDY, "one")
        await collect(stream)
        other = engine.submit(prompt(30), LONG, "one")  # takes the id over
        await stream.aclose()
        reader = asyncio.create_task(collect(other))
        await until(lambda: engine.stats().generation_tokens_total > 10)
        assert engine.stats().requests_total["abort"] == 0
        assert engine.abort("one")
        assert (await reader)[-1].finish_reason == "abort"

    serve(scenario)


def test_abort_by_id_ends_the_stream(serve):
    async def scenario(engine):
        reader = asyncio.create_task(collect(engine.submit(prompt(30), LONG, "one")))
        await until(lambda: engine.stats().generation_tokens_total > 3)
        assert engine.abort("one")
        assert not engine.abort("nobody")
        outputs = await reader
        assert outputs[-1].finish_reason == "abort"
        assert outputs[-1].completion_tokens == sum(len(output.token_ids) for output in outputs)

    serve(scenario)


def test_what_cannot_be_served_is_refused_at_once(serve):
    async def scenario(engine):
        with pytest.raises(UserError):
            engine.submit([], GREEDY)
        with pytest.raises(UserError):
            engine.submit(prompt(5000), GREEDY)
        stream = engine.submit(prompt(30), LONG, "one")
        with pytest.raises(UserError, match="one"):
            engine.submit(prompt(30), GREEDY, "one")
        await stream.aclose()
        outputs = await collect(engine.submit(prompt(30), GREEDY))
        assert outputs[-1].finish_reason == "length"

    serve(scenario)


@pytest.mark.parametrize(("seconds", "reason"), [(BOUND, "length"), (0.0, "abort")])
def test_stop_lets_requests_finish_for_so_long(serve, seconds, reason):
    async def scenario(engine):
        params = replace(LONG, max_tokens=40 if seconds else 400)
        reader = asyncio.create_task(collect(engine.submit(prompt(30), params)))
        await until(lambda: engine.stats().generation_tokens_total > 1)
        await engine.stop(seconds)
        assert (await reader)[-1].finish_reason == reason
        assert not engine.is_alive
        with pytest.raises(UserError, match="not running"):
            engine.submit(prompt(30), GREEDY)
        with pytest.raises(UserError, match="not running"):
            await engine.flush_cache()

    serve(scenario)


def test_while_it_stops_nobody_is_taken_in(serve):
    async def scenario(engine):
        stream = engine.submit(prompt(30), LONG)
        stopping = asyncio.create_task(engine.stop())
        while not engine._stopping:
            await asyncio.sleep(0)
        with pytest.raises(UserError, match="not running"):
            engine.submit(prompt(30), GREEDY)
        await stopping
        assert (await collect(stream))[-1].finish_reason == "abort"

    serve(scenario)


def test_flush_frees_what_nobody_uses(serve):
    """Also while others run, and though one who asked for it has gone."""

    async def scenario(engine):
        await collect(engine.submit(prompt(30), GREEDY))
        assert await engine.flush_cache() == 8
        assert await engine.flush_cache() == 0
        stream = engine.submit(prompt(30), LONG)
        gone = asyncio.create_task(engine.flush_cache())
        await asyncio.sleep(0)
        gone.cancel()
        assert await engine.flush_cache() == 0
        await stream.aclose()

    serve(scenario)


def test_an_exception_on_the_engines_thread_ends_every_stream(serve, caplog):
    """P47: and whoever waits for anything else; nobody is taken in after."""

    async def scenario(engine):
        readers = [asyncio.create_task(collect(engine.submit(prompt(9, seed), LONG))) for seed in range(3)]
        await until(lambda: engine.stats().generation_tokens_total > 3)

        def fail():
            raise RuntimeError("a bug")

        engine.engine.step = fail
        for outputs in await asyncio.gather(*readers):
            assert outputs[-1].finish_reason == "error"
            assert "log" in outputs[-1].error
        assert not engine.is_alive
        with pytest.raises(UserError, match="not running"):
            engine.submit(prompt(9), GREEDY)

    with caplog.at_level(logging.ERROR):
        serve(scenario)
    assert "a bug" in caplog.text


def test_a_flush_that_fails_does_not_wait_forever(serve):
    async def scenario(engine):
        def fail():
            raise RuntimeError("a bug")

        engine.engine.flush_cache = fail
        with pytest.raises(UserError, match="stopped"):
            await engine.flush_cache()

    serve(scenario)


def test_stats_may_be_read_at_any_time(serve):
    """Pages add up in every snapshot that is taken between steps, and no reader disturbs the engine."""

    async def scenario(engine):
        stop = threading.Event()

        def read():
            while not stop.wait(1e-4):
                engine.stats()

        reader = threading.Thread(target=read)
        reader.start()
        await collect(engine.submit(prompt(30), replace(LONG, max_tokens=60)))
        stop.set()
        reader.join()
        stats = engine.stats()
        assert stats.pages_free + stats.pages_cached + stats.pages_locked == stats.pages_total
        assert stats.generation_tokens_total == 60

    serve(scenario)
