"""The pinned list of Python projects that the corpus is made of, and fetching them.

A manifest is a JSON list with one project a line: `name`, `version`, `file` (a wheel), `sha256`, `license`,
`split` ("train" or "heldout") and `limit`, the most bytes of text that the project may add. Wheels are
fetched by pip, which checks the digests; nothing in them is ever executed.
"""

import hashlib
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from email import message_from_string
from pathlib import Path

from megaspan.errors import UserError

SPLITS = ("train", "heldout")

PLATFORMS = [
    f"{platform}_x86_64"
    for platform in (
        *(f"manylinux_2_{minor}" for minor in (34, 31, 28, 27, 24, 17, 12, 5)),
        "manylinux2014",
        "manylinux2010",
        "manylinux1",
        "linux",
    )
]
"""Fixed, so that every machine is given the same files; only their Python text is read."""

PERMISSIVE_EXPRESSIONS = frozenset(
    [
        "0BSD",
        "Apache-2.0",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "BSL-1.0",
        "CC0-1.0",
        "CNRI-Python",
        "HPND",
        "ISC",
        "MIT",
        "MIT-0",
        "MIT-CMU",
        "PSF-2.0",
        "Python-2.0",
        "Unlicense",
        "Zlib",
        "ZPL-2.1",
    ]
)
PERMISSIVE_WORDING = re.compile(
    r"^\W*(the )?(new |modified |simplified )?([023][- ]clause )?"
    r"(mit|expat|bsd|apache|isc|psf|psfl|python software foundation|public domain|unlicense|zlib|zpl"
    r"|zope public)\b",
    re.IGNORECASE,
)
RESTRICTIVE_WORDING = re.compile(
    r"gpl|gnu |mpl|mozilla|copyleft|commercial|proprietary|eupl|cecill", re.IGNORECASE
)


@dataclass(frozen=True, kw_only=True)
class Project:
    """One pinned wheel."""

    name: str
    version: str
    file: str
    sha256: str
    license: str
    split: str
    limit: int


def load_manifest(path: Path) -> list[Project]:
    """Read a manifest; a UserError names the entry that is wrong."""
    try:
        entries = json.loads(Path(path).read_text(encoding="utf-8"))
        projects = [Project(**entry) for entry in entries]
    except OSError as error:
        raise UserError(f"cannot read the manifest {path}: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is not a corpus manifest: {error}") from error
    for project in projects:
        if project.split not in SPLITS:
            raise UserError(f"{path}: {project.name} has the split {project.split!r}, not one of {SPLITS}")
    return projects


def save_manifest(projects: Iterable[Project], path: Path) -> None:
    lines = [json.dumps(asdict(project)) for project in sorted(projects, key=lambda project: project.name)]
    Path(path).write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(
    projects: list[Project], folder: Path, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Download into `folder` every wheel that is not there yet; all digests are checked, kept files' too."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [
        project
        for project in projects
        if not (folder / project.file).is_file() or file_digest(folder / project.file) != project.sha256
    ]
    done = len(projects) - len(missing)
    on_progress(done, len(projects))
    batch_size = 8
    for first in range(0, len(missing), batch_size):
        batch = missing[first : first + batch_size]
        _download(batch, folder)
        done += len(batch)
        on_progress(done, len(projects))


def _download(batch: list[Project], folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        requirements = Path(scratch) / "requirements.txt"
        requirements.write_text(
            "".join(f"{item.name}=={item.version} --hash=sha256:{item.sha256}\n" for item in batch)
        )
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--require-hashes", "--python-version", "3.11", "--dest", str(folder)]
        for platform in PLATFORMS:
            command += ["--platform", platform]
        finished = subprocess.run([*command, "-r", str(requirements)], capture_output=True, text=True)
    if finished.returncode:
        names = ", ".join(item.name for item in batch)
        lines = finished.stderr.splitlines() or ["pip gave no reason"]
        reason = next((line for line in lines if line.startswith("ERROR: ")), lines[-1])
        raise UserError(f"cannot fetch {names}: {reason.removeprefix('ERROR: ')}")


def permissive_license(wheel: Path) -> str | None:
    """The license that a wheel's metadata states when it is a permissive one, else None.

    The sources in order: the license expression, the classifiers, the first line of the license field.
    """
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        metadata = message_from_string(archive.read(path).decode("utf-8", "replace"))
    expression = metadata.get("License-Expression")
    if expression:
        names = set(re.split(r"[\s()]+", expression)) - {"AND", "OR", ""}
        return expression if names <= PERMISSIVE_EXPRESSIONS else None
    stated = [
        value.split("::")[-1].strip()
        for value in metadata.get_all("Classifier", [])
        if value.startswith("License") and value.count("::") > 1
    ]
    wording = (metadata.get("License") or "").strip().split("\n")[0][:60]
    stated = stated or ([wording] if wording else [])
    permissive = stated and all(PERMISSIVE_WORDING.match(text) for text in stated)
    if not permissive or any(RESTRICTIVE_WORDING.search(text) for text in [*stated, wording]):
        return None
    return "; ".join(sorted(set(stated)))


def pin(wheel: Path, heldout: Iterable[str], heldout_share: float, limit: int) -> Project | None:
    """The manifest's entry for a wheel, or None when its license is not permissive.

    A project is held out when `heldout` names it, or by its name's digest for `heldout_share` of all names.
    """
    stated = permissive_license(wheel)
    if stated is None:
        return None
    name, version = wheel.name.split("-")[:2]
    name = re.sub(r"[-_.]+", "-", name).lower()
    draw = int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) / 2**32
    split = "heldout" if name in heldout or draw < heldout_share else "train"
    return Project(
        name=name,
        version=version,
        file=wheel.name,
        sha256=file_digest(wheel),
        license=stated,
        split=split,
        limit=limit,
    )
