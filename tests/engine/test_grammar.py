"""Where a request stands in its grammar: which tokens may come, where the text may end, what it may cost."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event

import pytest
import torch
from llguidance import LLParserLimits

from megaspan.engine import grammar as grammar_module
from megaspan.engine import grammar_compiler
from megaspan.engine.grammar_compiler import GrammarCompiler
from megaspan.engine.sampling import Grammar
from megaspan.server.reply_grammar import calls_grammar
from tests.engine.grammars import (
    AMBIGUOUS,
    COMPILER,
    END,
    EOS,
    SPECIALS,
    THINK_END,
    USER,
    WORDS,
    allowed,
    follow,
    take,
)
from tests.test_tokenizer import TOKENIZER


@pytest.fixture
def threads():
    with ThreadPoolExecutor(1) as executor:
        yield executor


def test_the_end_is_allowed_where_the_text_is_complete_and_nothing_after_it():
    state = COMPILER.compile(Grammar("regex", "a{2,3}"))
    assert END not in allowed(state)
    assert not state.accept(END)
    assert follow(state, "aa")
    assert set(EOS) <= allowed(state)
    assert not state.finished
    assert state.accept(USER)
    assert state.finished
    assert allowed(state) == set()
    assert not state.accept(TOKENIZER.encode("a")[0])


def test_only_the_end_can_follow_a_text_that_cannot_go_on():
    state = COMPILER.compile(Grammar("regex", "a{2,3}"))
    assert follow(state, "aa")
    assert follow(state, "a")
    assert state.finished
    assert allowed(state) == set(EOS)


def test_a_refused_token_changes_nothing():
    state = COMPILER.compile(Grammar("regex", "[0-9]{3}"))
    assert follow(state, "1")
    before = allowed(state)
    for token in (*TOKENIZER.encode("x"), THINK_END, END, -1, TOKENIZER.vocab_size):
        assert not state.accept(token)
        assert state.error == "the grammar does not allow the token"
    assert allowed(state) == before
    assert follow(state, "23")
    assert state.finished


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("regex", r"(?s:.*)"),
        Grammar("json"),
        Grammar.choice(["<|user|>", "</think>"]),
        Grammar("lark", f'start: "a" | <[0-{TOKENIZER.vocab_size - 1}]>'),
    ],
    ids=lambda grammar: grammar.kind,
)
def test_special_tokens_are_no_text(grammar):
    state = COMPILER.compile(grammar)
    can_end = grammar.kind == "regex"
    assert allowed(state) & SPECIALS == (set(EOS) if can_end else set())
    assert not state.accept(THINK_END)


def test_a_special_token_comes_only_where_a_grammar_names_it():
    text = f'start: "a" <[{THINK_END}]> TEXT <[{THINK_END}]> "b"\nTEXT: /(?s:.*)/'
    state = COMPILER.compile(Grammar("lark", text))
    assert follow(state, "a")
    assert allowed(state) == {THINK_END}
    assert state.accept(THINK_END)
    assert follow(state, "x</think>y")
    assert allowed(state) & SPECIALS == {THINK_END}
    assert state.accept(THINK_END)
    assert not state.accept(THINK_END)
    assert take(state, [*TOKENIZER.encode("b"), END]) == 2


def test_an_end_that_a_grammar_names_still_ends():
    state = COMPILER.compile(Grammar("lark", f'start: "a" <[{END}]> "b"'))
    assert follow(state, "a")
    assert allowed(state) == set()
    assert state.error == "the grammar leaves no token"
    assert not state.accept(END)


def test_tool_calls_can_be_enforced():
    call = {"name": "add", "parameters": {"properties": {"x": {"type": "integer"}}, "required": ["x"]}}
    grammar = calls_grammar(TOKENIZER, [{"type": "function", "function": call}], parallel=False)
    markers = ["<tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>"]
    begin, key, end_key, value, end_value, end = (TOKENIZER.special(marker) for marker in markers)
    name, parameter, number = (TOKENIZER.encode(text) for text in ("add", "x", "12"))
    reasoning = [*TOKENIZER.encode("so"), THINK_END]
    state = COMPILER.compile(replace(grammar, begins_after=THINK_END))
    reply = [begin, *name, key, *parameter, end_key, value, *number, end_value, end]
    assert take(state, reasoning + reply) == len(reasoning + reply)
    assert set(EOS) <= allowed(state)
    state = COMPILER.compile(replace(grammar, begins_after=THINK_END))
    assert take(state, reasoning) == len(reasoning)
    assert not state.accept(THINK_END)
    assert take(state, [begin, *name, key, *parameter, end_key, value, end_value]) == len(name) + 5


def test_text_that_spells_a_special_token_is_allowed_as_text():
    state = COMPILER.compile(Grammar.choice(["</think>"]))
    assert follow(state, "</think>")  # `encode` gives the characters
    assert state.finished


def test_the_grammar_holds_from_the_token_after_the_reasoning():
    """P70: free until the mark, also for the end; constrained right after it."""
    state = COMPILER.compile(Grammar("json", begins_after=THINK_END))
    assert allowed(state) >= set(range(TOKENIZER.vocab_size))
    assert follow(state, "let me think {")
    assert not state.finished
    assert state.accept(THINK_END)
    assert allowed(state) == allowed(COMPILER.compile(Grammar("json")))
    assert not follow(state, "so")


def test_tokens_across_the_boundary_are_constrained():
    """P70: what comes after the mark is checked, and no brace comes twice."""
    state = COMPILER.compile(Grammar("json_schema", '{"required": ["a"]}', begins_after=THINK_END))
    brace, bad = TOKENIZER.encode("{")[0], TOKENIZER.encode("bad")[0]
    assert take(state, [bad, THINK_END, brace, bad]) == 3
    assert brace not in allowed(state)
    assert not state.accept(brace)


# ---- masks from other threads, and what they may cost


def test_a_mask_is_the_same_whichever_thread_works_it_out(threads):
    state, alone = (COMPILER.compile(Grammar("json", begins_after=THINK_END)) for _ in range(2))
    for token in [*TOKENIZER.encode("hm"), THINK_END, *TOKENIZER.encode('{"a": [1, "b"]}'), END]:
        state.begin_mask(threads)
        state.begin_mask(threads)  # as for a step that has to be done again
        assert allowed(state) == allowed(alone)
        assert state.accept(token)
        assert alone.accept(token)
    assert state.finished


def test_a_mask_that_no_thread_comes_to_is_worked_out_by_who_needs_it(threads):
    free, freed = Event(), []
    threads.submit(lambda: freed.append(free.wait(5)))
    state = COMPILER.compile(Grammar("regex", "a"))
    state.begin_mask(threads)
    assert allowed(state)
    assert not freed
    free.set()


def test_a_grammar_that_takes_too_much_time_ends_while_the_mask_is_still_worked_out(threads, monkeypatch):
    """Others wait for a bounded time, however long the mask takes."""
    monkeypatch.setattr(grammar_module, "MOST_SECONDS", 0.02)
    state, masked, ended = COMPILER.compile(Grammar("regex", "a")), Event(), Event()

    class Slow:
        def is_error(self):
            return False

        def unsafe_compute_mask_ptr(self, *_):
            bound = time.monotonic() + 5
            while not ended.is_set() and time.monotonic() < bound:  # busy: only processor time counts
                pass
            masked.set()

        def is_accepting(self):
            return False

    monkeypatch.setattr(state, "_matcher", Slow())
    state.begin_mask(threads)
    words = torch.full((WORDS,), -1, dtype=torch.int32)
    state.mask(words)
    assert not masked.is_set()
    ended.set()
    assert not words.any()
    assert state.error == grammar_module.TOO_SLOW


def test_waiting_for_the_processor_does_not_count_against_a_grammar(threads, monkeypatch):
    """On a busy machine a mask may come late without being the grammar's fault."""
    monkeypatch.setattr(grammar_module, "MOST_SECONDS", 0.02)
    state, release = COMPILER.compile(Grammar("regex", "a")), Event()
    matcher, steps = state._matcher, []

    class Waiting:
        def __getattr__(self, name):
            return getattr(matcher, name)

        def unsafe_compute_mask_ptr(self, *arguments):
            release.wait(0.1)
            steps.append(matcher.unsafe_compute_mask_ptr(*arguments))

    monkeypatch.setattr(state, "_matcher", Waiting())
    state.begin_mask(threads)
    assert allowed(state) == set(TOKENIZER.encode("a"))
    assert len(steps) == 1


