"""Figures of the shipped model: held-out bits per byte, completions that parse, speed at 32K."""

import ast
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from megaspan.bench.results import Row, machine, today, write_rows
from megaspan.engine.generation import Generation
from megaspan.errors import UserError
from megaspan.eval.bits import bits_per_byte
from megaspan.pretrained import PretrainedModel, load
from megaspan.train.data import TokenFile

ALLOW_INCOMPLETE_INPUT = 0x4000  # codeop.PyCF_ALLOW_INCOMPLETE_INPUT, absent from its type stubs
LONG, PROMPT, BODY = 32768, 2048, 160  # tokens: of the speed test, before a completion, of a completion
ABOUT = f"""\
Held-out projects are those that the corpus manifest keeps out of training. Bits per byte: every
token of windows of 4,096, each predicted from nothing but its own window, with the sparse attention
that is served. Completions: a function of a held-out file is cut after its `def` line, the model
writes the body from the {PROMPT:,} tokens before it, greedily and {BODY} tokens at most, and the
file up to the body's last whole line must be Python or the beginning of it. Speed: the first 32,768
held-out tokens in chunks of 512, then 64 single steps (median)."""


@dataclass(frozen=True)
class Cut:
    """A place in a held-out file: the text before a function's body, and how deep the `def` is indented."""

    before: str
    indentation: int


def run(
    model_folder: str, corpus: str, windows: int, completions: int, say: Callable[[str], None] = print
) -> dict[str, float]:
    """Measure the model in its own dtype on this machine; returns figures by name."""
    model = load(model_folder)
    figures = speed(model, corpus)
    say(f"32K: prefill {figures['prefill']:.0f} tok/s, decode {figures['decode']:.1f} tok/s")
    figures["parsed"] = parsed_share(model, corpus, completions)
    say(f"{figures['parsed']:.0%} of {completions} completions parse")
    figures["bits"] = bits_per_byte(model, corpus, 4096, windows)["bits_per_byte"]
    say(f"{figures['bits']:.3f} bits per byte over {windows} windows")
    return figures


def record(figures: dict[str, float], command: str) -> None:
    """Put the figures into docs/results/span-code."""
    where, when = machine(), today()
    rows = [
        ("held-out bits per byte at 4K", figures["bits"], "bits", "lower", 1.0),
        ("completions that are syntactically Python", 100 * figures["parsed"], "%", "higher", 90.0),
        ("prefill of 32K", figures["prefill"], "tok/s", "higher", 600.0),
        ("decode at 32K", figures["decode"], "tok/s", "higher", 50.0),
    ]
    named = [
        Row(name=name, value=value, unit=unit, better=better, target=target,
            command=command, machine=where, date=when)
        for name, value, unit, better, target in rows
    ]  # fmt: skip
    write_rows("span-code", named, about=ABOUT)


def speed(model: PretrainedModel, corpus: str) -> dict[str, float]:
    """Tokens per second of reading 32K held-out tokens and of decoding after them."""
    tokens = torch.from_numpy(TokenFile.open(corpus, "heldout").tokens[:LONG].astype("int64"))
    if len(tokens) < LONG:
        raise UserError(f"{corpus} has {len(tokens):,} held-out tokens, and the speed test reads {LONG:,}")
    Generation(model, 1024).prefill(tokens[:1024])  # compile and warm up
    generation = Generation(model, LONG + 64)
    started = time.perf_counter()
    token_id = int(generation.prefill(tokens).argmax())
    prefill_seconds = time.perf_counter() - started
    steps = []
    for _ in range(64):
        started = time.perf_counter()
        token_id = int(generation.step(token_id).argmax())
        steps.append(time.perf_counter() - started)
    return {"prefill": LONG / prefill_seconds, "decode": 1 / sorted(steps)[len(steps) // 2]}


def parsed_share(model: PretrainedModel, corpus: str, completions: int) -> float:
    """The share of completed function bodies with which the file still parses."""
    cuts = list(function_cuts(model, corpus))
    if not cuts:
        raise UserError(
            f"{corpus} has no held-out Python function to complete: build it with `megaspan corpus`"
        )
    count = min(completions, len(cuts))
    chosen = [cuts[number * len(cuts) // count] for number in range(count)]
    return sum(parses(cut, complete_body(model, cut)) for cut in chosen) / len(chosen)


def function_cuts(model: PretrainedModel, corpus: str) -> Iterator[Cut]:
    """The last function of every held-out file that parses."""
    tokenizer, data = model.tokenizer, TokenFile.open(corpus, "heldout")
    assert tokenizer is not None
    end, marks = tokenizer.special("<|endoftext|>"), [tokenizer.special("<|file|>")]
    text = tokenizer.decode(token for token in data.tokens.tolist() if token != end)
    for file in text.split(tokenizer.decode(marks))[1:]:
        source = file.partition("\n")[2]
        try:
            functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
        except (SyntaxError, ValueError):
            continue
        if functions:
            last = max(functions, key=lambda node: node.lineno)
            if last.body[0].lineno > last.lineno:  # not `def f(): return 1`
                before = source.split("\n")[: last.body[0].lineno - 1]
                yield Cut("\n".join(before), last.col_offset)


def complete_body(model: PretrainedModel, cut: Cut) -> str:
    """Go on after the `def` line until a line is indented no deeper than it, or BODY tokens."""
    tokenizer = model.tokenizer
    assert tokenizer is not None
    prompt = tokenizer.encode(cut.before.rstrip())[-PROMPT:]
    stop, stream, text = tokenizer.special("<|file|>"), tokenizer.stream(), ""
    for token_id in model.generate(prompt, BODY):
        if token_id == stop or token_id in model.config.eos_token_id:
            return text
        text += stream.push(token_id)
        if len(body_lines(text, cut.indentation)) < len(text.splitlines()) - 1:
            break
    return "".join(body_lines(text, cut.indentation))


def body_lines(text: str, indentation: int) -> list[str]:
    """The whole lines before the first that is indented no deeper than the `def`."""
    kept = []
    for line in text.splitlines(keepends=True):
        depth = len(line) - len(line.lstrip())
        if not line.endswith("\n") or (line.strip() and depth <= indentation):
            break
        kept.append(line)
    return kept


def parses(cut: Cut, body: str) -> bool:
    """Whether the file up to the body's last whole line is Python, or would be if it went on."""
    if not body.strip():
        return False
    flags = ast.PyCF_ONLY_AST | ALLOW_INCOMPLETE_INPUT
    try:
        compile(cut.before.rstrip() + body, "completion", "exec", flags)
    except (SyntaxError, ValueError) as error:
        return "incomplete input" in str(error)
    return True
