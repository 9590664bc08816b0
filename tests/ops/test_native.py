"""Building a C file on first use: the cache, and the way back to PyTorch where it cannot be built."""

import os
import shutil
import warnings
from pathlib import Path

import pytest
import torch

from megaspan.ops import native
from megaspan.ops.index_topk import index_topk, index_topk_native, index_topk_reference
from megaspan.ops.index_topk.native import SOURCE, supports
from megaspan.ops.rows import RowTable

COMPILER = shutil.which(os.environ.get("CC", "gcc"))
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no compiler here")


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """An empty cache folder, and no library remembered from or for other tests."""
    monkeypatch.setenv("MEGASPAN_CACHE", str(tmp_path / "cache"))
    native.load.cache_clear()
    yield
    native.load.cache_clear()


@pytest.fixture
def source(tmp_path) -> Path:
    path = tmp_path / "answer" / "kernel.c"
    path.parent.mkdir()
    path.write_text("#include <omp.h>\nint answer(void) { return omp_get_max_threads() > 0 ? 42 : 0; }\n")
    return path


def built() -> list[Path]:
    return sorted(native.cache_folder().iterdir())


@needs_compiler
def test_builds_once_and_loads(source):
    library = native.load(source)
    assert library is not None
    assert library.answer() == 42
    (first,) = built()
    stamp = first.stat().st_mtime_ns
    native.load.cache_clear()
    assert native.load(source) is not None
    assert built() == [first]
    assert first.stat().st_mtime_ns == stamp


@needs_compiler
def test_another_header_is_another_library(source):
    """A header that the source includes, and one that only this header includes."""
    header, inner = source.parent.parent / "answer.h", source.parent.parent / "digits.h"
    source.write_text('#include "../answer.h"\nint answer(void) { return TENS * 10 + UNITS; }\n')
    for tens, units in ((4, 3), (5, 3), (5, 4)):
        header.write_text(f'  # include "digits.h"\n#define TENS {tens}\n')
        inner.write_text(f"#define UNITS {units}\n")
        native.load.cache_clear()
        library = native.load(source)
        assert library is not None
        assert library.answer() == 10 * tens + units
    assert len(built()) == 3


@needs_compiler
def test_another_source_or_flag_is_another_library(source, monkeypatch):
    native.load(source)
    source.write_text("int answer(void) { return 43; }\n")
    native.load.cache_clear()
    library = native.load(source)
    assert library is not None
    assert library.answer() == 43
    monkeypatch.setenv("MEGASPAN_CFLAGS", "-O1 -DUNUSED")
    native.load.cache_clear()
    native.load(source)
    assert len(built()) == 3


@needs_compiler
def test_source_that_does_not_compile_warns_and_falls_back(source):
    source.write_text("int answer(void) { return nothing_of_that_name; }\n")
    with pytest.warns(UserWarning, match=r"answer/kernel\.c did not build.*(?s:.)*nothing_of_that_name"):
        assert native.load(source) is None
    assert built() == []


@needs_compiler
def test_cache_folder_that_cannot_be_written_warns_and_falls_back(source, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("MEGASPAN_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="did not build"):
        assert native.load(source) is None


@pytest.mark.parametrize("variable", [("MEGASPAN_NATIVE", "0"), ("CC", "no-compiler-of-this-name")])
def test_without_native_code_the_operation_still_answers(variable, monkeypatch):
    monkeypatch.setenv(*variable)
    if variable[0] == "CC":  # not asked for, so said once
        with pytest.warns(UserWarning, match="no compiler 'no-compiler-of-this-name'"):
            assert native.load(SOURCE) is None
    query, weights, keys = torch.ones(1, 2, 4), torch.ones(1, 2), torch.arange(80.0).view(20, 4)
    table = RowTable(torch.zeros(1, 1, dtype=torch.int64), 20)
    arguments = (query, weights, keys, table, torch.zeros(1, dtype=torch.int64), torch.tensor([20]), 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not supports(query, keys)
        assert index_topk(*arguments).tolist() == [[17, 18, 19]]


@needs_compiler
def test_the_operation_uses_native_code_where_it_can():
    query, weights, keys = torch.ones(1, 2, 4), torch.ones(1, 2), torch.arange(80.0).view(20, 4)
    table = RowTable(torch.zeros(1, 1, dtype=torch.int64), 20)
    arguments = (query, weights, keys, table, torch.zeros(1, dtype=torch.int64), torch.tensor([20]), 3)
    assert supports(query, keys)
    assert torch.equal(index_topk_native(*arguments, 1 << 20), index_topk_reference(*arguments))
    assert any(path.name.startswith("index_topk-") for path in built())
