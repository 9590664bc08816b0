"""A reply's tokens as pieces of text, up to where the engine lets a reader see them."""

from collections import deque
from typing import NamedTuple

from megaspan.engine.request import Output
from megaspan.tokenizer import Tokenizer


class Piece(NamedTuple):
    """What one token adds to the text: the characters that it completes, or a special token by its name."""

    text: str
    special: str = ""
    tokens: int = 1

    @property
    def length(self) -> int:
        """In characters of the text in which the engine looks for stop strings."""
        return len(self.text) + len(self.special)


class PieceStream:
    """Outputs to the pieces that a reader may see: nothing of a stop string, nor of what may become one.

    How much that is, the engine says (`Output.withheld`), and it alone looks for stop strings. A token goes
    out as a whole; only that in which the stop string begins is cut.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._text = tokenizer.stream()
        self._names = {token_id: name for name, token_id in tokenizer.special_tokens.items()}
        self._held: deque[Piece] = deque()
        self._length = 0  # of what is held

    def push(self, output: Output) -> list[Piece]:
        """What can be seen since the last time; with the finish, all that ever will be."""
        for token_id in visible_ids(output):
            self._hold(token_id)
        if output.finish_reason is None:
            return self._release(output.withheld)
        if isinstance(output.stop_reason, str):
            return self._release(output.withheld) + self._cut(output.withheld)
        rest = self._text.finish()  # U+FFFD for a character that was never completed
        return self._release(0) + ([Piece(rest, tokens=0)] if rest else [])

    def _hold(self, token_id: int) -> None:
        name = self._names.get(token_id, "")
        piece = Piece(self._text.finish(), name) if name else Piece(self._text.push(token_id))
        self._held.append(piece)
        self._length += piece.length

    def _release(self, withheld: int) -> list[Piece]:
        """The tokens that end before the last `withheld` characters."""
        released = []
        while self._held and self._length - self._held[0].length >= withheld:
            released.append(self._held.popleft())
            self._length -= released[-1].length
        return released

    def _cut(self, withheld: int) -> list[Piece]:
        """The beginning of the token that reaches into the last `withheld` characters."""
        text = self._held[0].text[: self._length - withheld]
        return [Piece(text)] if text else []


def visible_ids(output: Output) -> tuple[int, ...]:
    """The output's token ids without the one that ended the reply."""
    ids = output.token_ids
    return ids[:-1] if ids and output.finish_reason == "stop" and output.stop_reason == ids[-1] else ids
