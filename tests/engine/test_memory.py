"""P21 to P23: the memory of a prefill is linear in its length, and no score matrix is ever held whole."""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megaspan.config import ModelConfig
from megaspan.engine.generation import Generation
from megaspan.ops import budget, native
from megaspan.ops.linear import native as linear_native
from megaspan.ops.moe import native as moe_native
from megaspan.ops.sparse_mla import native as sparse_mla_native
from tests.allocations import peak_bytes
from tests.model.models import random_model, random_tokens

DEBUG = ModelConfig.preset("debug")
CHUNK = 256
MIB = 1 << 20


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements of any tensor that an operation made."""

    elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        results = function(*arguments, **(keywords or {}))
        sizes = [
            result.untyped_storage().nbytes() // result.element_size()
            for result in tree_leaves(results)
            if isinstance(result, torch.Tensor)
        ]
        self.elements = max([self.elements, *sizes])
        return results


LIBRARIES = (native.load, linear_native._library, moe_native._function, sparse_mla_native._function)


def forget_libraries() -> None:
    for library in LIBRARIES:
        library.cache_clear()


@pytest.fixture(params=["native", "torch"])
def version(request, monkeypatch):
    """The compiled operations, and their PyTorch versions."""
    if request.param == "torch":
        monkeypatch.setenv("MEGASPAN_NATIVE", "0")
    forget_libraries()
    yield request.param
    forget_libraries()


@pytest.fixture
def small_budget(monkeypatch):
    """Less working memory than one [chunk, length] float array of the test takes."""
    monkeypatch.setitem(budget.BYTES, "cpu", MIB)


def prefill(model, length: int) -> None:
    Generation(model, length, CHUNK).prefill(random_tokens(DEBUG, length))


def test_no_tensor_is_as_large_as_chunk_times_length(version):
    model, length = random_model(DEBUG), 4096
    prefill(model, CHUNK)  # compile first
    with LargestTensor() as seen:
        prefill(model, length)
    # The caches' rows are the only thing that grows.
    assert length * DEBUG.latent_width <= seen.elements < CHUNK * length


def test_peak_memory_is_linear_in_the_length(version, small_budget):
    model = random_model(DEBUG)
    prefill(model, CHUNK)
    lengths = (512, 1024, 2048)
    peaks = [peak_bytes(lambda length=length: prefill(model, length)) for length in lengths]
    assert all(longer < 2.2 * shorter for shorter, longer in itertools.pairwise(peaks))
    # What each further token costs is its rows, and a little for the prompt itself.
    rows = 4 * (9 * DEBUG.latent_width + len(DEBUG.full_layers) * DEBUG.index_head_dim)
    assert (peaks[2] - peaks[1]) / 1024 < 1.2 * rows


@pytest.mark.parametrize("version", ["torch"], indirect=True)
def test_the_budget_bounds_what_an_operation_takes(version, monkeypatch):
    """The working memory is read at every call: a larger one is used by a later prefill."""
    model = random_model(DEBUG)
    peaks = []
    for size in (MIB // 2, 8 * MIB):
        monkeypatch.setitem(budget.BYTES, "cpu", size)
        peaks.append(peak_bytes(lambda: prefill(model, 1024)))
    assert peaks[0] < peaks[1] < peaks[0] + 8 * MIB
