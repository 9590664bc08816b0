"""Fixtures that any test may use."""

import importlib.util
import os
import sys

import hypothesis
import pytest
import torch

from tests import triton_interpreter

POISON_INDEX = -12345

TRITON = importlib.util.find_spec("triton") is not None
if TRITON and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels run as NumPy on tensors of the CPU

# A machine that does other things as well fails no test: what must be quick is timed where it matters.
hypothesis.settings.register_profile("megaspan", deadline=None)
hypothesis.settings.load_profile("megaspan")
torch.set_num_threads(1)  # tests run in a process for each core; their small operations only wait for more


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what tests recorded as `measured`: figures to be seen where nothing fails."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "measured":
                terminalreporter.write_line(str(value))


def _poison(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point():
        return tensor.fill_(torch.nan)
    if tensor.dtype in (torch.uint8, torch.bool):
        return tensor.fill_(255)  # four such bytes are a NaN as well
    return tensor.fill_(POISON_INDEX if torch.iinfo(tensor.dtype).bits > 8 else -1)


@pytest.fixture(scope="session")
def kernel_device() -> str:
    """Where Triton's kernels run: a GPU, or the CPU under Triton's interpreter."""
    if not TRITON:
        pytest.skip("no Triton here")
    if torch.cuda.is_available():
        return "cuda"
    triton_interpreter.mend()
    return "cpu"


@pytest.fixture(scope="module")
def poisoned_memory():
    """Fill what the package allocates uninitialised with NaN, or with -12345 where it is an index.

    Fresh memory is mostly zeros, which hides reads before writes. Calls from elsewhere are left alone.
    """

    def poisoning(original):
        def allocate(*arguments, **keywords):
            tensor = original(*arguments, **keywords)
            caller = sys._getframe(1).f_globals.get("__name__", "")
            return _poison(tensor) if caller.startswith("megaspan") else tensor

        return allocate

    with torch.device("meta"):  # such a context keeps a list of the true functions from its first use on
        torch.empty(0)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("empty", "empty_like", "empty_strided"):
            patch.setattr(torch, name, poisoning(getattr(torch, name)))
        for name in ("new_empty", "new_empty_strided"):
            patch.setattr(torch.Tensor, name, poisoning(getattr(torch.Tensor, name)))
        yield
