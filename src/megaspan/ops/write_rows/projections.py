"""What the rows of a cache are made of: a projection of the hidden states, a norm and a rotation.

A cache gets these and not finished rows, so that norm, rotation, rounding and store can be one kernel.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from megaspan.ops.linear import rms_norm
from megaspan.ops.rotation import rotate


@dataclass(frozen=True, eq=False)
class LatentProjection:
    """T latent rows: an RMS norm of the first R numbers and the rotation of the last P.

    projected: [T, R + P] fp32 or bf16; norm_weight: [R]; turns: [T, 2, P] fp32, see `ops.rotation`.
    invariant: a token's bits do not depend on the other tokens, as in `ops.linear`.
    """

    projected: Tensor
    norm_weight: Tensor
    eps: float
    turns: Tensor
    invariant: bool = False

    @cached_property
    def rows(self) -> Tensor:
        """[T, R + P] in the dtype of the projection, differentiable."""
        latent, key_rope = self.projected.split((len(self.norm_weight), self.turns.shape[2]), dim=-1)
        normed = rms_norm(latent, self.norm_weight, self.eps, invariant=self.invariant)
        return torch.cat((normed, rotate(key_rope, self.turns, invariant=self.invariant)), dim=-1)


@dataclass(frozen=True, eq=False)
class IndexProjection:
    """T index keys: a layer norm, and then the rotation of the first P numbers.

    projected: [T, D] fp32 or bf16; norm_weight, norm_bias: [D]; the others as for `LatentProjection`.
    """

    projected: Tensor
    norm_weight: Tensor
    norm_bias: Tensor
    eps: float
    turns: Tensor
    invariant: bool = False

    @cached_property
    def rows(self) -> Tensor:
        """[T, D] in the dtype of the projection, differentiable."""
        normed = F.layer_norm(
            self.projected, self.norm_weight.shape, self.norm_weight, self.norm_bias, self.eps
        )
        return rotate(normed, self.turns, invariant=self.invariant)
