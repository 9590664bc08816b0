"""Where the prompt ends in white space, let the model choose the tokens that it falls into.

A line end and the indentation after it are one token. A prompt that is cut between them would tell the
model that the next line has no indentation, so the white space is taken off the prompt's end and the
first tokens generated are those, among the ones that spell it, that the model likes best.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

BLANKS = " \t\n\r\f\v"


def split_blank_end(text: str) -> tuple[str, bytes]:
    """Text without its trailing white space, and that white space; all of a blank text stays."""
    kept = text.rstrip(BLANKS)
    return (kept, text[len(kept) :].encode()) if kept else (text, b"")


class Healing:
    """Holds the first sampled tokens to the bytes that were taken off the prompt.

    token_bytes: what each token id adds to a text.
    """

    def __init__(self, taken_off: bytes, token_bytes: Sequence[bytes]):
        self.missing, self.token_bytes = taken_off, token_bytes

    def restrict(self, logits: Tensor) -> Tensor:
        """Logits [V] with -inf for every token that does not go on with the missing bytes."""
        if not self.missing:
            return logits
        fits = [
            bool(text) and (text.startswith(self.missing) or self.missing.startswith(text))
            for text in self.token_bytes
        ]
        return logits.masked_fill(~torch.tensor(fits, device=logits.device), -torch.inf)

    def accept(self, token_id: int) -> int:
        """Note a sampled token; return how many of its bytes the prompt had already shown."""
        shown = min(len(self.missing), len(self.token_bytes[token_id]))
        self.missing = self.missing[shown:]
        return shown
