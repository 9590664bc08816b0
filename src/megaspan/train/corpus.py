"""From wheels to token files: filter, de-duplicate, order, tokenise.

One document is one project, in the text format that `complete` uses too:
`<|repository|>` name, then per file `<|file|>` path and text, and `<|endoftext|>` at the end.
"""

import hashlib
import json
import re
import string
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megaspan.errors import UserError
from megaspan.tokenizer import Tokenizer
from megaspan.train.manifest import SPLITS, Project, fetch, load_manifest

SMALLEST_FILE = 100  # bytes
LARGEST_FILE = 256 * 1024  # bytes
LONGEST_LINE = 1000  # characters
SHINGLE_LINES = 8
SHINGLE_SAMPLE = 4  # one in four shingles is remembered
DUPLICATE_SHARE = 0.5

VENDORED = re.compile(
    r"(^|/)(_?vendor(ed)?(_packages)?|third_?party|_?extern(al)?|node_modules|[^/]+\.libs)/"
)
GENERATED = re.compile(
    r"do not edit|(auto-?(matically )?generated|generated) (by|from|file|code|with)", re.IGNORECASE
)
DATA_LINE = re.compile(
    r"""[uUbBrR]{0,2}["'].*["'],?$|[-+(\[{]*\d[\d\s.,eExXa-fA-F()\[\]{}+-]*$|[)\]}(\[{]+,?$"""
)
ASCII_LETTERS = string.ascii_letters.encode()
NOT_ASCII = bytes(range(128, 256))


@dataclass(frozen=True)
class SourceFile:
    path: str
    text: str


@dataclass(frozen=True)
class Repository:
    """What is left of one project: its name, split and files, in document order."""

    name: str
    split: str
    files: list[SourceFile]


def is_code(text: str) -> bool:
    """False for what teaches a model nothing: too short or long, minified, generated, or mostly data."""
    content = text.encode()
    if not SMALLEST_FILE <= len(content) <= LARGEST_FILE or GENERATED.search(text[:1000]):
        return False
    lines = [line.strip() for line in text.split("\n")]
    lines = [line for line in lines if line]
    if not lines or max(map(len, lines)) > LONGEST_LINE:
        return False
    letters = len(content) - len(content.translate(None, ASCII_LETTERS))
    foreign = len(content) - len(content.translate(None, NOT_ASCII))
    if letters < 0.4 * sum(map(len, lines)) or foreign > 0.1 * letters:
        return False
    return sum(DATA_LINE.match(line) is not None for line in lines) < 0.5 * len(lines)


def decode_source(content: bytes) -> str | None:
    """The text of a Python file with plain newlines, or None when it is not UTF-8."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
    if "\0" in text:
        return None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def document_order(path: str, seed: int = 0) -> list[bytes]:
    """A sort key: every folder's entries in a seeded shuffle, each folder's subtree kept together."""
    parts = path.split("/")
    prefixes = ("/".join(parts[: depth + 1]) for depth in range(len(parts)))
    return [hashlib.blake2b(f"{seed}:{prefix}".encode(), digest_size=8).digest() for prefix in prefixes]


class Deduplicator:
    """Remembers every file it has passed; a copy or a near copy of one is refused.

    Copies are equal up to white space. A near copy shares at least half of its runs of 8 lines
    (blank lines and indentation left out) with files passed before.
    """

    def __init__(self) -> None:
        self.digests: set[bytes] = set()
        self.shingles: set[int] = set()

    def passes(self, text: str) -> bool:
        lines = [line.strip() for line in text.split("\n")]
        lines = [line for line in lines if line]
        digest = hashlib.blake2b("".join("".join(lines).split()).encode(), digest_size=16).digest()
        if digest in self.digests:
            return False
        shingles = self._sampled_shingles(lines)
        shared = sum(shingle in self.shingles for shingle in shingles)
        if len(shingles) >= 2 and shared >= DUPLICATE_SHARE * len(shingles):
            return False
        self.digests.add(digest)
        self.shingles.update(shingles)
        return True

    @staticmethod
    def _sampled_shingles(lines: list[str]) -> list[int]:
        hashes = np.array([zlib.crc32(line.encode()) for line in lines], dtype=np.uint64)
        if len(hashes) < SHINGLE_LINES:
            return []
        runs = np.lib.stride_tricks.sliding_window_view(hashes, SHINGLE_LINES)
        combined = np.zeros(len(runs), dtype=np.uint64)
        for column in range(SHINGLE_LINES):
            combined = (combined + runs[:, column]) * np.uint64(0x9E3779B97F4A7C15)
            combined ^= combined >> np.uint64(29)
        unique = np.unique(combined)
        return unique[unique % np.uint64(SHINGLE_SAMPLE) == 0].tolist()


def read_repository(wheel: Path, project: Project, deduplicator: Deduplicator) -> Repository:
    """The project's files that pass the filters, in document order, up to its limit in bytes."""
    files: list[SourceFile] = []
    size = 0
    with zipfile.ZipFile(wheel) as archive:
        paths = [
            member.filename
            for member in archive.infolist()
            if member.filename.endswith(".py")
            and SMALLEST_FILE <= member.file_size <= LARGEST_FILE
            and not VENDORED.search(member.filename)
        ]
        for path in sorted(paths, key=document_order):
            text = decode_source(archive.read(path))
            if text is None or not is_code(text):
                continue
            size_after = size + len(text.encode())
            if size_after > project.limit:
                continue
            if deduplicator.passes(text):
                files.append(SourceFile(path, text))
                size = size_after
    return Repository(project.name, project.split, files)


