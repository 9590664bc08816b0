"""Structured output: whatever the logits are, what is drawn fits the grammar."""

import json
import re
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLParserLimits

from megaspan.engine import grammar as grammar_module
from megaspan.engine.grammar import CACHED_GRAMMARS, GrammarCompiler, GrammarState
from megaspan.engine.sampler import Sampler
from megaspan.engine.sampling import Grammar, SamplingParams
from megaspan.errors import UserError
from megaspan.server.reply_grammar import calls_grammar
from tests.test_tokenizer import TOKENIZER

END, USER, THINK_END = (TOKENIZER.special(name) for name in ("<|endoftext|>", "<|user|>", "</think>"))
EOS = (END, USER)
SPECIALS = set(TOKENIZER.special_tokens.values())
COMPILER = GrammarCompiler(TOKENIZER, EOS)
WORDS = -(-TOKENIZER.vocab_size // 32)

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "count": {"type": "integer", "minimum": -3, "maximum": 40},
        "kind": {"enum": ["a", "b c", "</think>"]},
        "parts": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "count", "kind"],
    "additionalProperties": False,
}
ARITHMETIC = """
start: sum
sum: product ("+" product){0,2}
product: NUMBER ("*" NUMBER){0,2}
NUMBER: /[1-9][0-9]{0,2}/
"""


def allowed(state: GrammarState) -> set[int]:
    words = torch.full((WORDS,), 12345, dtype=torch.int32)
    state.mask(words)
    return set(np.flatnonzero(np.unpackbits(words.numpy().view(np.uint8), bitorder="little")).tolist())


def follow(state: GrammarState, text: str) -> bool:
    token_ids = TOKENIZER.encode(text)
    return state.accept_many(token_ids) == len(token_ids)


def sampled_text(grammar: Grammar, seed: int) -> str:
    """What comes of random logits, drawn as the engine does."""
    state, sampler = COMPILER.compile(grammar), Sampler(TOKENIZER.vocab_size, 1)
    sampler.admit(0, SamplingParams(grammar=grammar, temperature=2.0), [], seed=seed)
    generator = torch.Generator().manual_seed(seed)
    mask, drawn = torch.empty(1, WORDS, dtype=torch.int32), []
    for step in range(400):
        state.mask(mask[0])
        logits = torch.randn(1, TOKENIZER.vocab_size, generator=generator)
        sampled = sampler.sample(logits, [0], [step], mask)
        assert not sampled.failed
        token = int(sampled.token_ids[0])
        assert state.accept(token)
        if token in EOS:
            assert state.finished
            assert SPECIALS.isdisjoint(drawn)
            return TOKENIZER.decode(drawn)
        drawn.append(token)
    raise AssertionError("no end within 400 tokens")


@pytest.mark.parametrize("seed", range(25))
def test_random_logits_give_what_the_schema_says(seed):
    value = json.loads(sampled_text(Grammar("json_schema", json.dumps(SCHEMA)), seed))
    assert {"name", "count", "kind"} <= set(value) <= set(SCHEMA["properties"])
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 6
    assert isinstance(value["count"], int)
    assert -3 <= value["count"] <= 40
    assert value["kind"] in SCHEMA["properties"]["kind"]["enum"]
    if "parts" in value:
        assert 1 <= len(value["parts"]) <= 3
        assert all(isinstance(part, bool) for part in value["parts"])


@pytest.mark.parametrize("seed", range(5))
def test_random_logits_give_what_the_expression_the_grammar_and_the_choice_say(seed):
    assert re.fullmatch(
        r"[ab]{2,5}-[0-9]+/é?", sampled_text(Grammar("regex", r"[ab]{2,5}-[0-9]{1,9}/é?"), seed)
    )
    assert re.fullmatch(r"[0-9]+([+*][0-9]+)*", sampled_text(Grammar("lark", ARITHMETIC), seed))
    options = ["yes", "yes, but", 'say "no"', "a\nb\\d/|", "日本😀"]
    assert sampled_text(Grammar.choice(options), seed) in options


def test_each_choice_can_come():
    options = ["yes", "yes, but", 'say "no"', "a\nb\\d/|", "日本😀"]
    for option in options:
        state = COMPILER.compile(Grammar.choice(options))
        assert follow(state, option)
        assert set(EOS) <= allowed(state)


def test_any_object_is_json():
    state = COMPILER.compile(Grammar("json"))
    assert follow(state, '{"a": [1, {"b": null}], "c": "x"}')
    assert state.finished
    for text in ("[", "3", '"a"', "```"):
        assert not follow(COMPILER.compile(Grammar("json")), text)


