"""Packs of tokens from a tokenised corpus, the same for the same seed and step."""

import functools
import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megaspan.errors import UserError
from megaspan.model.batch import Batch
from megaspan.train.losses import IGNORED


@dataclass(frozen=True)
class TokenFile:
    """A flat file of uint16 token ids and where each document in it starts.

    tokens: [N] uint16, mapped from disk. starts: [documents] int64, ascending, first 0.
    """

    tokens: np.ndarray
    starts: np.ndarray

    @classmethod
    def open(cls, folder: str | Path, split: str) -> "TokenFile":
        """Open `split` ("train" or "heldout") of a corpus folder; UserError when it is not there."""
        path, index = Path(folder) / f"{split}.bin", Path(folder) / "documents.json"
        if not path.exists() or not index.exists():
            raise UserError(f"{folder} holds no {split} split: build it with `megaspan corpus`")
        try:
            table = json.loads(index.read_text(encoding="utf-8"))[split]
            starts = np.array([document["start"] for document in table["documents"]], dtype=np.int64)
            expected = int(table["tokens"])
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{index} does not describe the {split} split: build the corpus again") from None
        if path.stat().st_size != 2 * expected:
            raise UserError(
                f"{path} has {path.stat().st_size / 2:g} tokens, but {index} says {expected}: build it again"
            )
        if not expected:
            raise UserError(f"{path} is empty: name projects for the {split} split in the manifest")
        return cls(np.memmap(path, dtype="<u2", mode="r"), starts)

    def require_vocabulary(self, size: int) -> None:
        """Raise UserError when a token is outside a vocabulary of `size`."""
        if (largest := int(self.tokens.max())) >= size:
            raise UserError(
                f"the corpus holds token {largest}, but the vocabulary has {size}: it was made with another"
                " tokenizer"
            )

    def window(self, start: int, length: int) -> tuple[Tensor, Tensor, list[int]]:
        """Tokens [length] from `start`, the token after each (IGNORED past its document's end), and the
        lengths of the stretches that belong to one document each."""
        tokens = torch.from_numpy(self.tokens[start : start + length + 1].astype(np.int64))
        inputs, targets = tokens[:-1], tokens[1:].clone()
        first, last = np.searchsorted(self.starts, [start + 1, start + length + 1])
        cuts = (self.starts[first:last] - start).tolist()  # documents that start in (start, start + length]
        for cut in cuts:
            targets[cut - 1] = IGNORED
        edges = [0, *(cut for cut in cuts if cut < length), length]
        return inputs, targets, [b - a for a, b in itertools.pairwise(edges)]


def training_pack(
    data: TokenFile, seed: int, step: int, tokens: int, context: int, device: str
) -> tuple[Batch, Tensor]:
    """The pack of a step: `tokens` tokens in windows of `context`, shuffled anew in every epoch.

    Returns the batch and targets [T]. Attention never crosses from one document to another, because
    each stretch of a document is a sequence of its own.
    """
    windows_per_epoch = (len(data.tokens) - 1) // context - 1
    per_step = tokens // context
    if windows_per_epoch < 1:
        raise UserError(f"the corpus has {len(data.tokens)} tokens, too few for a context of {context}")
    inputs, targets, lengths = [], [], []
    for number in range(step * per_step, (step + 1) * per_step):
        epoch, place = divmod(number, windows_per_epoch)
        order, offset = _epoch_order(seed, epoch, windows_per_epoch, context)
        window = data.window(offset + int(order[place]) * context, context)
        inputs.append(window[0])
        targets.append(window[1])
        lengths += window[2]
    token_ids = torch.cat(inputs).to(device, non_blocking=True)
    batch = Batch(token_ids, tuple(lengths), (0,) * len(lengths))
    return batch, torch.cat(targets).to(device, non_blocking=True)


@functools.lru_cache(maxsize=2)  # a permutation of all windows is too slow to draw every step
def _epoch_order(seed: int, epoch: int, windows: int, context: int) -> tuple[np.ndarray, int]:
    """The shuffled order of an epoch's windows, and how far they are all shifted."""
    random = np.random.default_rng([seed, epoch])
    return random.permutation(windows), int(random.integers(context))
