"""Streams: signs of life in silence, bounded work for slow readers, errors that nobody foresaw."""

import asyncio
import json

from megaspan.server.event_stream import COMMENT, data_event, named_event
from tests.server.asking import QUESTION, app_of, ask, events
from tests.server.fake_engine import FakeEngine


def test_events_are_framed_so_that_no_text_breaks_them():
    content = {"type": "x", "text": "a\n\nb\r\ndata: c 🙂"}
    event = named_event(content)
    assert event.startswith(b"event: x\ndata: {")
    assert event.count(b"\n") == 3
    assert json.loads(data_event(content).removeprefix(b"data: ")) == content


def test_silence_is_filled_with_pings():
    """A proxy would cut a connection that says nothing while a long prompt is being read."""
    engine = FakeEngine("</think>x", delay=0.1)
    app = app_of(engine, ping_seconds=0.02)
    stream = ask(app, "/v1/chat/completions", {"messages": QUESTION, "stream": True})
    assert stream.text.count(COMMENT.decode()) >= 3
    assert events(stream)[-1] == "[DONE]"
    body = {"messages": QUESTION, "stream": True, "max_tokens": 50}
    kinds = [event["type"] for event in events(ask(app, "/v1/messages", body))]
    assert kinds.count("ping") >= 3
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"


def test_tokens_are_drawn_no_faster_than_they_are_sent():
    """Nothing piles up between the engine's stream and a client that reads slowly."""
    engine = FakeEngine("</think>" + "a b " * 500, max_context=1 << 20)
    app = app_of(engine)
    content = json.dumps({"messages": QUESTION, "stream": True}).encode()
    sent = []

    async def read_a_little():
        unread = [{"type": "http.request", "body": content, "more_body": False}]
        full = asyncio.Event()

        async def receive():
            if unread:
                return unread.pop()
            await full.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)
            if len(sent) == 10:
                asyncio.get_running_loop().call_later(0.05, full.set)
                await asyncio.Event().wait()

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}
        await app({**scope, "query_string": b"", "http_version": "1.1", "raw_path": b""}, receive, send)

    asyncio.run(read_a_little())
    assert len(sent) == 10
    assert engine.generated <= 10
    assert len(engine.aborted) == 1


def test_an_unforeseen_error_ends_the_stream_in_its_own_shape(monkeypatch):
    def fail(self, output):
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr("megaspan.server.reply.ChatReply.push", fail)
    engine = FakeEngine()
    last = events(ask(engine, "/v1/chat/completions", {"messages": QUESTION, "stream": True}))[-1]
    assert last["error"]["code"] == "internal_error"
    assert "secret" not in last["error"]["message"]
    assert not engine.running
    whole = ask(engine, "/v1/chat/completions", {"messages": QUESTION})
    assert (whole.status_code, whole.json()["error"]["code"]) == (500, "internal_error")
    assert not engine.running