def test_blanks_cannot_go_on_for_ever():
    state = COMPILER.compile(Grammar("json"))
    assert follow(state, "{" + "\n" * 20)
    assert not follow(state, "\n" * 20)


def test_the_end_is_allowed_where_the_text_is_complete_and_nothing_after_it():
    state = COMPILER.compile(Grammar("regex", "a{2,3}"))
    assert END not in allowed(state)
    assert not state.accept(END)
    assert state.accept_many(TOKENIZER.encode("aa")) > 0
    assert set(EOS) <= allowed(state)
    assert not state.finished
    assert state.accept(USER)
    assert state.finished
    assert allowed(state) == set()
    assert not state.accept(TOKENIZER.encode("a")[0])
    state.rollback(1)
    assert not state.finished
    assert follow(state, "a")
    assert state.finished
    assert allowed(state) == set(EOS)


def test_a_refused_token_changes_nothing():
    state = COMPILER.compile(Grammar("regex", "[0-9]{3}"))
    assert follow(state, "1")
    before = allowed(state)
    for token in (*TOKENIZER.encode("x"), THINK_END, END, -1, TOKENIZER.vocab_size):
        assert not state.accept(token)
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
    state.rollback(1)
    assert state.accept_many([THINK_END, *TOKENIZER.encode("b"), END]) == 3


def test_an_end_that_a_grammar_names_still_ends():
    state = COMPILER.compile(Grammar("lark", f'start: "a" <[{END}]> "b"'))
    assert follow(state, "a")
    assert allowed(state) == set()
    assert not state.accept(END)


def test_tool_calls_can_be_enforced():
    call = {"name": "add", "parameters": {"properties": {"x": {"type": "integer"}}, "required": ["x"]}}
    grammar = calls_grammar(TOKENIZER, [{"type": "function", "function": call}], parallel=False)
    state = COMPILER.compile(replace(grammar, begins_after=THINK_END))
    markers = ["<tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>"]
    begin, key, end_key, value, end_value, end = (TOKENIZER.special(marker) for marker in markers)
    name, parameter, number = (TOKENIZER.encode(text) for text in ("add", "x", "12"))
    reply = [begin, *name, key, *parameter, end_key, value, *number, end_value, end]
    assert state.accept_many([*TOKENIZER.encode("so"), THINK_END, *reply]) == len(reply) + 2
    assert set(EOS) <= allowed(state)
    state.rollback(len(reply))
    assert not state.accept(THINK_END)
    assert state.accept_many([begin, *name, key, *parameter, end_key, value, end_value]) == len(name) + 5


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


def test_drafts_across_the_boundary_are_constrained():
    """P70: the drafts after the mark are checked, no brace comes twice, rejected ones can be undone."""
    state = COMPILER.compile(Grammar("json_schema", json.dumps(SCHEMA), begins_after=THINK_END))
    brace, bad = TOKENIZER.encode("{")[0], TOKENIZER.encode("bad")[0]
    assert state.accept_many([bad, THINK_END, brace, bad]) == 3
    assert brace not in allowed(state)
    assert not state.accept(brace)
    state.rollback(1)
    assert brace in allowed(state)
    assert bad not in allowed(state)
    state.rollback(1)
    assert bad in allowed(state)  # before the mark once more
    assert state.accept_many([THINK_END, brace, brace]) == 2
    with pytest.raises(ValueError, match="cannot undo"):
        state.rollback(4)


TOKENS = [*TOKENIZER.encode('{"a":1}'), THINK_END, END, *TOKENIZER.encode("x")]


@given(st.lists(st.one_of(st.sampled_from(TOKENS), st.integers(-6, -1)), max_size=30), st.booleans())
def test_undone_tokens_leave_no_trace(moves, reasons):
    """P70: a negative move undoes as many tokens; the state is that of what is left, replayed."""
    grammar = Grammar("json", begins_after=THINK_END if reasons else None)
    state, taken = COMPILER.compile(grammar), []
    for move in moves:
        if move >= 0:
            if state.accept(move):
                taken.append(move)
        else:
            count = min(-move, len(taken))
            state.rollback(count)
            del taken[len(taken) - count :]
    fresh = COMPILER.compile(grammar)
    assert fresh.accept_many(taken) == len(taken)
    assert allowed(state) == allowed(fresh)
    assert state.finished == fresh.finished


