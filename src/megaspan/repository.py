"""A repository as a prompt: read its text files, order them by nearness, pack them into a context."""

import contextlib
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol

from pathspec import GitIgnoreSpec

from megaspan.errors import UserError

LARGEST_FILE = 1 << 20
BINARY_PROBE = 8192
LOCK_FILES = {"package-lock.json", "npm-shrinkwrap.json", "pnpm-lock.yaml", "go.sum", "bun.lockb"}
SOURCE_ROOTS = ("", "src", "lib", "python")

IMPORT = re.compile(r"^[ \t]*import[ \t]+([\w., \t]+)", re.MULTILINE)
FROM_IMPORT = re.compile(
    r"^[ \t]*from[ \t]+(\.{0,64})([\w.]{0,512})[ \t]+import\s+(\([^()]{0,8192}\)|[^\n#;(]+)", re.MULTILINE
)


@dataclass(frozen=True)
class SourceFile:
    """A text file: its path relative to the repository, with forward slashes, and its text."""

    path: str
    text: str


@dataclass(frozen=True)
class Prompt:
    """A packed repository. Paths are in the order of the prompt, the target last."""

    token_ids: list[int]
    files_included: tuple[str, ...]
    files_left_out: tuple[str, ...]
    truncated: str | None
    """The file whose beginning was cut off to fit, if any."""


class Encoder(Protocol):
    """What packing needs of a tokenizer."""

    def encode(self, text: str) -> list[int]: ...

    def special(self, token: str) -> int: ...


# --- reading ---------------------------------------------------------------------------------------------


def read_repository(
    directory: str | os.PathLike, on_skip: Callable[[str, str], None] = lambda path, reason: None
) -> list[SourceFile]:
    """The text files of a repository, by path.

    What git ignores is left out: asked of git in a checkout, else worked out from the .gitignore files.
    So are lock files, symbolic links (a file inside the tree is read under its own name), files above
    1 MiB, and files that are binary (a NUL in the first 8 KiB) or not UTF-8; `on_skip(path, reason)`
    hears of each of these.
    Raises UserError when `directory` is not a readable folder.
    """
    root = Path(directory)
    if not root.exists():
        raise UserError(f"no repository at {root}: give the path of an existing folder")
    if not root.is_dir():
        raise UserError(f"{root} is a file, not a repository: give the folder that holds it")
    if not os.access(root, os.R_OK | os.X_OK):
        raise UserError(f"cannot read the folder {root}: permission denied")
    files = []
    for path in sorted(_listed_by_git(root) or _walk(root, on_skip)):
        reason, text = _read_text(root, path)
        if text is None:
            on_skip(path, reason)
        else:
            files.append(SourceFile(path, text))
    return files