def read_repositories(projects: Iterable[Project], wheels: Path) -> Iterator[Repository]:
    """All projects, held-out ones first, so that no training file nearly equals a held-out one."""
    deduplicator = Deduplicator()
    ordered = sorted(projects, key=lambda project: (project.split != "heldout", document_order(project.name)))
    for project in ordered:
        yield read_repository(wheels / project.file, project, deduplicator)


def document_tokens(repository: Repository, tokenizer: Tokenizer) -> tuple[np.ndarray, int]:
    """The document's token ids, uint16 `[N]`, and its bytes of text (special tokens are none)."""
    texts = [f"{repository.name}\n", *(f"{file.path}\n{file.text}" for file in repository.files)]
    heads = [tokenizer.special("<|repository|>")] + [tokenizer.special("<|file|>")] * len(repository.files)
    ids: list[int] = []
    for head, encoded in zip(heads, tokenizer.encode_batch(texts), strict=True):
        ids.append(head)
        ids.extend(encoded)
    ids.append(tokenizer.special("<|endoftext|>"))
    return np.array(ids, dtype=np.uint16), sum(len(text.encode()) for text in texts)


def progress_bar() -> Progress:
    return Progress(
        TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    )


def build_corpus(manifest: Path, tokenizer_dir: Path, folder: Path, wheels: Path | None = None) -> dict:
    """Write `train.bin` and `heldout.bin` (flat little-endian uint16 ids) and `documents.json` into `folder`.

    Returns what `documents.json` holds: per split `tokens`, `bytes`, and its `documents` in file order, each
    with `name`, `start` (its first token), `tokens`, `bytes` (of UTF-8 text, specials are none) and `files`.
    Wheels are kept in `wheels`, by default `folder/wheels`. Same manifest and tokenizer, same bytes.
    """
    projects = load_manifest(manifest)
    tokenizer = Tokenizer.load(tokenizer_dir)
    missing = {"<|repository|>", "<|file|>", "<|endoftext|>"} - tokenizer.special_tokens.keys()
    if missing or tokenizer.vocab_size > 2**16:
        raise UserError(
            f"{tokenizer_dir} cannot frame a corpus: it needs at most 65,536 tokens, among them "
            "<|repository|>, <|file|> and <|endoftext|>, as `megaspan tokenizer` makes them"
        )
    folder = Path(folder)
    wheels = Path(wheels) if wheels is not None else folder / "wheels"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with progress_bar() as progress:
            fetch_bar = progress.add_task("fetching wheels", total=len(projects))
            fetch(
                projects, wheels, lambda done, total: progress.update(fetch_bar, completed=done, total=total)
            )
            read_bar = progress.add_task("filtering, tokenising", total=len(projects))
            repositories = progress.track(read_repositories(projects, wheels), task_id=read_bar)
            return write_corpus(repositories, tokenizer, folder)
    except OSError as error:
        raise UserError(f"cannot write the corpus to {folder}: {error}") from error


def write_corpus(repositories: Iterable[Repository], tokenizer: Tokenizer, folder: Path) -> dict:
    """`build_corpus` without the fetching. The files take their names only once they are whole."""
    summary: dict = {split: {"tokens": 0, "bytes": 0, "documents": []} for split in SPLITS}
    unfinished = {split: folder / f"{split}.bin.part" for split in SPLITS}
    with ExitStack() as stack:
        outputs = {split: stack.enter_context(path.open("wb")) for split, path in unfinished.items()}
        for repository in repositories:
            if repository.files:
                ids, size = document_tokens(repository, tokenizer)
                outputs[repository.split].write(ids.astype("<u2").tobytes())
                add_document(summary[repository.split], repository, len(ids), size)
    for split, path in unfinished.items():
        path.replace(folder / f"{split}.bin")
    (folder / "documents.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return summary


def add_document(split: dict, repository: Repository, tokens: int, size: int) -> None:
    entry = {
        "name": repository.name,
        "start": split["tokens"],
        "tokens": tokens,
        "bytes": size,
        "files": len(repository.files),
    }
    split["documents"].append(entry)
    split["tokens"] += tokens
    split["bytes"] += size
