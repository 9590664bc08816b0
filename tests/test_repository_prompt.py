"""Ordering the files of a repository and packing them into a prompt."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaspan.errors import UserError
from megaspan.repository import SourceFile, imported_paths, order_by_distance, pack

# --- ordering --------------------------------------------------------------------------------------------


def ordered(target: SourceFile, *names: str) -> list[str]:
    return [file.path for file in order_by_distance([SourceFile(name, "") for name in names], target)]


def test_nearest_files_come_last() -> None:
    target = SourceFile("src/pkg/core/a.py", "from pkg.far.away import thing\n")
    expected = [
        "docs/guide/start.md",
        "README.md",
        "setup.py",
        "src/pkg/far/other.py",
        "src/pkg/b.py",
        "src/pkg/core/deep/x.py",
        "src/pkg/core/data.json",
        "src/pkg/core/b.py",
        "src/pkg/core/c.py",
        "src/pkg/far/away.py",
    ]
    assert ordered(target, *sorted(expected)) == expected
    assert ordered(target, *reversed(sorted(expected))) == expected


IMPORTS = """
import pkg.one, pkg.two as two
from pkg import three
from pkg.four import (
    name,  # a comment
    five,
)
from . import near
from .beside import x
from ..upper import y
from .. import top
from .....beyond import nothing
import json
    import indented
#import commented
def important(): pass
"""


def test_imports_are_found_without_running_the_file() -> None:
    target = SourceFile("src/pkg/sub/a.py", IMPORTS)
    there = {
        "src/pkg/one.py",
        "src/pkg/two/__init__.py",
        "src/pkg/three.py",
        "src/pkg/four/__init__.py",
        "src/pkg/four/five.py",
        "src/pkg/sub/near.py",
        "src/pkg/sub/beside.py",
        "src/pkg/upper.py",
        "src/pkg/top.py",
        "src/pkg/__init__.py",
        "src/pkg/sub/__init__.py",
        "indented.py",
    }
    not_there = {
        "src/pkg/other.py",
        "other/json.py",
        "commented.py",
        "beyond.py",
        "x.py",
        "src/pkg/sub/a.py",
        "src/pkg/four/name.txt",
    }
    assert imported_paths(target, there | not_there) == there
    assert imported_paths(SourceFile("a.txt", IMPORTS), there) == set()


def test_a_test_imports_from_the_source_folder() -> None:
    target = SourceFile("libs/one/tests/test_a.py", "from pkg.a import f\n")
    its_own, another = "libs/one/src/pkg/a.py", "libs/two/src/pkg/a.py"
    assert imported_paths(target, {its_own, another}) == {its_own}


# --- packing ---------------------------------------------------------------------------------------------


class Bytes:
    """A tokenizer of bytes, in which a pair of newlines is one token, so that a name and a text can merge."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode().replace(b"\n\n", b"\xff"))

    def special(self, token: str) -> int:
        return {"<|repository|>": 256, "<|file|>": 257}[token]


REPOSITORY, FILE = 256, 257


def test_the_format_is_the_one_the_model_is_trained_on() -> None:
    tokenizer = Bytes()
    files = [SourceFile("far.md", "# Far"), SourceFile("near.py", "near = 1\n")]
    prompt = pack(tokenizer, files, "a.py", "def f():\n", 1000, name="project")
    assert prompt.token_ids == [
        REPOSITORY,
        *b"project\n",
        FILE,
        *b"far.md\n# Far",
        FILE,
        *b"near.py\nnear = 1\n",
        FILE,
        *b"a.py\ndef f():\n",
    ]
    assert prompt.files_included == ("far.md", "near.py", "a.py")
    assert prompt.files_left_out == ()
    assert prompt.truncated is None


def test_the_farthest_file_that_fits_in_part_keeps_its_name_and_end() -> None:
    files = [SourceFile("farther.md", "x"), SourceFile("far.md", "0123456789"), SourceFile("near.py", "n")]
    whole = pack(Bytes(), files[1:], "a.py", "t", 1000, name="p")
    prompt = pack(Bytes(), files, "a.py", "t", len(whole.token_ids) - 7, name="p")
    far = [REPOSITORY, *b"p\n", FILE, *b"far.md\n789"]
    assert prompt.token_ids == [*far, FILE, *b"near.py\nn", FILE, *b"a.py\nt"]
    assert prompt.files_included == ("far.md", "near.py", "a.py")
    assert prompt.files_left_out == ("farther.md",)
    assert prompt.truncated == "far.md"


def test_a_target_that_is_too_long_keeps_its_end() -> None:
    prompt = pack(Bytes(), [SourceFile("near.py", "n")], "a.py", "0123456789", 12, name="p")
    assert prompt.token_ids == [REPOSITORY, *b"p\n", FILE, *b"a.py\n789"]
    assert prompt.files_included == ("a.py",)
    assert prompt.files_left_out == ("near.py",)
    assert prompt.truncated == "a.py"
    with pytest.raises(UserError, match=r"context of 9 tokens is too small: a[.]py needs at least 10$"):
        pack(Bytes(), [], "a.py", "0123456789", 9, name="p")


def test_the_target_is_not_packed_twice() -> None:
    prompt = pack(Bytes(), [SourceFile("a.py", "whole text")], "a.py", "whole", 100)
    assert prompt.files_included == ("a.py",)


texts = st.text("ab\n é", max_size=40)
source = st.builds(SourceFile, st.text("xyz/", min_size=1, max_size=12), texts)
sources = st.lists(source, max_size=8, unique_by=lambda file: file.path)


@given(sources, texts, st.integers(1, 300))
def test_packing_is_exact(files: list[SourceFile], text: str, context: int) -> None:
    tokenizer = Bytes()
    everything = pack(tokenizer, files, "target.py", text, 10**6)
    target = [FILE, *tokenizer.encode("target.py\n" + text)]
    opening = [REPOSITORY, *tokenizer.encode("repository\n")]
    try:
        prompt = pack(tokenizer, files, "target.py", text, context)
    except UserError:
        assert context < len(opening) + len(target)
        return
    assert len(prompt.token_ids) == min(context, len(everything.token_ids))
    assert prompt.token_ids[: len(opening)] == opening
    whole = len(opening) + len(target) <= context
    assert prompt.token_ids[-len(target) :] == target if whole else prompt.truncated == "target.py"
    assert prompt.token_ids[-1:] == target[-1:]
    names = [file.path for file in files]
    assert [*prompt.files_left_out, *prompt.files_included] == [*names, "target.py"]
    assert prompt.truncated in (None, prompt.files_included[0])
    if context >= len(everything.token_ids):
        assert prompt == everything
