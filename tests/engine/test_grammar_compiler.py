"""Compiling grammars: what is refused, what is kept, and that none can take the server with it."""

import json
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from llguidance import LLParserLimits, LLTokenizer

from megaspan.engine import grammar_compiler, grammar_trial
from megaspan.engine.grammar_compiler import CACHED_GRAMMARS, GrammarCompiler
from megaspan.engine.grammar_trial import GrammarTrial
from megaspan.engine.sampling import Grammar
from megaspan.errors import Overloaded, UserError
from tests.engine.grammars import COMPILER, EOS, allowed, follow
from tests.test_tokenizer import TOKENIZER

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
    Grammar("regex", "(" * 2000 + "a" + ")" * 2000),
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
# Seconds of work and hundreds of megabytes, of which llguidance's own limits know nothing.
HARD = Grammar("json_schema", '{"type": "integer", "multipleOf": 999983}')


@pytest.mark.parametrize("grammar", INVALID, ids=lambda grammar: f"{grammar.kind} {grammar.text[:20]}")
def test_what_cannot_be_enforced_is_refused_in_one_line(grammar):
    with pytest.raises(UserError, match=r"the (grammar begins|json_schema|regex|lark|choice)") as caught:
        COMPILER.compile(grammar)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.fixture
def trial(tmp_path, monkeypatch):
    """A trial with other limits: the script reads its own."""

    def trial(**limits: int) -> GrammarTrial:
        text = Path(grammar_trial.__file__).read_text()
        for name, value in limits.items():
            monkeypatch.setattr(grammar_trial, name, value)
            before, after = text.split(f"\n{name} = ")
            text = f"{before}\n{name} = {value}\n{after.partition(chr(10))[2]}"
        script = tmp_path / "trial.py"
        script.write_text(text)
        monkeypatch.setattr(grammar_trial, "__file__", str(script))
        return GrammarTrial(TOKENIZER.vocab_size)

    return trial


def source(grammar: Grammar) -> str:
    return grammar_compiler._source(grammar)


def test_a_grammar_that_takes_too_long_to_compile_is_stopped_and_refused(trial):
    trial = trial(SECONDS=1, MEMORY=8 << 30)
    assert "more than 1 seconds" in trial(source(HARD))
    assert trial(source(Grammar("regex", "ab"))) == ""  # with a new process


def test_a_grammar_that_takes_too_much_memory_is_stopped_and_refused(trial):
    trial = trial(SECONDS=60, MEMORY=40 << 20)
    assert "40 MiB" in trial(source(HARD))
    assert trial(source(Grammar("regex", "ab"))) == ""


def deep(count: int) -> list[Grammar]:
    rules = "".join(f"r{index}: x r{index + 1}\n" for index in range(count))
    definitions = {
        f"r{index}": {"properties": {"": {"$ref": f"#/$defs/r{index + 1}"}}} for index in range(count)
    }
    schema = {"$ref": "#/$defs/r0", "$defs": {**definitions, f"r{count}": {"type": "string"}}}
    text = json.dumps(schema, separators=(",", ":"))
    return [Grammar("lark", f'start: r0\n{rules}r{count}: "b"\nx: "a"'), Grammar("json_schema", text)]


def test_deep_grammars_work():
    rules, schema = deep(50)
    state = COMPILER.compile(rules)
    assert follow(state, "aaa")
    assert not follow(state, "b")
    assert follow(COMPILER.compile(schema), '{"": {')


@pytest.mark.parametrize("grammar", deep(4000), ids=lambda grammar: grammar.kind)
def test_what_would_overflow_the_stack_is_refused(grammar):
    """llguidance recurses through rules and references, and a stack that overflows ends the process."""
    with pytest.raises(UserError, match="nests too deep"):
        COMPILER.compile(grammar)


def test_a_grammar_that_takes_too_much_work_is_refused(monkeypatch):
    grammar = Grammar("lark", 'start: ("a" | "b" | "ab"){0,900}')
    COMPILER.compile(grammar)
    monkeypatch.setattr(grammar_compiler, "LIMITS", LLParserLimits(step_max_items=1, verbose_errors=False))
    with pytest.raises(UserError, match="limit"):
        GrammarCompiler(TOKENIZER, EOS).compile(grammar)


def test_what_can_only_follow_is_tried_before_the_grammar_is_taken(monkeypatch):
    """The first mask is small; that after the text which must come first takes too much."""
    heavy = " | ".join(f'"{letter}{number}"' for letter in "abcdef" for number in range(200))
    text = f'start: "x: " s\ns: s s | {heavy}'
    monkeypatch.setattr(grammar_trial, "LIMITS", LLParserLimits(step_max_items=300, verbose_errors=False))
    tokenizer = LLTokenizer("byte")
    assert grammar_trial.verdict(source(Grammar("lark", 'start: "x: " "y"')), tokenizer) == ""
    assert "Too many items" in grammar_trial.verdict(source(Grammar("lark", text)), tokenizer)


