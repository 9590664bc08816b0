"""Reading a repository and the file to complete."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaspan.errors import UserError
from megaspan.repository import SourceFile, read_repository, read_target, text_before_line


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


@pytest.mark.parametrize("line", ["!", "\\", "a\\", "[z-a]"])
def test_a_gitignore_line_that_is_no_pattern_is_passed_over(tmp_path: Path, line: str) -> None:
    (tmp_path / ".gitignore").write_text(f"{line}\nhidden.py\n")
    for name in ("a.py", "hidden.py"):
        (tmp_path / name).write_text("x = 1\n")
    assert "hidden.py" not in (paths := {file.path for file in read_repository(tmp_path)})
    assert "a.py" in paths


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


def test_a_pipe_is_no_file_to_complete(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    with pytest.raises(UserError, match="not a regular file"):
        read_target(tmp_path, "pipe.py", None)
