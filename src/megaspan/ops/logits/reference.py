"""The summary of logits in PyTorch, on any device."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

FRACTION_BITS = 40  # a token's weight is a whole number: 2**40 for the best one, so 2**-40 is the least share


@dataclass(frozen=True)
class LogitSummary:
    """Of each row of logits [S, V'], as arrays in main memory.

    best_ids: int64 [S], the best id within the vocabulary, the lowest among equals. best: float64 [S], its
    logit. log_totals: float64 [S], the natural log of the sum of exponentials of the whole row. failed: bool
    [S]: a logit of the vocabulary is not finite, or one of the padding behind it is NaN or infinite.
    """

    best_ids: np.ndarray
    best: np.ndarray
    log_totals: np.ndarray
    failed: np.ndarray


def logit_summary_reference(logits: Tensor, vocabulary: int) -> LogitSummary:
    """See `logit_summary`. Exponentials are added as whole numbers, which any order gives the same."""
    raw = logits[:, :vocabulary]
    best_ids = raw.argmax(-1)
    top = logits.amax(-1)
    sound = torch.isfinite(top) & torch.isfinite(raw).all(-1)
    weights = ((logits.double() - top[:, None].double()).exp() * 2.0**FRACTION_BITS).nan_to_num(0).long()
    log_totals = weights.sum(-1).double().log() - FRACTION_BITS * math.log(2) + top.double()
    best = raw.gather(1, best_ids[:, None])[:, 0].double()
    best_ids, best, log_totals, failed = (
        torch.stack([best_ids.double(), best, log_totals, ~sound]).cpu().numpy()
    )
    return LogitSummary(best_ids.astype(np.int64), best, log_totals, failed.astype(bool))
