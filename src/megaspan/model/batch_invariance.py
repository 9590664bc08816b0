"""Batch-invariant mode: a token's numbers have the same bits whatever shares its batch.

A selection is a jump, not a rounding: one flipped row is another model. So where log-probabilities must be
those of another run, whose batches were cut differently, every operation has to add in one order.
"""

from megaspan.model.attention import Attention
from megaspan.model.indexer import Indexer
from megaspan.model.layers import MLP, Linear, RMSNorm
from megaspan.model.moe import MoE, Router
from megaspan.model.transformer import Transformer


def set_batch_invariant(model: Transformer, invariant: bool = True) -> None:
    """Switch the mode, a property of the model as its dtype is. Without gradients only, for forward passes.

    Fast on a processor with the compiled operations; elsewhere each token is computed on its own.
    """
    for module in model.modules():
        if isinstance(module, Attention | Indexer | Linear | MLP | MoE | RMSNorm | Router):
            module.invariant = invariant
