"""The activation of a SwiGLU layer on a GPU: silu(gate) * up in one pass over memory."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # numbers of a program: two 16-byte loads of bf16 by each thread, from gate and up each


def silu_and_multiply(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, both [T, I] fp32 or bf16 on a GPU → [T, I]; silu is rounded to their dtype.

    They may be the halves of one fused product: rows may lie any distance apart. Each number is computed
    alone, so this is the batch-invariant version too. No gradients.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(f"gate {list(gate.shape)} and up {list(up.shape)} do not fit")
    gate, up = (states if states.stride(1) == 1 else states.contiguous() for states in (gate, up))
    tokens, inner = gate.shape
    output = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    grid = (tokens, triton.cdiv(inner, BLOCK))
    _kernel[grid](gate, up, output, inner, gate.stride(0), up.stride(0), BLOCK=BLOCK, num_warps=4)
    return output


@triton.jit
def _kernel(gate_ptr, up_ptr, output_ptr, inner, gate_stride, up_stride, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    gate = tl.load(gate_ptr + token * gate_stride + column, mask=inside, other=0.0)
    up = tl.load(up_ptr + token * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    activated = (wide / (1 + tl.exp(-wide))).to(gate.dtype)
    tl.store(output_ptr + token * inner + column, activated.to(tl.float32) * up, mask=inside)
