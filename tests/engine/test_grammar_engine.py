"""Structured output through the engine: what it gives, what it costs others, and how it fails."""

import json
import time
from threading import Event

import jsonschema
import pytest
import torch

from megaspan.engine.grammar import MOST_SECONDS, TOO_SLOW, GrammarState
from megaspan.engine.sampling import Grammar, SamplingParams
from megaspan.model.folder import set_batch_invariant
from tests.engine.engines import BOUND, DEBUG, GREEDY, answer, drain, make_engine, prompt, tokens_of
from tests.engine.grammars import AMBIGUOUS, END
from tests.engine.test_grammar_output import LARGE
from tests.model.models import random_model
from tests.test_tokenizer import TOKENIZER

CONFIG = DEBUG.replace(vocab_size=TOKENIZER.vocab_size, eos_token_id=(END,))
LETTER = TOKENIZER.encode("a")[0]


@pytest.fixture(scope="module")
def model():
    model = random_model(CONFIG, 0)
    set_batch_invariant(model, True)
    return model


@pytest.fixture
def engine(model):
    engine = make_engine(model, TOKENIZER, pages=200)
    yield engine
    engine.close()


def params(grammar: Grammar, **options) -> SamplingParams:
    return SamplingParams(grammar=grammar, **{"max_tokens": 40, "seed": 1, **options})


@pytest.mark.parametrize("name", ["500 optional properties", "overlapping branches", "oneOf of 200"])
def test_large_schemas_go_through(engine, name):
    grammar = Grammar("json_schema", json.dumps(LARGE[name]))
    for seed in range(2):
        engine.submit(prompt(10, seed), params(grammar, seed=seed, max_tokens=100))
    for outputs in drain(engine).values():
        assert outputs[-1].finish_reason in ("stop", "length"), outputs[-1]
        if outputs[-1].finish_reason == "stop":
            text = TOKENIZER.decode(token for token in tokens_of(outputs) if token != END)
            jsonschema.validate(json.loads(text), LARGE[name])


def test_an_ambiguous_grammar_ends_and_its_company_keeps_its_pace(engine):
    """A step never waits much longer than a grammar may take at once."""
    company = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
    alone = engine.generate([prompt(12)], company)[0]
    bias = ((LETTER, 100.0),)
    engine.submit(prompt(12), company, "company")
    engine.submit(prompt(12, 1), params(Grammar("lark", AMBIGUOUS), logit_bias=bias, max_tokens=500), "slow")
    outputs, longest = {"company": [], "slow": []}, 0.0
    while engine.has_work:
        began = time.process_time()  # of all threads: others on the machine do not count
        for output in engine.step():
            outputs[output.request_id].append(output)
        longest = max(longest, time.process_time() - began)
        assert longest < 10 * MOST_SECONDS
    assert answer(outputs["company"]) == answer(alone)
    last = outputs["slow"][-1]
    assert (last.finish_reason, last.error, last.error_kind) == ("error", TOO_SLOW, "grammar")


def test_a_mask_that_never_comes_holds_up_nobody(engine, monkeypatch):
    release, bound = Event(), time.monotonic() + BOUND

    class Endless:
        def is_error(self):
            return False

        def unsafe_compute_mask_ptr(self, *_):
            while not release.is_set() and time.monotonic() < bound:
                pass

        def is_accepting(self):
            return False

    request = engine.prepare(prompt(10), params(Grammar("json")), "endless")
    monkeypatch.setattr(request.grammar, "_matcher", Endless())
    engine.enqueue(request)
    engine.submit(prompt(10, 1), GREEDY, "company")
    outputs = drain(engine)
    release.set()
    assert time.monotonic() < bound
    assert (outputs["endless"][-1].error, outputs["endless"][-1].error_kind) == (TOO_SLOW, "grammar")
    assert len(tokens_of(outputs["company"])) == GREEDY.max_tokens


def test_masks_are_worked_out_while_the_model_runs(engine, monkeypatch):
    masking, running, met = Event(), Event(), []
    work_out, forward = GrammarState._work_out, engine.model.forward

    def mask(state):
        masking.set()
        met.append(running.wait(BOUND))
        return work_out(state)

    def run(*arguments):
        running.set()
        met.append(masking.wait(BOUND))
        return forward(*arguments)

    monkeypatch.setattr(GrammarState, "_work_out", mask)
    monkeypatch.setattr(engine.model, "forward", run)
    engine.submit(prompt(10), params(Grammar("regex", "a")))
    drain(engine)
    assert len(met) >= 2
    assert all(met)


def test_where_a_grammar_leads_nowhere_is_told_from_logits_that_are_not_finite(engine):
    nowhere = Grammar("lark", f'start: "a" <[{END}]> "b"')
    engine.submit(prompt(10), params(nowhere), "nowhere")
    last = drain(engine)["nowhere"][-1]
    assert (last.error, last.error_kind) == ("the grammar leaves no token", "grammar")
    assert last.completion_tokens == 1
    weight = engine.model.lm_head.weight
    kept = weight.detach().clone()
    try:
        with torch.no_grad():
            weight.fill_(float("nan"))
        engine.submit(prompt(10), params(Grammar("regex", "a{1,9}")), "not finite")
        last = drain(engine)["not finite"][-1]
    finally:
        with torch.no_grad():
            weight.copy_(kept)
    assert (last.error, last.error_kind) == ("the model's logits are not finite", "internal")


def test_closing_an_engine_ends_the_process_that_tried_its_grammars(model):
    engine = make_engine(model, TOKENIZER, pages=200)
    engine.submit(prompt(8), params(Grammar("regex", "a{3}")))
    child = engine._intake._compiler()._trial._process
    assert child is not None
    assert child.poll() is None
    engine.close()
    assert child.poll() is not None


def test_a_grammar_that_begins_at_once_does_not_meet_its_own_mask(engine, monkeypatch):
    """The thread that works out the first mask may still have the grammar when its first token comes."""
    work_out, accept = GrammarState._work_out, GrammarState.accept
    drawn, taken = Event(), Event()

    def slow(state):
        drawn.wait(BOUND)
        with_it, state._matcher = state._matcher, None  # it cannot be asked anything
        taken.set()
        time.sleep(0.05)
        state._matcher = with_it
        return work_out(state)

    def meanwhile(state, token):
        drawn.set()
        taken.wait(BOUND)
        return accept(state, token)

    monkeypatch.setattr(GrammarState, "_work_out", slow)
    monkeypatch.setattr(GrammarState, "accept", meanwhile)
    begin = params(Grammar("regex", "a{3}", LETTER), logit_bias={LETTER: 100.0}, temperature=0.0)
    engine.submit(prompt(8), begin, "one")
    engine.submit(prompt(9), GREEDY, "two")
    outputs = drain(engine)
    assert outputs["two"][-1].finish_reason == "length"
    assert outputs["one"][-1].finish_reason == "stop", outputs["one"][-1]
