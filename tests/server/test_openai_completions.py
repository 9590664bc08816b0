"""`/v1/completions`: four kinds of prompt, several choices, echo, log-probabilities, refusals."""

import pytest

from tests.server.asking import MODEL, ask, events
from tests.server.fake_engine import LOGPROB, FakeEngine, encode_reply

PATH = "/v1/completions"


def counting(request):
    return f" {len(request.prompt)} tokens, {request.params.seed}"


@pytest.mark.parametrize(
    ("prompt", "sizes"),
    [
        ("def f(", [len(encode_reply("def f("))]),
        (["a", "b c"], [1, len(encode_reply("b c"))]),
        ([5, 6, 7], [3]),
        ([[5], [6, 7]], [1, 2]),
    ],
)
def test_every_kind_of_prompt_is_continued(prompt, sizes):
    body = {"model": MODEL, "prompt": prompt, "seed": 1, "max_tokens": 50}
    response = ask(FakeEngine(counting), PATH, body).json()
    assert [choice["text"] for choice in response["choices"]] == [f" {size} tokens, 1" for size in sizes]
    assert [choice["index"] for choice in response["choices"]] == list(range(len(sizes)))
    assert response["usage"]["prompt_tokens"] == sum(sizes)
    assert response["usage"]["total_tokens"] == sum(sizes) + response["usage"]["completion_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_choices_and_prompts_and_echo_go_together(stream):
    body = {"prompt": ["x", "y"], "n": 2, "seed": 1, "max_tokens": 50, "echo": True, "stream": stream}
    response = ask(FakeEngine(counting), PATH, body)
    if stream:
        texts = [""] * 4
        for chunk in events(response)[:-1]:
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
    else:
        texts = [choice["text"] for choice in response.json()["choices"]]
        assert response.json()["usage"]["prompt_tokens"] == 2  # each prompt once
    assert texts == [f"{prompt} 1 tokens, {seed}" for prompt in "xy" for seed in (1, 2)]


def test_sixteen_tokens_are_the_default():
    choice = ask(FakeEngine("a b " * 40), PATH, {"prompt": "x", "return_token_ids": True}).json()["choices"][
        0
    ]
    assert choice["finish_reason"] == "length"
    assert len(choice["token_ids"]) == 16


def test_log_probabilities_are_aligned_with_the_text():
    body = {"prompt": "x", "logprobs": 2, "max_tokens": 50}
    choice = ask(FakeEngine("one two"), PATH, body).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"][-1] == "<|endoftext|>"
    assert set(logprobs["token_logprobs"]) == {LOGPROB}
    assert "".join(logprobs["tokens"][:-1]) == choice["text"] == "one two"
    starts = zip(logprobs["text_offset"][:-1], logprobs["tokens"][:-1], strict=True)
    assert all(choice["text"][start:].startswith(token) for start, token in starts)
    assert all(len(each) == 2 for each in logprobs["top_logprobs"])


def test_a_stream_ends_with_usage_when_asked():
    body = {"prompt": "x", "stream": True, "stream_options": {"include_usage": True}, "stop": [" two"]}
    *chunks, usage, done = events(ask(FakeEngine("one two"), PATH, body))
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens"] == 1
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "one"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": ""}, "empty"),
        ({"prompt": []}, "prompts"),
        ({"prompt": [[]]}, "empty"),
        ({"prompt": ["x"] * 65}, "64"),
        ({"prompt": [-1]}, "token"),
        ({"prompt": [10**30]}, "token"),
        ({"prompt": [99999999]}, "token"),
        ({"prompt": None}, "prompt"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"n": 100}, "n is 100"),
        ({"logprobs": 21}, "logprobs"),
        ({"top_p": 0}, "top_p"),
    ],
)
def test_what_cannot_be_served_is_refused(fields, words):
    engine = FakeEngine()
    response = ask(engine, PATH, {"prompt": "x", **fields})
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]
    assert not engine.running