INVALID = [
    Grammar("json_schema", "{"),
    Grammar("json_schema", "[]"),
    Grammar("json_schema", "true"),
    Grammar("json_schema", '{"type": "foo"}'),
    Grammar("json_schema", '{"not": {}}'),
    Grammar("json_schema", '{"x-guidance": {"lenient": true}, "not": {}}'),
    Grammar("json_schema", '{"minimum": NaN}'),
    Grammar("json_schema", '{"type": "integer", "minimum": 3, "maximum": 2}'),
    Grammar("json_schema", '{"$ref": "#"}'),
    Grammar("json_schema", '{"$ref": "https://example.com/schema.json"}'),
    Grammar("json_schema", '{"items":' * 300 + "{}" + "}" * 300),
    Grammar("json_schema", '{"items":' * 6_000 + "{}" + "}" * 6_000),
    Grammar("regex", "a(b"),
    Grammar("regex", "(?=a)b"),
    Grammar("lark", ""),
    Grammar("lark", "start: unknown"),
    Grammar("lark", 'start: "a" <|assistant|>'),
    Grammar("lark", 'start: "a'),
    Grammar("choice", "[]"),
    Grammar("choice", '["a", 3]'),
    Grammar("choice", '["a", ""]'),
    Grammar("choice", "yes"),
    Grammar("json", begins_after=TOKENIZER.vocab_size),
]


@pytest.mark.parametrize("grammar", INVALID, ids=lambda grammar: f"{grammar.kind} {grammar.text[:20]}")
def test_what_cannot_be_enforced_is_refused_in_one_line(grammar):
    started = time.monotonic()
    with pytest.raises(UserError, match=r"the (grammar begins|json_schema|regex|lark|choice)") as caught:
        COMPILER.compile(grammar)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    assert time.monotonic() - started < 5


def test_compiled_grammars_are_kept_and_their_states_are_apart(monkeypatch):
    compiler, compiled = GrammarCompiler(TOKENIZER, EOS), []
    original = compiler._matcher
    monkeypatch.setattr(
        compiler, "_matcher", lambda grammar: (compiled.append(grammar.text), original(grammar))[1]
    )
    first, second = (compiler.compile(Grammar("regex", "ab")) for _ in range(2))
    assert compiled == ["ab"]
    assert follow(first, "ab")
    assert not second.finished
    assert follow(second, "ab")
    for number in range(CACHED_GRAMMARS):
        compiler.compile(Grammar("regex", f"{number}"))
    assert len(compiler._compiled) == CACHED_GRAMMARS
    compiler.compile(Grammar("regex", "ab"))
    assert compiled.count("ab") == 2


def test_threads_may_compile_while_others_mask():
    grammar = Grammar("json_schema", json.dumps(SCHEMA))
    expected, wrong = allowed(COMPILER.compile(grammar)), []

    def work() -> None:
        for _ in range(20):
            state = COMPILER.compile(grammar)
            if allowed(state) != expected or not follow(state, '{"name": "x'):
                wrong.append(state)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_grammar_that_takes_too_much_work_is_refused(monkeypatch):
    grammar = Grammar("lark", 'start: ("a" | "b" | "ab"){0,900}')
    COMPILER.compile(grammar)
    monkeypatch.setattr(grammar_module, "LIMITS", LLParserLimits(step_max_items=1, verbose_errors=False))
    with pytest.raises(UserError, match="limit"):
        GrammarCompiler(TOKENIZER, EOS).compile(grammar)


def test_a_step_that_takes_too_much_work_allows_nothing():
    state = COMPILER.compile(Grammar("regex", "a+"))
    state._matcher.consume_token(TOKENIZER.encode("b")[0])  # as after a limit: the matcher is in error
    assert state._matcher.is_error()
    assert allowed(state) == set()
    assert not state.accept(TOKENIZER.encode("a")[0])
    assert not state.finished


@pytest.mark.parametrize("count", [300, 4000])
def test_deep_grammars_do_not_overflow_the_stack(count):
    """llguidance recurses through rules and references; on a thread's usual stack 3000 of them crash."""
    rules = "".join(f"r{index}: x r{index + 1}\n" for index in range(count))
    state = COMPILER.compile(Grammar("lark", f'start: r0\n{rules}r{count}: "b"\nx: "a"'))
    assert follow(state, "aaa")
    assert not follow(state, "b")
    count //= 4
    definitions = {
        f"r{index}": {"properties": {"": {"$ref": f"#/$defs/r{index + 1}"}}} for index in range(count)
    }
    schema = {"$ref": "#/$defs/r0", "$defs": {**definitions, f"r{count}": {"type": "string"}}}
    assert follow(
        COMPILER.compile(Grammar("json_schema", json.dumps(schema, separators=(",", ":")))), '{"": {'
    )
