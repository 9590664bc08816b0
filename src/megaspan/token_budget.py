"""A text within a budget of tokens: encoded in pieces, so that it needs little memory and can be given up."""

import re
from collections.abc import Iterator

from megaspan.errors import BadPrompt, ContextTooLong

PIECE = 1 << 16  # characters, a few hundredths of a second's work
LONGEST_PIECE = 1 << 20  # characters, up to half a gigabyte while they are encoded
# No pre-tokenizer of the byte-level family has the characters on both sides of a break in one word, and none
# looks back from there: either side is encoded as it would be alone.
BREAK = re.compile(r"""(?<=[^\W_])(?=[\n,;)"。])|(?<=\S)(?= )""")
SAMPLES = (
    ("word", " word"),
    ("7", "\n  x"),
    ("é", ",x"),
    ("字", "。\n"),
    ("};", "  (\n"),
)  # what breaks may part


class GivenUp(Exception):
    """Nobody waits for the tokens any more."""


class TokenBudget:
    """How many tokens the texts of one request may become."""

    def __init__(self, tokens: int) -> None:
        self.tokens = self.left = tokens
        self.stopped = False

    def stop(self) -> None:
        """Let the encoding end with GivenUp at its next piece. For any thread."""
        self.stopped = True

    def check_size(self, size: int, longest_token: int) -> None:
        """Raises ContextTooLong for a text of `size` bytes that the longest tokens could not hold."""
        if size > self.left * longest_token:
            raise ContextTooLong(f"{size} bytes", self.tokens)

    def spend(self, tokens: int) -> None:
        """Raises ContextTooLong once too many have come."""
        if self.stopped:
            raise GivenUp
        self.left -= tokens
        if self.left < 0:
            raise ContextTooLong(f"more than {self.tokens} tokens", self.tokens)


def pieces(text: str) -> Iterator[str]:
    """The text, cut at breaks between words. BadPrompt for a stretch of a million characters without one."""
    start = 0
    while start < len(text):
        found = BREAK.search(text, start + PIECE, start + LONGEST_PIECE)
        end = found.start() if found else len(text)
        if end - start > LONGEST_PIECE:
            raise BadPrompt(
                f"the text has {LONGEST_PIECE} characters without a break between words: break it up"
            )
        yield text[start:end]
        start = end
