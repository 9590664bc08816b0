"""Stop strings, found however the text is split into tokens.

The stop string that is complete first wins; of those that end at the same character, the longest.
"""

from collections.abc import Sequence

from megaspan.tokenizer import Tokenizer


class StopStrings:
    """Looks for the stop strings of one request in the text of its tokens, special tokens spelled out.

    One character at a time, with the automaton of Knuth, Morris and Pratt (1977) for each string.

    withheld: how many of the text's last characters no reader may see: those that may yet become a stop
    string, or once one was found, that string and what its last token adds behind it.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._stream = tokenizer.stream()
        self._strings = sorted(stop, key=len, reverse=True)
        self._borders = [_borders(string) for string in self._strings]
        self._states = [0] * len(self._strings)  # how many of each string's characters the text ends with
        self.withheld = 0

    def push(self, token_id: int) -> str | None:
        """The stop string that the token's text completes, if any. Not to be called again after that."""
        text = self._stream.push(token_id)
        for end, character in enumerate(text, start=1):
            matched = self._advance(character)
            if matched is not None:
                self.withheld = len(matched) + len(text) - end
                return matched
        self.withheld = max(self._states, default=0)
        return None

    def _advance(self, character: str) -> str | None:
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
