"""The next-token loss."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megaspan.model.transformer import Transformer

IGNORED = -100  # the target of a token that has no next one


def next_token_loss(model: Transformer, hidden: Tensor, targets: Tensor, tile: int = 16384) -> Tensor:
    """Mean cross-entropy in nats of targets [T] given final hidden states [T, D].

    Logits are made anew in the backward pass, `tile` tokens at a time, so they never stand whole.
    """

    def summed(hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model.unembed(hidden), targets, ignore_index=IGNORED, reduction="sum")

    pieces = zip(hidden.split(tile), targets.split(tile), strict=True)
    total = sum(checkpoint(summed, *piece, use_reentrant=False) for piece in pieces)
    counted = (targets != IGNORED).sum().clamp(min=1)
    return torch.as_tensor(total) / counted
