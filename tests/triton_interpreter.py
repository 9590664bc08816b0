"""What Triton's interpreter gets wrong (3.6 and 3.7), put right: so kernels can be tested without a GPU."""

import numpy as np
import torch


def mend() -> None:
    """Let loops have computed bounds (NumPy 2.4 takes them for no integers), products bf16 and e4m3 operands.

    And round float32 to the nearest bf16 or e4m3, which the interpreter cuts off, and widen them exactly; and
    take a tensor that was added to a constant for a tensor.
    """
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    patch_tensor, create_dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def patched(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def in_float32(operand):
        dtype = operand.dtype.scalar
        if dtype not in (tl.bfloat16, tl.float8e4nv):
            return operand
        # The bits of bf16 were taken for numbers, and e4m3's NaN for one.
        return interpreter.TensorHandle(rounded(operand.data, dtype, tl.float32, None), tl.float32)

    def dot(self, left, right, *others):
        return create_dot(self, in_float32(left), in_float32(right), *others)

    to_tensor = TritonSemantic.to_tensor

    def unwrapped(self, value, *others):
        return to_tensor(self, value.value if isinstance(value, tl.constexpr) else value, *others)

    convert_float = interpreter._convert_float

    def rounded(values, from_dtype, to_dtype, rounding_mode):
        if (from_dtype, to_dtype) == (tl.bfloat16, tl.float32):
            return (values.astype(np.uint32) << 16).view(np.float32)
        if (from_dtype, to_dtype) == (tl.float8e4nv, tl.float32):
            narrow = torch.from_numpy(np.ascontiguousarray(values))
            return narrow.view(torch.float8_e4m3fn).float().numpy()
        if from_dtype != tl.float32 or to_dtype not in (tl.bfloat16, tl.float8e4nv):
            return convert_float(values, from_dtype, to_dtype, rounding_mode)
        exact = torch.from_numpy(np.ascontiguousarray(values))
        if to_dtype == tl.bfloat16:
            return exact.bfloat16().view(torch.int16).numpy().view(np.uint16)
        return exact.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    TritonSemantic.to_tensor = unwrapped
    interpreter._convert_float = rounded
    interpreter._patch_lang_tensor = patched
    interpreter.InterpreterBuilder.create_dot = dot
