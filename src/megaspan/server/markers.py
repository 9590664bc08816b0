"""A reply as plain text and the markers that give it structure."""

import re
from collections.abc import Iterable
from enum import Enum

from megaspan.server.reply_pieces import Piece
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
    """Splits the pieces of a reply, as they come, into text and markers.

    A marker is its special token, so text that spells one is text. Only where the vocabulary has no such
    token does the spelled marker count. Special tokens that are no marker add nothing.
    """

    def __init__(self, tokenizer: Tokenizer, markers: Iterable[Marker]) -> None:
        self._specials = {marker.value for marker in markers if marker.value in tokenizer.special_tokens}
        self._spelled = [marker.value for marker in markers if marker.value not in self._specials]
        self._pattern = re.compile("|".join(map(re.escape, self._spelled)))
        self._held = ""  # an end of text that could be the beginning of a spelled marker

    def push(self, piece: Piece) -> list[str | Marker]:
        parts = self._split(piece.text)
        if not piece.special:
            return parts
        return parts + self.finish() + ([Marker(piece.special)] if piece.special in self._specials else [])

    def finish(self) -> list[str | Marker]:
        """What was held back."""
        held, self._held = self._held, ""
        return [held] if held else []

    def _split(self, text: str) -> list[str | Marker]:
        if not self._spelled:
            return [text] if text else []
        parts: list[str | Marker] = []
        text = self._held + text
        end = 0
        for found in self._pattern.finditer(text):
            parts += [text[end : found.start()], Marker(found.group())]
            end = found.end()
        shown = len(text) - self._begun_marker(text[end:])
        self._held = text[shown:]
        return [part for part in [*parts, text[end:shown]] if part]

    def _begun_marker(self, text: str) -> int:
        """Length of the longest end of the text with which a spelled marker begins."""
        longest = max(map(len, self._spelled)) - 1
        lengths = range(min(longest, len(text)), 0, -1)
        return next((n for n in lengths if any(s.startswith(text[-n:]) for s in self._spelled)), 0)
