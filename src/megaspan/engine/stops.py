"""Stop strings, found however the text is split into tokens or pieces.

The stop string that is complete first wins; of those that end at the same character, the longest.
"""

from collections.abc import Sequence

from megaspan.tokenizer import Tokenizer


class StopStrings:
    """Watches the tokens of one request for its stop strings."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._stream = tokenizer.stream()
        self._search = _Search(stop)

    def push(self, token_id: int) -> str | None:
        """The stop string that the token's text completes, if any."""
        for character in self._stream.push(token_id):
            matched = self._search.advance(character)
            if matched is not None:
                return matched
        return None


class HeldText:
    """Text for a reader who must see neither a stop string nor what could become one.

    At most as many characters are held back as the longest stop string has.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self.matched: str | None = None
        self._search = _Search(stop)
        self._held = ""

    def push(self, text: str) -> str:
        """The text that can be shown now; nothing more once a stop string has `matched`."""
        if self.matched is not None:
            return ""
        for place, character in enumerate(text):
            self.matched = self._search.advance(character)
            if self.matched is not None:
                text = self._held + text[: place + 1]
                self._held = ""
                return text[: len(text) - len(self.matched)]
        text = self._held + text
        shown = len(text) - self._search.pending
        self._held = text[shown:]
        return text[:shown]

    def finish(self) -> str:
        """The rest, when no more text comes."""
        rest, self._held = self._held, ""
        return rest


class _Search:
    """Looks for several strings, one character at a time (Knuth, Morris and Pratt 1977, for each)."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = sorted(strings, key=len, reverse=True)
        self._borders = [_borders(string) for string in self._strings]
        self._states = [0] * len(self._strings)  # how many of each string's characters the text ends with

    @property
    def pending(self) -> int:
        """How many of the last characters may be the beginning of a string."""
        return max(self._states, default=0)

    def advance(self, character: str) -> str | None:
        """The longest string that the character completes, if any. Not to be called again after that."""
        matched = None
        for index, (string, borders) in enumerate(zip(self._strings, self._borders, strict=True)):
            state = self._states[index]
            while state and string[state] != character:
                state = borders[state - 1]
            self._states[index] = state + (string[state] == character)
            if matched is None and self._states[index] == len(string):
                matched = string
        return matched


def _borders(string: str) -> list[int]:
    """For each prefix, the length of the longest shorter prefix that it ends with."""
    borders = [0] * len(string)
    for end in range(1, len(string)):
        border = borders[end - 1]
        while border and string[border] != string[end]:
            border = borders[border - 1]
        borders[end] = border + (string[border] == string[end])
    return borders
