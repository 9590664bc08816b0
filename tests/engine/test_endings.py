"""How requests end: stop ids, stop strings, grammars, lengths, and failures of one alone."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from megaspan.engine.sampling import Grammar, SamplingParams
from megaspan.errors import UserError
from megaspan.model.folder import set_batch_invariant
from tests.engine.engines import (
    DEBUG,
    GREEDY,
    answer,
    assert_idle,
    assert_solo,
    drain,
    make_engine,
    prompt,
    tokens_of,
)
from tests.model.models import random_model
from tests.test_tokenizer import TOKENIZER

EOS = DEBUG.eos_token_id[0]
LONG = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def writer():
    """An engine whose tokens are text."""
    config = DEBUG.replace(
        vocab_size=TOKENIZER.vocab_size, eos_token_id=(TOKENIZER.special("<|endoftext|>"),)
    )
    model: Any = random_model(config)
    set_batch_invariant(model)
    model.tokenizer = TOKENIZER
    engine = make_engine(model)
    yield engine
    assert_idle(engine)
    engine.close()


def last(outputs):
    return outputs[-1].finish_reason, outputs[-1].stop_reason


def test_the_end_of_sequence_ends_a_request_unless_it_is_ignored(engine):
    forced = {EOS: 100.0}
    ended, ignored = engine.generate(
        [prompt(20)] * 2,
        [
            SamplingParams(temperature=0.0, max_tokens=5, logit_bias=forced),
            SamplingParams(temperature=0.0, max_tokens=5, logit_bias=forced, ignore_eos=True),
        ],
    )
    assert (tokens_of(ended), last(ended)) == ([EOS], ("stop", EOS))
    assert (tokens_of(ignored), last(ignored)) == ([EOS] * 5, ("length", None))


def test_stop_ids_end_a_request_at_their_first_occurrence(engine):
    """Also where there are more of them than a slot has places for."""
    tokens, _ = answer(engine.generate([prompt(20)], LONG)[0])
    wanted = tokens[7]
    first = tokens.index(wanted)
    unseen = [number for number in range(97) if number not in tokens]
    for stop_ids in ((wanted,), (*unseen[:12], wanted)):
        outputs = engine.generate([prompt(20)], replace(LONG, stop_token_ids=stop_ids))[0]
        assert tokens_of(outputs) == tokens[: first + 1]
        assert last(outputs) == ("stop", wanted)
        assert outputs[-1].completion_tokens == first + 1


def test_no_stop_id_comes_before_min_tokens(engine):
    forced = {EOS: 50.0}
    params = SamplingParams(temperature=0.0, max_tokens=9, min_tokens=4, logit_bias=forced)
    outputs = engine.generate([prompt(20)], params)[0]
    assert tokens_of(outputs).index(EOS) == 4
    assert last(outputs) == ("stop", EOS)


def test_min_tokens_survives_preemption(engine):
    """What was drawn before counts: the draw's number is that of the request, not that of the admission."""
    params = SamplingParams(temperature=0.0, max_tokens=9, min_tokens=4, logit_bias={EOS: 50.0})
    engine.submit(prompt(20), params, "one")
    outputs = [*engine.step(), *engine.step()]
    engine.scheduler.preempt(engine.requests["one"])
    outputs += drain(engine)["one"]
    assert tokens_of(outputs).index(EOS) == 4


def test_a_stop_string_ends_a_request_where_it_is_complete(writer):
    tokens, _ = answer(writer.generate([[5, 6, 7]], LONG)[0])
    text = TOKENIZER.decode(tokens[5:8])
    stop = text[len(text) // 2 :] or text
    outputs = writer.generate([[5, 6, 7]], replace(LONG, stop=("nowhere in it", stop)))[0]
    got = tokens_of(outputs)
    assert got == tokens[: len(got)]
    assert stop in TOKENIZER.decode(got)
    assert stop not in TOKENIZER.decode(got[:-1])
    assert last(outputs) == ("stop", stop)


@pytest.mark.parametrize(
    ("grammar", "fits"),
    [
        (Grammar.choice(["yes", "no"]), lambda text: text in ("yes", "no")),
        (Grammar("regex", "[0-9]{3}-[a-f]{2}"), lambda text: len(text) == 6 and text[3] == "-"),
        (
            Grammar(
                "json_schema",
                json.dumps({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}),
            ),
            lambda text: isinstance(json.loads(text)["a"], bool),
        ),
    ],
)
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_grammar_holds_to_its_end(writer, grammar, fits, ignore_eos):
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=200, grammar=grammar, ignore_eos=ignore_eos)
    bound, free = writer.generate([[5, 6, 7], [8, 9]], [params, replace(LONG, max_tokens=8)])
    assert bound[-1].finish_reason == "stop"
    text = TOKENIZER.decode([token for token in tokens_of(bound) if token not in DEBUG_EOS])
    assert fits(text)
    assert len(tokens_of(free)) == 8


DEBUG_EOS = (TOKENIZER.special("<|endoftext|>"),)


def test_a_grammar_goes_on_after_a_preemption(writer):
    params = SamplingParams(temperature=0.0, max_tokens=40, grammar=Grammar("regex", "[0-9]{12}"))
    writer.submit([5, 6, 7], params, "one")
    outputs = [output for _ in range(4) for output in writer.step()]
    writer.scheduler.preempt(writer.requests["one"])
    outputs += drain(writer)["one"]
    text = TOKENIZER.decode([token for token in tokens_of(outputs) if token not in DEBUG_EOS])
    assert len(text) == 12
    assert text.isdigit()


@pytest.mark.parametrize("params", [SamplingParams(stop=("a",)), SamplingParams(grammar=Grammar("json"))])
def test_without_a_tokenizer_text_cannot_be_watched(engine, params):
    with pytest.raises(UserError, match="needs a tokenizer"):
        engine.submit(prompt(9), params)
    assert not engine.has_work


def test_logits_that_are_no_numbers_fail_their_request_alone(model, engine, monkeypatch):
    unembed, broken = model.unembed, []

    def unembed_broken(hidden):
        logits = unembed(hidden)
        if len(logits) == 3 and not broken:
            broken.append(logits[1].clone())
            logits[1] = torch.nan
        return logits

    monkeypatch.setattr(model, "unembed", unembed_broken)
    prompts = [prompt(20, seed) for seed in range(3)]
    outputs = engine.generate(prompts, GREEDY)
    monkeypatch.undo()
    assert broken
    failed = [each for each in outputs if each[-1].finish_reason == "error"]
    assert len(failed) == 1
    assert "not finite" in failed[0][-1].error
    assert failed[0][-1].token_ids == ()
    assert failed[0][-1].completion_tokens == len(tokens_of(failed[0]))
    for ids, each in zip(prompts, outputs, strict=True):
        if each is not failed[0]:
            assert_solo(model, ids, GREEDY, each)


def test_a_step_that_raises_ends_its_requests_and_the_engine_goes_on(model, engine, monkeypatch):
    engine.submit(prompt(20, 1), GREEDY, "one")
    engine.step()
    with monkeypatch.context() as patch:

        def fail(*arguments):
            raise RuntimeError("out of memory")

        patch.setattr(engine.runner.model, "run_layers", fail)
        (output,) = engine.step()
    assert (output.request_id, output.finish_reason) == ("one", "error")
    assert "out of memory" in output.error
    assert engine.stats().requests_total["error"] == 1
    assert_idle(engine)
    assert_solo(model, prompt(20, 1), GREEDY, engine.generate([prompt(20, 1)], GREEDY)[0])
