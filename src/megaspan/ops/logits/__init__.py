"""What the sampler must know of every row of logits before it draws."""

from torch import Tensor

from megaspan.ops.logits.native import logit_summary_native, supports
from megaspan.ops.logits.reference import FRACTION_BITS, LogitSummary, logit_summary_reference

__all__ = [
    "FRACTION_BITS",
    "LogitSummary",
    "logit_summary",
    "logit_summary_native",
    "logit_summary_reference",
]


def logit_summary(logits: Tensor, vocabulary: int) -> LogitSummary:
    """Best token, log of the sum of exponentials, and soundness of each row of logits [S, V'] float32.

    vocabulary: how many of the V' ids may be drawn; those behind them are padding, which counts in the sum.
    A row's bits depend on nothing but the row. ValueError for a vocabulary that the rows do not have.
    """
    if supports(logits):
        return logit_summary_native(logits, vocabulary)
    return logit_summary_reference(logits, vocabulary)
