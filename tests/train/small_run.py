"""What the tests of whole runs share: three short stages, and how to look at what a run left."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from megaspan.train.data import TokenFile
from megaspan.train.loop import StageTrainer, make_model
from megaspan.train.recipe import Recipe

TEXT = b"def add(a, b):\n    return a + b\n\n\n"
STAGES = {
    "dense": dict(attention="dense", learn="backbone", steps=4),
    "indexers": dict(attention="dense", learn="indexers", steps=3),
    "sparse": dict(attention="sparse", learn="all", steps=4),
}
RATES = dict(matrix_learning_rate=0.02, learning_rate=0.01, index_learning_rate=0.01, warmup_steps=2)
WriteRecipe = Callable[..., Path]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def state_of(folder: Path) -> dict:
    return torch.load(folder / "state.pt", weights_only=True)


def assert_equal(actual: object, expected: object) -> None:
    """Bit for bit, through dictionaries and lists."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(actual, torch.Tensor)
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)
    elif isinstance(expected, dict):
        assert isinstance(actual, dict)
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            assert_equal(actual[name], value)
    elif isinstance(expected, list):
        assert isinstance(actual, list)
        for one, other in zip(actual, expected, strict=True):
            assert_equal(one, other)
    else:
        assert actual == expected


def trainer_of(recipe_path: Path, number: int = 0) -> StageTrainer:
    recipe = Recipe.read(recipe_path)
    data = TokenFile.open(recipe.corpus, "train")
    return StageTrainer(make_model(recipe, "cpu", None), recipe, recipe.stages[number], data)
