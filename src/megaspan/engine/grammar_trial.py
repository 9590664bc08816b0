"""Whether a grammar can be compiled at all, tried in a process of its own.

llguidance cannot be interrupted, and a short grammar can take it minutes, gigabytes or a stack that
overflows. Run as a script, this file is that process: it answers each line with a line, both JSON, and ends
where a grammar takes too much.
"""

import contextlib
import json
import math
import os
import resource
import select
import signal
import subprocess
import sys
import threading

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance._tokenizer import TokenizerWrapper

from megaspan.errors import Overloaded

# Of schemas with a thousand optional properties or hundreds of branches. What is ambiguous costs far more
# time for as many items: that is limited where it is spent, see `GrammarState`.
LIMITS = LLParserLimits(
    max_items_in_row=20_000,
    step_max_items=100_000,
    max_lexer_states=100_000,  # of 1 or 2 kB
    max_grammar_size=200_000,
    verbose_errors=False,
)
SECONDS = 3  # of processor time
LONGEST_ANSWER = 20.0  # seconds on the clock, on a busy machine
CLOSING_SECONDS = 1.0
MEMORY = 512 << 20  # bytes, of which the process takes 30 MiB for itself
STACK = 1 << 20  # bytes: the threads of a server have at least twice as much


class GrammarTrial:
    """Tries grammars, one at a time. The process starts with the first and ends with `close`.

    vocab_size: of the tokens that a grammar may name, as `<[7]>`.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._process: subprocess.Popen[str] | None = None

    def __call__(self, source: str) -> str:
        """What is wrong with the grammar, or nothing. source: as llguidance reads it.

        Overloaded where the system gives no process, or kills it.
        """
        for _ in range(2):  # the first may find a process that was killed since the last grammar
            if self._process is None or self._process.poll() is not None:
                self._process = self._start()
            if answer := _ask(self._process, json.dumps(source)):
                return json.loads(answer)
            if self.close() not in (-signal.SIGKILL, -signal.SIGTERM):  # its own limits end it otherwise
                break
        else:
            raise Overloaded("the process that tries grammars was killed: try again later")
        return f"it takes more than {SECONDS} seconds or {MEMORY >> 20} MiB, or nests too deep: simplify it"

    def _start(self) -> subprocess.Popen[str]:
        # -P: the script's folder is a package's, whose modules are not to be found by their bare names.
        command = [sys.executable, "-P", __file__, str(self.vocab_size)]
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        try:
            # A session of its own: Ctrl-C is for the server.
            return subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=nothing, text=True, start_new_session=True
            )
        except OSError as error:
            raise Overloaded(f"no process can be had to try a grammar: {error}") from error

    def close(self) -> int | None:
        """End the process; returns how it ended, if there was one."""
        if self._process is None:
            return None
        process, self._process = self._process, None
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()  # it ends at the end of its lines, or has ended
        try:
            process.wait(CLOSING_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
        return process.returncode


def _ask(process: subprocess.Popen[str], line: str) -> str:
    """The answer, empty from a process that did not live to give it."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(line + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        return ""
    if not select.select([process.stdout], [], [], LONGEST_ANSWER)[0]:
        process.kill()  # it was stopped, or never had its turn
    return process.stdout.readline()


def verdict(source: str, tokenizer: LLTokenizer) -> str:
    """What is wrong with the grammar, or nothing."""
    try:
        matcher = LLMatcher(tokenizer, source, log_level=0, limits=LIMITS)
    except ValueError as error:
        return str(error)
    for _ in range(2):  # the first mask, and that after the text that can only follow
        if matcher.is_error():
            return matcher.get_error()
        if matcher.is_stopped():
            break
        matcher.compute_bitmask()
        matcher.try_consume_tokens(matcher.compute_ff_tokens())
    return matcher.get_error() if matcher.is_error() else ""


class Bytes:
    """A vocabulary of all bytes, the end, and tokens without text."""

    bos_token_id = None
    eos_token_id = 256
    special_token_ids = (256,)

    def __init__(self, vocab_size: int) -> None:
        self.tokens = [bytes([number]) for number in range(256)] + [b"<|end|>"]
        self.tokens += [b""] * (vocab_size - len(self.tokens))

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def answer_lines(vocab_size: int) -> None:
    tokenizer = LLTokenizer(TokenizerWrapper(Bytes(vocab_size)))
    for line in sys.stdin:
        used = resource.getrusage(resource.RUSAGE_SELF)
        end = math.ceil(used.ru_utime + used.ru_stime) + SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (end, resource.RLIM_INFINITY))
        print(json.dumps(verdict(json.loads(line), tokenizer)), flush=True)


if __name__ == "__main__":
    with contextlib.suppress(ValueError, OSError):  # not every system has this limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is an answer
    os.nice(5)  # the model goes first
    threading.stack_size(STACK)
    threading.Thread(target=answer_lines, args=(int(sys.argv[1]),)).start()
