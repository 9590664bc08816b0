"""Prompts too large for the context: refused before they cost anything, alone and many together."""

import pytest

from megaspan.server.json_body import MOST_PARTS, SMALL, SPARE_VALUES, count_values, parse
from megaspan.server.options import BYTES_PER_TOKEN, LEAST_BODY_LIMIT, ServerOptions, body_limit
from tests.server.asking import QUESTION, app_of, ask
from tests.server.fake_engine import FakeEngine, shipped_tokenizer

CONTEXT = 100
TOO_LARGE = "x" * (CONTEXT * shipped_tokenizer().longest_token_bytes + 1)
MESSAGES = [{"role": "user", "content": TOO_LARGE}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": TOO_LARGE}),
        ("/v1/completions", {"prompt": ["x", TOO_LARGE * 2]}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/chat/completions", {"messages": QUESTION, "tools": [{"name": "f", "description": TOO_LARGE}]}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1}),
        ("/v1/messages/count_tokens", {"messages": MESSAGES}),
        ("/generate", {"text": TOO_LARGE}),
        ("/tokenize", {"text": TOO_LARGE}),
    ],
)
def test_a_prompt_that_cannot_fit_is_refused_before_it_is_encoded(monkeypatch, path, body):
    """P27: 56 MB took a minute and gigabytes to be told that it does not fit."""
    encoded = []
    usual = shipped_tokenizer().encode_batch
    monkeypatch.setattr(
        shipped_tokenizer(), "encode_batch", lambda texts: encoded.extend(texts) or usual(texts)
    )
    response = ask(FakeEngine(max_context=CONTEXT), path, body)
    assert response.status_code == 400
    assert "maximum context length is" in response.json()["error"]["message"]
    assert response.json()["error"].get("code", "context_length_exceeded") == "context_length_exceeded"
    assert len("".join(encoded)) < 200


def test_prompts_of_one_request_share_as_many_contexts_as_it_may_have_choices():
    app = app_of(FakeEngine("x", max_context=CONTEXT), max_choices=3)
    long, longer = "a b " * 20, "a b " * 24
    counts = [len(shipped_tokenizer().encode(text)) for text in (long, longer)]
    assert [count < CONTEXT for count in counts] == [True, True]
    several = 3 * CONTEXT // counts[0]
    assert ask(app, "/v1/completions", {"prompt": [long] * several}).status_code == 200
    for body in (
        {"prompt": [long] * (3 * CONTEXT // counts[0] + 1)},
        {"prompt": [[5] * 90] * 4},
        {"prompt": [[5] * 90] * 2, "n": 2},
    ):
        refused = ask(app, "/v1/completions", body)
        assert refused.status_code == 400, body
    assert not app.state.service.engine.running


def test_the_body_limit_follows_the_context():
    options = ServerOptions(model_name="x")
    assert body_limit(options, 1 << 10) == LEAST_BODY_LIMIT
    assert body_limit(options, 1 << 20) == BYTES_PER_TOKEN << 20
    assert body_limit(ServerOptions(model_name="x", max_body_bytes=10), 1 << 20) == 10


@pytest.mark.parametrize(
    ("text", "values", "parts"),
    [
        ("[1, 2, 3]", 3, 1),
        ('{"a": [[], {}], "b": "x"}', 6, 6),
        (r'["[,{", "\"[", "\\", "\\\"[,"]', 4, 1),
        ('"[1, 2]"', 0, 0),
    ],
)
def test_values_are_counted_outside_strings(text, values, parts):
    assert count_values(text.encode()) == (values, parts)


@pytest.mark.parametrize("unit", ["[]", '{"a":1}', "7", "keys"])
def test_more_values_than_a_context_can_hold_are_not_even_parsed(unit):
    body = {"prompt": "x", "user": "[" * SMALL}  # brackets in a text are none
    engine = FakeEngine("x")
    assert ask(engine, "/v1/completions", body).status_code == 200
    count = MOST_PARTS if unit != "7" else engine.max_context + SPARE_VALUES
    content = f'{{"prompt": "x", "user": [{",".join([unit] * count)}]}}'
    if unit == "keys":
        names = ",".join(f'"{number}":1' for number in range(count))
        content = f'{{"prompt": "x", "logit_bias": {{{names}}}}}'
    refused = ask(engine, "/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert refused.status_code == 400
    assert "too intricate" in refused.json()["error"]["message"]


def test_an_escaped_quote_ends_no_string():
    odd = SMALL + 1
    for escapes in (rb"\"", rb"\\\""):
        body = b'["' + escapes * odd + b"[," * odd + b'"]'
        assert parse(body, most_values=10)[0].endswith('"' + "[," * odd)


def test_a_text_without_breaks_is_refused_by_its_fields_name():
    engine = FakeEngine("x", max_context=1 << 20)
    refused = ask(engine, "/v1/completions", {"prompt": "x" * ((1 << 20) + 1)})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "prompt")
    assert "without a break" in error["message"]
