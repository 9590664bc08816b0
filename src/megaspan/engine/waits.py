"""Finds the operations that make the host wait for a device."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

COPIES = (torch.ops.aten._to_copy, torch.ops.aten.copy_)
INDEXING = (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_)


class Waits(TorchDispatchMode):
    """While it is entered, notes what of this thread asks for values of tensors of the device, or copies.

    A CUDA graph cannot hold these operations, and a capture that fails leaves PyTorch's allocator as if it
    went on. found: their names. device: "cuda", or another type of device.
    """

    def __init__(self, device: str):
        super().__init__()
        self.device = device
        self.found: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        keywords = keywords or {}
        with self:  # in inference mode an operation made of others comes here before it is taken apart
            result = function.decompose(*arguments, **keywords)
        if result is not NotImplemented:
            return result
        result = function(*arguments, **keywords)
        operands = _tensors((arguments, keywords))
        devices = {tensor.device.type for tensor in operands}
        if function.overloadpacket in COPIES:
            devices |= {tensor.device.type for tensor in _tensors(result)}
            waits = len(devices) > 1
        elif function.overloadpacket in INDEXING:  # by a mask, whose ones have to be counted
            waits = any(tensor.dtype == torch.bool for tensor in _tensors(arguments[1]))
        else:
            asks = torch.Tag.data_dependent_output in function.tags
            waits = asks or function is torch.ops.aten.nonzero.default
        if waits and self.device in devices:
            self.found.append(str(function))
        return result


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]
