"""A reply's token ids as plain text and the markers that give it structure."""

import re
from collections.abc import Iterable
from enum import Enum

from megaspan.tokenizer import Tokenizer


class Marker(Enum):
    """What GLM writes around reasoning and tool calls; each is one special token in its vocabulary."""

    THINK = "<think>"
    END_THINK = "</think>"
    CALL = "<tool_call>"
    END_CALL = "</tool_call>"
    KEY = "<arg_key>"
    END_KEY = "</arg_key>"
    VALUE = "<arg_value>"
    END_VALUE = "</arg_value>"


THINKING = (Marker.THINK, Marker.END_THINK)
CALLING = tuple(marker for marker in Marker if marker not in THINKING)


class MarkerStream:
    """Splits token ids that come one at a time into text and markers.

    A marker is its special token, so text that spells one is text. Only where the vocabulary has no such
    token does the spelled marker count. Special tokens that are no marker add nothing.
    """

    def __init__(self, tokenizer: Tokenizer, markers: Iterable[Marker]) -> None:
        specials = tokenizer.special_tokens
        self._text = tokenizer.stream()
        self._special_ids = frozenset(specials.values())
        self._by_id = {specials[marker.value]: marker for marker in markers if marker.value in specials}
        self._spelled = [marker.value for marker in markers if marker.value not in specials]
        self._pattern = re.compile("|".join(map(re.escape, self._spelled)))
        self._held = ""  # an end of text that could be the beginning of a spelled marker

    def push(self, token_id: int) -> list[str | Marker]:
        if token_id not in self._special_ids:
            return self._split(self._text.push(token_id))
        marker = self._by_id.get(token_id)
        return self.finish() + ([marker] if marker else [])

    def finish(self) -> list[str | Marker]:
        """The rest of the text; U+FFFD for a character that was never completed."""
        pieces = self._split(self._text.finish())
        held, self._held = self._held, ""
        return [*pieces, held] if held else pieces

    def _split(self, text: str) -> list[str | Marker]:
        if not self._spelled:
            return [text] if text else []
        pieces: list[str | Marker] = []
        text = self._held + text
        end = 0
        for found in self._pattern.finditer(text):
            pieces += [text[end : found.start()], Marker(found.group())]
            end = found.end()
        shown = len(text) - self._begun_marker(text[end:])
        self._held = text[shown:]
        return [piece for piece in [*pieces, text[end:shown]] if piece]

    def _begun_marker(self, text: str) -> int:
        """Length of the longest end of the text with which a spelled marker begins."""
        longest = max(map(len, self._spelled)) - 1
        lengths = range(min(longest, len(text)), 0, -1)
        return next((n for n in lengths if any(s.startswith(text[-n:]) for s in self._spelled)), 0)
