"""Random weights and saved folders that the checkpoint tests share."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from megaspan.config import ModelConfig
from megaspan.model.checkpoint_names import memory_tensors, stays_float32

DEBUG = ModelConfig.preset("debug")
State = dict[str, torch.Tensor]


def random_state(
    config: ModelConfig, mtp: bool = False, dtype: torch.dtype = torch.float32, seed: int = 0
) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).to(torch.float32 if stays_float32(name) else dtype)
        for name, shape in memory_tensors(config, mtp).items()
    }


def assert_equal(actual: State, expected: State) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert torch.equal(actual[name], tensor), name


def saved_tensors(folder: Path) -> State:
    return {key: tensor for file in folder.glob("*.safetensors") for key, tensor in load_file(file).items()}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def rewrite(folder: Path, change: Callable[[State], object]) -> None:
    """Change the tensors of a single-file checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
