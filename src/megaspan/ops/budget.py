"""How much memory one operation may use beyond its operands and result."""

import torch

BYTES = {"cpu": 256 << 20, "cuda": 4 << 30}


def working_memory(device: torch.device) -> int:
    """Bytes: 256 MiB on a CPU; more on a GPU, whose tiles must be large to keep it busy."""
    return BYTES.get(device.type, BYTES["cpu"])
