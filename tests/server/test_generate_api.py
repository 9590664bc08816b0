"""`/generate`: ids in, ids out, each with its log-probability."""

import pytest

from tests.server.asking import ask, events
from tests.server.fake_engine import LOGPROB, FakeEngine, encode_reply


def test_ids_in_and_out_with_log_probabilities_and_version():
    engine = FakeEngine("one two")
    response = ask(engine, "/generate", {"input_ids": [5, 6], "sampling_params": {"temperature": 0}}).json()
    ids = encode_reply("one two<|endoftext|>")
    assert (response["text"], response["output_ids"]) == ("one two", ids)
    assert response["logprobs"] == [LOGPROB] * len(ids)
    assert "top_logprobs" not in response
    about = response["meta_info"]
    assert about["finish_reason"] == {"type": "stop", "matched": ids[-1]}
    assert (about["prompt_tokens"], about["completion_tokens"], about["weights_version"]) == (
        2,
        len(ids),
        "7",
    )
    assert about["cached_tokens"] == 0
    assert engine.submitted[0].prompt == [5, 6]
    assert engine.submitted[0].params.temperature == 0


def test_text_is_encoded_and_alternatives_come_when_asked_for():
    engine = FakeEngine("one")
    body = {"text": "def f(", "sampling_params": {"max_new_tokens": 1, "logprobs": 2}}
    response = ask(engine, "/generate", body).json()
    assert engine.submitted[0].prompt == engine.tokenizer.encode("def f(")
    assert response["meta_info"]["finish_reason"]["type"] == "length"
    assert [len(alternatives) for alternatives in response["top_logprobs"]] == [2]


def test_streamed_parts_joined_are_the_whole():
    whole = ask(FakeEngine("one two three", burst=2), "/generate", {"text": "x"}).json()
    *parts, done = events(
        ask(FakeEngine("one two three", burst=2), "/generate", {"text": "x", "stream": True})
    )
    assert done == "[DONE]"
    for name in ("text", "output_ids", "logprobs"):
        first, *rest = [part[name] for part in parts]
        for more in rest:
            first = first + more
        assert first == whole[name]
    assert [("meta_info" in part) for part in parts] == [False] * (len(parts) - 1) + [True]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "text or input_ids"),
        ({"text": "x", "input_ids": [1]}, "text or input_ids"),
        ({"input_ids": []}, "empty"),
        ({"input_ids": [12288]}, "vocabulary"),
        ({"input_ids": ["x"]}, "input_ids.0"),
        ({"text": "x", "sampling_params": {"beams": 4}}, "beams"),
        ({"text": "x", "sampling_params": {"max_new_tokens": 1, "max_tokens": 1}}, "either"),
        ({"text": "x", "image_data": "y"}, "image_data"),
    ],
)
def test_what_cannot_be_served_is_refused(body, words):
    response = ask(FakeEngine(), "/generate", body)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]
