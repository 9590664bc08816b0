"""Reading, ordering and packing a repository."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaspan.errors import UserError
from megaspan.repository import (
    SourceFile,
    imported_paths,
    order_by_distance,
    pack,
    read_repository,
    read_target,
    text_before_line,
)


class Bytes:
    """A tokenizer of bytes, in which a pair of newlines is one token, so that a name and a text can merge."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode().replace(b"\n\n", b"\xff"))

    def special(self, token: str) -> int:
        return {"<|repository|>": 256, "<|file|>": 257}[token]


REPOSITORY, FILE = 256, 257


def write(root: Path, files: dict[str, str | bytes]) -> Path:
    for path, content in files.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    return root


def paths(root: Path) -> list[str]:
    return [file.path for file in read_repository(root)]


# --- reading ---------------------------------------------------------------------------------------------


def plain(root: Path) -> None:
    """A folder that is no checkout."""


def checkout(root: Path) -> None:
    subprocess.run(["git", "init", "-q", str(root)], check=True)


both_ways = pytest.mark.parametrize("prepare", [plain, checkout])


@both_ways
def test_gitignore_with_nesting_and_negation(tmp_path: Path, prepare: Callable[[Path], None]) -> None:
    prepare(tmp_path)
    write(
        tmp_path,
        {
            ".gitignore": "*.log\n/build/\nsecret*\n!secret-plan.md\n",
            "a.py": "",
            "a.log": "",
            "build/x.py": "",
            "sub/build/x.py": "",
            "secret.txt": "",
            "secret-plan.md": "",
            "sub/.gitignore": "!keep.log\nlocal.py\n/only-here.txt\n",
            "sub/keep.log": "",
            "sub/other.log": "",
            "sub/local.py": "",
            "local.py": "",
            "sub/only-here.txt": "",
            "sub/deep/only-here.txt": "",
            "sub/deep/keep.log": "",
        },
    )
    assert paths(tmp_path) == sorted(
        [
            ".gitignore",
            "a.py",
            "local.py",
            "secret-plan.md",
            "sub/.gitignore",
            "sub/build/x.py",
            "sub/deep/keep.log",
            "sub/deep/only-here.txt",
            "sub/keep.log",
        ]
    )


@both_ways
def test_a_file_in_an_ignored_folder_stays_out(tmp_path: Path, prepare: Callable[[Path], None]) -> None:
    prepare(tmp_path)
    write(tmp_path, {".gitignore": "build/\n!build/keep.py\n", "build/keep.py": "", "b.py": ""})
    assert paths(tmp_path) == [".gitignore", "b.py"]


@both_ways
def test_what_is_no_text_is_skipped_and_reported(tmp_path: Path, prepare: Callable[[Path], None]) -> None:
    prepare(tmp_path)
    write(
        tmp_path,
        {
            "good.py": "x = 'é'\n",
            "zero.bin": b"ab\0c",
            "latin.py": "é".encode("latin-1"),
            "late-zero.txt": b"a" * 9000 + b"\0",
            "large.py": "#" * (2**20 + 1),
            "limit.py": "#" * 2**20,
            "uv.lock": "",
            "package-lock.json": "{}",
            "empty.py": "",
        },
    )
    os.mkfifo(tmp_path / "pipe")
    skipped: dict[str, str] = {}
    files = read_repository(tmp_path, skipped.__setitem__)
    assert [file.path for file in files] == ["empty.py", "good.py", "late-zero.txt", "limit.py"]
    assert skipped.pop("pipe", "not a file") == "not a file"  # git lists no pipes at all
    assert skipped == {
        "zero.bin": "not text",
        "latin.py": "not text",
        "large.py": "larger than 1 MiB",
        "uv.lock": "lock file",
        "package-lock.json": "lock file",
    }


@both_ways
def test_symbolic_links_lead_nowhere(tmp_path: Path, prepare: Callable[[Path], None]) -> None:
    root = tmp_path / "repository"
    root.mkdir()
    prepare(root)
    write(tmp_path, {"outside.py": "secret", "elsewhere/file.py": "secret"})
    write(root, {"inside.py": "x"})
    (root / "link.py").symlink_to(tmp_path / "outside.py")
    (root / "folder").symlink_to(tmp_path / "elsewhere")
    (root / "loop").symlink_to(root)
    (root / "dangling.py").symlink_to(root / "nothing.py")
    assert paths(root) == ["inside.py"]


def test_tracked_files_are_read_even_if_ignored_and_deleted_ones_are_not(tmp_path: Path) -> None:
    checkout(tmp_path)
    write(tmp_path, {".gitignore": "*.gen\n", "a.gen": "", "b.gen": "", "gone.py": "", "new.py": ""})
    subprocess.run(["git", "-C", str(tmp_path), "add", "-f", "a.gen", "gone.py"], check=True)
    (tmp_path / "gone.py").unlink()
    assert paths(tmp_path) == [".gitignore", "a.gen", "new.py"]