def test_time_that_is_not_used_up_comes_back_token_by_token(monkeypatch):
    state = COMPILER.compile(Grammar("regex", "a{9}"))
    state._left = 0.001
    monkeypatch.setattr(grammar_module, "SECONDS_PER_TOKEN", grammar_module.MOST_SECONDS / 2)
    for _ in range(3):
        assert follow(state, "a")
        assert 0 < state._left <= grammar_module.MOST_SECONDS
    assert state._left > 0.9 * grammar_module.MOST_SECONDS


def test_an_ambiguous_grammar_is_given_up_before_it_costs_much(monkeypatch):
    """Each further letter takes it longer: it ends with the reason after about as long as it may take."""
    monkeypatch.setattr(grammar_module, "SECONDS_PER_TOKEN", 0.0)
    state, letter = COMPILER.compile(Grammar("lark", AMBIGUOUS)), TOKENIZER.encode("a")[0]
    began = time.thread_time()
    while allowed(state):
        assert state.accept(letter)
        assert time.thread_time() - began < 4 * grammar_module.MOST_SECONDS
    assert state.error == grammar_module.TOO_SLOW


def test_a_grammar_that_becomes_too_much_work_says_so(monkeypatch):
    """After a comma any of the other properties may come: far more work than at the start."""
    limits = LLParserLimits(step_max_items=4000, verbose_errors=False)
    monkeypatch.setattr(grammar_compiler, "LIMITS", limits)
    properties = {f"property_{number}": {"type": "boolean"} for number in range(300)}
    grammar = Grammar("json_schema", json.dumps({"properties": properties, "additionalProperties": False}))
    state = GrammarCompiler(TOKENIZER, EOS).compile(grammar)
    for token in TOKENIZER.encode('{"property_1": true, "property_2": true}'):
        if not allowed(state):
            break
        assert state.accept(token)
    assert "followed no further: " in state.error
    assert "Too many items" in state.error
    assert "\n" not in state.error
    assert not state.finished
    assert not state.accept(TOKENIZER.encode('"')[0])
