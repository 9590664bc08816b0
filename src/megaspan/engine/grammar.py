"""Structured output: which tokens a grammar allows next (llguidance walks the grammar)."""

import threading
import time
from concurrent.futures import Executor, Future

import torch
from llguidance import LLMatcher
from torch import Tensor

from megaspan.engine.grammar_vocabulary import GrammarVocabulary

# Processor time that a grammar may take, a part of which all requests wait for: so much at once, and so much
# for each token on average. Large schemas take 0.1 s at times and a hundredth of that on average.
MOST_SECONDS = 0.2
SECONDS_PER_TOKEN = 0.01
TOO_SLOW = "the grammar takes too much time: give one that is less ambiguous, or smaller"


class GrammarState:
    """Where one request stands in its grammar.

    A special token is allowed only where a grammar in Lark's notation names it, as `<[7]>`; text cannot
    spell it. With `begins_after`, every token is allowed until that one has come, and the grammar holds from
    the next one on. The end of the sequence is allowed where the text is complete; nothing is after it.

    error: one line, why no token or not the last one is allowed.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        vocabulary: GrammarVocabulary,
        named: frozenset[int],
        begins_after: int | None,
    ) -> None:
        self._matcher, self._vocabulary, self._named = matcher, vocabulary, named
        self._inner_words = (
            vocabulary.text_words | vocabulary.words(named) if named else vocabulary.text_words
        )
        self._begins_after = begins_after
        self._begun = begins_after is None
        self._moved = False  # it has taken a token: before that another thread may have the matcher
        self._ended = False  # the last accepted token ended the sequence
        self._words = torch.empty_like(vocabulary.text_words)  # the mask, where it is worked out
        self._mask: Future[float] | None = None  # of the next token
        self._left = MOST_SECONDS  # of processor time
        self._clock: tuple[int, float] | None = None  # of the thread that works the mask out, and its start
        self.error = "the grammar leaves no token"

    @property
    def finished(self) -> bool:
        """Whether the text is complete and only the end can follow, or has followed."""
        return self._ended or (self._moved and self._matcher.is_stopped() and self._matcher.is_accepting())

    def begin_mask(self, executor: Executor) -> None:
        """Have the next mask worked out by another thread: `mask` comes before anything else is asked."""
        if self._mask is None:
            self._mask = executor.submit(self._work_out)

    def mask(self, into: Tensor) -> None:
        """Write which ids may come next: int32 [ceil(V / 32)] in main memory, a bit for each id.

        No bit is set after the end, and where the grammar takes too much work or time: the state is of no
        use after that.
        """
        if not self._begun:
            into.fill_(-1)
            return
        if self._mask is None or self._mask.cancel():  # no thread has come to it
            self._left -= self._work_out()
        else:
            self._left -= self._await(self._mask)
        if self._ended or self._failed():
            into.zero_()
        else:
            into.copy_(self._words)

    def _await(self, mask: Future[float]) -> float:
        """The seconds that the mask took, or has taken when that is more than it may."""
        while True:
            try:
                return mask.result(timeout=0.01)
            except TimeoutError:
                taken = 0.0 if self._clock is None else _since(self._clock)
                if taken > self._left:
                    return taken

    def _work_out(self) -> float:
        """Fill `_words`; returns the seconds that it took."""
        if self._ended or self._matcher.is_error():
            return 0.0
        words, start = self._words, _clock()
        self._clock = start
        self._matcher.unsafe_compute_mask_ptr(words.data_ptr(), words.numel() * words.element_size())
        words &= self._inner_words
        if self._matcher.is_accepting():
            words |= self._vocabulary.eos_words
        return _since(start)

    def _failed(self) -> bool:
        """Whether the grammar can be followed no further; `error` says why."""
        if self._left < 0:  # first: then another thread may still have the matcher
            self.error = TOO_SLOW
        elif self._matcher.is_error():
            self.error = f"the grammar can be followed no further: {one_line(self._matcher.get_error())}"
        else:
            return False
        return True

    def accept(self, token_id: int) -> bool:
        """Take the next token; False, and no change, if the grammar does not allow it."""
        if not self._begun:
            self._begun = token_id == self._begins_after
            return True
        if not self._take(token_id):
            if not self._failed():
                self.error = "the grammar does not allow the token"
            return False
        self._left = min(self._left + SECONDS_PER_TOKEN, MOST_SECONDS)
        self._mask = self._clock = None
        return True

    def _take(self, token_id: int) -> bool:
        if self._ended:
            return False
        if token_id in self._vocabulary.eos_token_ids:
            self._ended = self._matcher.is_accepting()
            return self._ended
        if token_id not in self._named and not self._vocabulary.is_text(token_id):
            return False
        began = time.thread_time()
        taken = self._matcher.try_consume_tokens([token_id]) == 1
        self._left -= time.thread_time() - began
        self._moved = self._moved or taken
        return taken


def _clock() -> tuple[int, float]:
    """A clock of this thread's processor time that other threads can read, and what it shows."""
    # Without one, as on macOS, time as such counts.
    known = hasattr(time, "pthread_getcpuclockid")
    clock = time.pthread_getcpuclockid(threading.get_ident()) if known else time.CLOCK_MONOTONIC
    return clock, time.clock_gettime(clock)


def _since(start: tuple[int, float]) -> float:
    clock, began = start
    return time.clock_gettime(clock) - began


def one_line(reason: str) -> str:
    """What llguidance says, as part of a message."""
    return " ".join(reason.replace("<non-verbose/>", "").split())[:300]
