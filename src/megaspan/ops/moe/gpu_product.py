"""What the kernels of routed experts share: operands that may be FP8, tiles, the gated activation."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

GROUP = 128  # numbers of a state, or rows and columns of weights, that share a scale


class Operand(NamedTuple):
    """Numbers in bf16 without scales, or in e4m3 with fp32 scales: weights 128 x 128, states 1 x 128."""

    values: Tensor
    scales: Tensor | None = None

    def empty_states(self, rows: int, width: int) -> "Operand":
        """States [rows, width] of this one's format, unwritten."""
        values = self.values.new_empty(rows, width)
        if self.scales is None:
            return Operand(values)
        return Operand(values, self.scales.new_empty(rows, triton.cdiv(width, GROUP)))

    def tiles(self, rows: int, columns: int) -> TensorDescriptor:
        """What a kernel loads tiles of these values with; matrices [E, O, I] lie one below the other."""
        return TensorDescriptor.from_tensor(self.values.flatten(0, -2), [rows, columns])


class Tile(NamedTuple):
    """What one program multiplies at a time, and with what.

    states: tokens' states; columns: of the result, each of a row of weights, from the gate and as many from
    the other projection where there are two; step: of the width; stages: steps whose loads are under way.
    """

    states: int
    columns: int
    step: int
    stages: int
    warps: int

    def launch(self) -> dict[str, int]:
        """The tile as keyword arguments of a kernel's launch."""
        return {
            "TILE": self.states,
            "COLUMNS": self.columns,
            "STEP": self.step,
            "num_stages": self.stages,
            "num_warps": self.warps,
        }


@triton.jit
def gated(gate, up):
    """silu(gate) * up, all fp32."""
    return gate / (1 + tl.exp(-gate)) * up
