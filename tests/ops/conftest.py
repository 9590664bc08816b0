"""Fixtures of the operations' tests."""

import platform

import pytest

from megaspan.ops import native
from megaspan.ops.index_topk import index_topk_blocked, index_topk_native
from megaspan.ops.index_topk.native import SOURCE
from tests.ops.index_topk_cases import MIB

# The kernel's other forms: no bf16 instructions, 8 lanes, 4 lanes.
NARROWER = ("-mno-avx512bf16", "-mno-avx512f", "-mno-avx") if platform.machine() == "x86_64" else ()


@pytest.fixture(scope="module", params=["blocked", "native", *NARROWER])
def select(request):
    """One version of index_topk, called as select(case, budget_bytes)."""
    if request.param == "blocked":
        yield lambda case, budget=MIB: index_topk_blocked(*case.arguments(), budget_bytes=budget)
        return
    with pytest.MonkeyPatch.context() as patch:
        if request.param.startswith("-"):
            patch.setenv("MEGASPAN_CFLAGS", request.param)
        native.load.cache_clear()
        if native.load(SOURCE) is None:
            pytest.skip("no compiler here")
        yield lambda case, budget=MIB: index_topk_native(*case.arguments(), budget_bytes=budget)
    native.load.cache_clear()