def test_compiled_grammars_are_kept_and_their_states_are_apart(monkeypatch):
    compiler, compiled = GrammarCompiler(TOKENIZER, EOS), []
    attempt = compiler._attempt
    monkeypatch.setattr(
        compiler, "_attempt", lambda grammar: (compiled.append(grammar.text), attempt(grammar))[1]
    )
    first, second = (compiler.compile(Grammar("regex", "ab")) for _ in range(2))
    assert compiled == ["ab"]
    assert follow(first, "ab")
    assert not second.finished
    assert follow(second, "ab")
    for number in range(CACHED_GRAMMARS - 1):
        compiler.compile(Grammar("regex", f"{number}"))
    compiler.compile(Grammar("regex", "ab"))  # and so it is no longer the oldest
    compiler.compile(Grammar("regex", "c"))
    assert len(compiler._compiled) == CACHED_GRAMMARS
    compiler.compile(Grammar("regex", "ab"))
    assert compiled.count("ab") == 1
    compiler.compile(Grammar("regex", "0"))
    assert compiled.count("0") == 2


def test_one_grammar_is_compiled_at_a_time_and_kept_ones_do_not_wait(monkeypatch):
    compiler, running, most, release = GrammarCompiler(TOKENIZER, EOS), [], [], threading.Event()
    kept, attempt = Grammar("regex", "kept"), compiler._attempt
    compiler.compile(kept)

    def counted(grammar):
        running.append(grammar)
        most.append(len(running))
        release.wait(10)
        result = attempt(grammar)
        running.remove(grammar)
        return result

    monkeypatch.setattr(compiler, "_attempt", counted)
    same = [Grammar("regex", f"x{number // 2}") for number in range(6)]
    threads = [threading.Thread(target=compiler.compile, args=(grammar,)) for grammar in same]
    for thread in threads:
        thread.start()
    compiler.compile(kept)
    assert not release.is_set()
    release.set()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1]  # each text once


def test_who_waits_too_long_for_others_grammars_is_told_to_come_again(monkeypatch):
    monkeypatch.setattr(grammar_compiler, "LONGEST_WAIT", 0.01)
    compiler = GrammarCompiler(TOKENIZER, EOS)
    with ThreadPoolExecutor(1) as threads, compiler._compiling:
        waiting = threads.submit(compiler.compile, Grammar("regex", "ab"))
        with pytest.raises(Overloaded, match="try again"):
            waiting.result(timeout=5)
    assert follow(compiler.compile(Grammar("regex", "ab")), "ab")


def test_threads_may_compile_while_others_mask():
    grammar = Grammar("json_schema", '{"properties": {"name": {"type": "string"}}}')
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


def test_a_process_that_was_killed_is_not_the_next_grammars_fault():
    trial = GrammarTrial(TOKENIZER.vocab_size)
    ask = grammar_trial._ask

    def killed(process, line):
        process.kill()
        process.wait()
        return ask(process, line)

    try:
        assert trial(source(Grammar("regex", "ab"))) == ""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(grammar_trial, "_ask", lambda *arguments: patch.undo() or killed(*arguments))
            assert trial(source(Grammar("regex", "c+"))) == ""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(grammar_trial, "_ask", killed)
            with pytest.raises(Overloaded):
                trial(source(Grammar("regex", "c+")))
    finally:
        trial.close()


def test_a_process_that_is_stopped_holds_nobody_up(monkeypatch):
    monkeypatch.setattr(grammar_trial, "LONGEST_ANSWER", 0.2)
    trial = GrammarTrial(TOKENIZER.vocab_size)
    trial._process = trial._start()
    trial._process.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(trial, "_start", lambda: pytest.fail("one is enough"))
    with pytest.raises(pytest.fail.Exception):
        trial(source(Grammar("regex", "ab")))


def test_without_a_process_for_it_a_grammar_is_put_off(monkeypatch):
    def refuse(*arguments, **options):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(Overloaded, match="Too many open files"):
        GrammarTrial(TOKENIZER.vocab_size)(source(Grammar("regex", "ab")))


def test_a_refusal_is_remembered(monkeypatch):
    compiler, tried = GrammarCompiler(TOKENIZER, EOS), []
    monkeypatch.setattr(compiler, "_trial", lambda source: tried.append(source) or "it is no good")
    for _ in range(2):
        with pytest.raises(UserError, match="it is no good"):
            compiler.compile(Grammar("regex", "a"))
    assert len(tried) == 1


def test_grammars_that_took_long_are_not_all_kept(monkeypatch):
    """What takes long takes memory: the last one is kept, and as many before it as fit."""
    compiler = GrammarCompiler(TOKENIZER, EOS)
    monkeypatch.setattr(compiler, "_trial", lambda source: "")
    seconds = grammar_compiler.CACHED_SECONDS
    for letter, taken in (("a", 0.6), ("b", 0.3), ("c", 0.2), ("d", 2.0)):
        compiler._keep(Grammar("regex", letter), compiler._attempt(Grammar("regex", letter)), taken * seconds)
        kept = "".join(text for _, text in compiler._compiled)
        assert kept == {"a": "a", "b": "ab", "c": "bc", "d": "d"}[letter]
