"""The fixture that poisons memory does so, for the package only: else the tests that use it prove nothing."""

from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# Where an `out` is given, what is found in the memory is what was put there, not chance.
ALLOCATIONS: list[Callable[[torch.dtype], torch.Tensor]] = [
    lambda dtype: torch.empty(3, out=torch.ones(3, dtype=dtype), dtype=dtype),
    lambda dtype: torch.empty(3, dtype=dtype),
    lambda dtype: torch.empty_like(torch.ones(3, dtype=dtype)),
    lambda dtype: torch.empty_strided((3,), (1,), dtype=dtype),
    lambda dtype: torch.ones(3, dtype=dtype).new_empty(3),
    lambda dtype: torch.ones(3, dtype=dtype).new_empty_strided((3,), (1,)),
]


def called_from(module: str, allocate: Any) -> Callable[[torch.dtype], torch.Tensor]:
    """The same function as if it stood in another module."""
    return FunctionType(allocate.__code__, {"torch": torch, "__name__": module})


@pytest.mark.parametrize("allocate", ALLOCATIONS)
@pytest.mark.parametrize("module", ["megaspan", "megaspan.ops.sparse_mla.gathered"])
def test_what_the_package_allocates_is_poisoned(allocate: Any, module: str) -> None:
    inside = called_from(module, allocate)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert inside(dtype).isnan().all()
    for dtype in (torch.int64, torch.int32):
        assert inside(dtype).tolist() == [-12345] * 3
    assert inside(torch.uint8).tolist() == [255] * 3
    assert inside(torch.int8).tolist() == [-1] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("module", ["tests.test_conftest", "torch.nn.functional"])
def test_what_others_allocate_is_left_alone(module: str, dtype: torch.dtype) -> None:
    assert called_from(module, ALLOCATIONS[0])(dtype).tolist() == [1, 1, 1]
    assert ALLOCATIONS[0](dtype).tolist() == [1, 1, 1]


def test_a_read_before_the_write_shows_in_a_result() -> None:
    from megaspan.cache.growing import GrowingCache
    from megaspan.config import ModelConfig
    from megaspan.model.batch import Batch

    cache = GrowingCache(ModelConfig.preset("debug"), capacity=4)
    cache.table(Batch.of([[1, 2]]))
    assert all(rows.isnan().all() for rows in (*cache.latent, *cache.index.values()))