def _listed_by_git(root: Path) -> set[str]:
    """Tracked and unignored files; empty outside a checkout, without git, or in a folder that git ignores."""
    # The repository may be a stranger's: its configuration must not start a program of its choice.
    command = ["git", "-c", "core.fsmonitor=false", "ls-files", "-z", "-co", "--exclude-standard"]
    # Set while git runs a hook, these would point it at another repository.
    elsewhere = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"}
    environment = {key: value for key, value in os.environ.items() if key not in elsewhere}
    try:
        listing = subprocess.run(command, cwd=root, env=environment, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return set()
    return {os.fsdecode(name) for name in listing.split(b"\0") if name}


def _ignore_rules(path: Path, prefix: str, on_skip: Callable[[str, str], None]) -> GitIgnoreSpec:
    """The rules of a .gitignore file, without the lines that are no patterns, as git reads it."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        on_skip(f"{prefix}.gitignore", "unreadable")
        return GitIgnoreSpec([])
    patterns = []
    for line in lines:
        with contextlib.suppress(ValueError, re.error):
            patterns.extend(GitIgnoreSpec.from_lines([line]).patterns)
    return GitIgnoreSpec(patterns)


def _walk(root: Path, on_skip: Callable[[str, str], None]) -> set[str]:
    """Files that no .gitignore between them and `root` excludes."""

    def visit(folder: Path, prefix: str, specs: list[tuple[str, GitIgnoreSpec]]) -> Iterator[str]:
        rules = folder / ".gitignore"
        if rules.is_file():
            specs = [*specs, (prefix, _ignore_rules(rules, prefix, on_skip))]
        try:
            entries = list(os.scandir(folder))
        except OSError:
            on_skip(prefix, "unreadable")
            return
        for entry in entries:
            path = prefix + entry.name
            is_folder = entry.is_dir(follow_symlinks=False)
            if entry.name == ".git" or _ignored(path + "/" * is_folder, specs):
                continue
            if is_folder:
                yield from visit(Path(entry.path), path + "/", specs)
            else:
                yield path

    return set(visit(root, "", []))


def _ignored(path: str, specs: Sequence[tuple[str, GitIgnoreSpec]]) -> bool:
    """The deepest .gitignore with a word on the path decides; within a file, its last matching line does."""
    for prefix, spec in reversed(specs):
        verdict = spec.check_file(path[len(prefix) :]).include
        if verdict is not None:
            return verdict
    return False


def _read_text(root: Path, path: str) -> tuple[str, str | None]:
    """("", text) of a file that belongs in a prompt, else (why not, None)."""
    file = root / path
    name = PurePosixPath(path).name
    if name in LOCK_FILES or name.endswith(".lock"):
        return "lock file", None
    if file.is_symlink():
        return "symbolic link", None
    if not file.is_file():
        return "not a file", None
    try:
        path.encode()
        if file.stat().st_size > LARGEST_FILE:
            return "larger than 1 MiB", None
        return "", decode(file.read_bytes())
    except UnicodeError:
        return "not text", None
    except OSError:
        return "unreadable", None


def decode(data: bytes) -> str:
    """UTF-8 text with plain newlines and no byte-order mark, as the model was trained on.

    Raises UnicodeError when `data` is binary or not UTF-8.
    """
    if b"\0" in data[:BINARY_PROBE]:
        raise UnicodeError("binary")
    return data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")


def read_text(path: Path) -> str:
    """The text of a file that the user named. Raises UserError when there is none, or it is no text."""
    try:
        return decode(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"no file at {path}") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder: give a file") from None
    except UnicodeError as error:
        what = "binary" if str(error) == "binary" else "not UTF-8 text"
        raise UserError(f"{path} is {what}: give a text file") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def read_target(directory: str | os.PathLike, file: str | os.PathLike, line: int | None = None) -> SourceFile:
    """The file to complete, with its text before line `line` (1 is the first; None is the end of the file).

    `file` is relative to the repository, or to the working folder when only that exists, or absolute. Raises
    UserError when it is outside the repository, is no text file, or has no such line.
    """
    root = Path(directory).resolve()
    inside = root / file
    try:
        path = (inside if inside.exists() or not Path(file).exists() else Path(file)).resolve()
    except (RuntimeError, ValueError):
        raise UserError(f"{file} leads nowhere: give the path of a file") from None
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise UserError(f"{file} is not a regular file: give the path of a text file")
    if not path.is_relative_to(root):
        raise UserError(f"{file} is outside the repository {directory}")
    text = read_text(path)
    relative = path.relative_to(root).as_posix()
    return SourceFile(relative, text if line is None else text_before_line(text, line, relative))


def text_before_line(text: str, line: int, name: str) -> str:
    """Lines 1 to `line` - 1, each ended by a newline, so that a completion begins at the start of `line`."""
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    if line < 1:
        raise UserError(f"line {line} does not exist: lines count from 1")
    if line > len(lines) + 1:
        raise UserError(
            f"line {line} is past the end of {name}, which has {len(lines)} lines: "
            f"give at most {len(lines) + 1}"
        )
    return "".join(before + "\n" for before in lines[: line - 1])


# --- ordering --------------------------------------------------------------------------------------------


def order_by_distance(files: Iterable[SourceFile], target: SourceFile) -> list[SourceFile]:
    """The files, nearest last: those the target imports, then by folder steps from it, extension and name."""
    imported = imported_paths(target, {file.path for file in files})
    home = PurePosixPath(target.path)

    def nearness(file: SourceFile) -> tuple[bool, int, bool, str]:
        path = PurePosixPath(file.path)
        return file.path in imported, -_steps(path.parent, home.parent), path.suffix == home.suffix, file.path

    return sorted(files, key=nearness)


def _steps(start: PurePosixPath, end: PurePosixPath) -> int:
    """How many folders one goes up and down from one folder to another."""
    shared = 0
    for here, there in zip(start.parts, end.parts, strict=False):
        if here != there:
            break
        shared += 1
    return len(start.parts) + len(end.parts) - 2 * shared


def imported_paths(target: SourceFile, paths: set[str]) -> set[str]:
    """Those of `paths` that a Python file imports, as far as its import lines tell without running it."""
    if not target.path.endswith((".py", ".pyi")):
        return set()
    folders = [folder.as_posix() for folder in PurePosixPath(target.path).parents]
    roots = [str(PurePosixPath(folder, root)) for folder in folders for root in SOURCE_ROOTS]
    modules: list[PurePosixPath] = []
    for dots, module, names in _imports(target.text):
        if len(dots) > len(folders):
            continue
        parts = [part for part in module.split(".") if part]
        for base in [folders[len(dots) - 1]] if dots else roots:
            package = PurePosixPath(base, *parts)
            modules += [package, *(package / name for name in names)]
    candidates = (str(module) + ending for module in modules for ending in (".py", "/__init__.py", ".pyi"))
    return paths.intersection(candidates) - {target.path}


def _imports(text: str) -> Iterator[tuple[str, str, list[str]]]:
    """(leading dots, module, imported names) of each import line."""
    for match in IMPORT.finditer(text):
        for module in match[1].split(","):
            if words := module.split():
                yield "", words[0], []
    for match in FROM_IMPORT.finditer(text):
        listing = re.sub(r"#[^\n]*", "", match[3]).strip("() \t\n")
        yield match[1], match[2], [name.split()[0] for name in listing.split(",") if name.split()]


# --- packing ---------------------------------------------------------------------------------------------


def pack(
    tokenizer: Encoder,
    files: Sequence[SourceFile],
    target_path: str,
    target_text_before_line: str,
    context: int,
    name: str = "repository",
) -> Prompt:
    """The repository `name` as at most `context` token ids, ending with the target's text.

    `files` are farthest first, as `order_by_distance` gives them. The nearest are taken until the context is
    full; the farthest one taken keeps only its end, so that the context is filled exactly. The target is
    whole unless it alone is too long, and then keeps its end. Raises UserError when not even that fits.
    """
    opening = [tokenizer.special("<|repository|>"), *tokenizer.encode(f"{name}\n")]
    header, ids = _encode(tokenizer, SourceFile(target_path, target_text_before_line))
    room = context - len(opening)
    least = len(opening) + min(len(header) + 1, len(ids))
    if context < least:
        raise UserError(f"a context of {context} tokens is too small: {target_path} needs at least {least}")
    truncated = target_path if len(ids) > room else None
    packed, included = [_keep_end(header, ids, room)], [target_path]
    others = [file for file in files if file.path != target_path]
    while others and (room := room - len(packed[0])) > 0:
        file = others.pop()
        header, ids = _encode(tokenizer, file)
        truncated = file.path if len(ids) > room else None
        packed.insert(0, _keep_end(header, ids, room))
        included.insert(0, file.path)
    token_ids = opening + [token_id for ids in packed for token_id in ids]
    return Prompt(token_ids, tuple(included), tuple(file.path for file in others), truncated)


def _encode(tokenizer: Encoder, file: SourceFile) -> tuple[list[int], list[int]]:
    """Token ids of the line that names a file, and of that line with the file's text."""
    marker = tokenizer.special("<|file|>")
    header = f"{file.path}\n"
    return [marker, *tokenizer.encode(header)], [marker, *tokenizer.encode(header + file.text)]


def _keep_end(header: list[int], ids: list[int], room: int) -> list[int]:
    """At most `room` ids: all, or the file's name and its end, or only its end where the name has no room."""
    if len(ids) <= room:
        return ids
    if len(header) < room:
        return header + ids[len(header) - room :]
    return ids[len(ids) - room :]