def test_a_folder_that_its_checkout_ignores_is_still_a_repository(tmp_path: Path) -> None:
    checkout(tmp_path)
    write(tmp_path, {".gitignore": "vendor/\n", "vendor/project/a.py": "", "vendor/project/b.py": ""})
    assert paths(tmp_path / "vendor/project") == ["a.py", "b.py"]


def test_a_part_of_a_checkout_gives_paths_below_it(tmp_path: Path) -> None:
    checkout(tmp_path)
    write(tmp_path, {".gitignore": "*.log\n", "pkg/a.py": "", "pkg/sub/b.py": "", "pkg/c.log": "", "d": ""})
    assert paths(tmp_path / "pkg") == ["a.py", "sub/b.py"]


def test_without_git_the_ignore_files_still_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout(tmp_path)
    write(tmp_path, {".gitignore": "*.log\n", "a.py": "", "a.log": ""})
    monkeypatch.setenv("PATH", "")
    assert paths(tmp_path) == [".gitignore", "a.py"]


def test_a_repository_cannot_make_git_start_a_program(tmp_path: Path) -> None:
    checkout(tmp_path)
    write(tmp_path, {"a.py": ""})
    program = tmp_path.parent / f"{tmp_path.name}-program"
    program.write_text(f"#!/bin/sh\ntouch {program}-ran\n")
    program.chmod(0o755)
    subprocess.run(["git", "-C", str(tmp_path), "config", "core.fsmonitor", str(program)], check=True)
    assert paths(tmp_path) == ["a.py"]
    assert not Path(f"{program}-ran").exists()


def test_text_has_plain_newlines_and_no_byte_order_mark(tmp_path: Path) -> None:
    write(tmp_path, {"dos.py": b"\xef\xbb\xbfa\r\nb\r\n"})
    assert read_repository(tmp_path) == [SourceFile("dos.py", "a\nb\n")]


def test_no_folder(tmp_path: Path) -> None:
    write(tmp_path, {"file.py": ""})
    with pytest.raises(UserError, match="no repository at"):
        read_repository(tmp_path / "nowhere")
    with pytest.raises(UserError, match="is a file"):
        read_repository(tmp_path / "file.py")


# --- the target ------------------------------------------------------------------------------------------


def test_target_by_relative_absolute_and_working_folder_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"repository/pkg/a.py": "1\n2\n3\n"})
    root = tmp_path / "repository"
    monkeypatch.chdir(tmp_path)
    for name in ("pkg/a.py", root / "pkg/a.py", "repository/pkg/a.py", "pkg/../pkg/a.py"):
        assert read_target(root, name, 3) == SourceFile("pkg/a.py", "1\n2\n")


def test_targets_that_cannot_be(tmp_path: Path) -> None:
    root = write(tmp_path / "repository", {"pkg/a.py": "", "b.bin": b"\0", "c.py": b"\xff"})
    write(tmp_path, {"outside.py": ""})
    (root / "link.py").symlink_to(tmp_path / "outside.py")
    for name, message in {
        "nothing.py": "no file at",
        "pkg": "is a folder",
        "b.bin": "is binary",
        "c.py": "not UTF-8",
        "../outside.py": "outside the repository",
        "link.py": "outside the repository",
        "pkg/a.py/deeper": "cannot read",
    }.items():
        with pytest.raises(UserError, match=message):
            read_target(root, name)


@pytest.mark.parametrize(("line", "before"), [(1, ""), (2, "a\n"), (3, "a\n\x0cb\n"), (4, "a\n\x0cb\nc\n")])
def test_text_before_line(line: int, before: str) -> None:
    assert text_before_line("a\n\x0cb\nc\n", line, "x") == before
    assert text_before_line("a\n\x0cb\nc", line, "x") == before


@pytest.mark.parametrize("line", [0, -1, 5, 10**9])
def test_no_such_line(line: int) -> None:
    with pytest.raises(UserError, match="lines count from 1" if line < 1 else "has 3 lines: give at most 4"):
        text_before_line("a\nb\nc\n", line, "x.py")


@given(st.text("ab\n"), st.data())
def test_text_before_line_is_a_beginning(text: str, data: st.DataObject) -> None:
    lines = text.count("\n") + (not text.endswith("\n") and text != "")
    line = data.draw(st.integers(1, lines + 1))
    before = text_before_line(text, line, "x")
    assert before.count("\n") == line - 1
    assert (text + "\n").startswith(before)


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


@pytest.mark.parametrize("line", ["!", "\\", "a\\", "[z-a]"])
def test_a_gitignore_line_that_is_no_pattern_is_passed_over(tmp_path: Path, line: str) -> None:
    (tmp_path / ".gitignore").write_text(f"{line}\nhidden.py\n")
    for name in ("a.py", "hidden.py"):
        (tmp_path / name).write_text("x = 1\n")
    assert "hidden.py" not in (paths := {file.path for file in read_repository(tmp_path)})
    assert "a.py" in paths


def test_a_pipe_is_no_file_to_complete(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    with pytest.raises(UserError, match="not a regular file"):
        read_target(tmp_path, "pipe.py", None)
