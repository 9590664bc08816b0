"""What is installed from a wheel is all that the package reads: a checkout hides what the wheel lacks."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> set[str]:
    """The files of a wheel built from a copy of the sources, without any index."""
    folder = tmp_path_factory.mktemp("tree")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", folder / "src", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    subprocess.run([sys.executable, "-c", BUILD, str(folder)], cwd=folder, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return set(zipfile.ZipFile(built).namelist())


def test_a_wheel_holds_every_file_of_the_package(wheel):
    sources = ROOT / "src"
    files = {
        path.relative_to(sources).as_posix()
        for path in (sources / "megaspan").rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    }
    assert files - wheel == set()


@pytest.mark.parametrize(
    "name",
    ["server/playground/index.html", "ops/product.h", "ops/index_topk/kernel.c", "train/chat_template.jinja"],
)
def test_a_wheel_holds_what_is_read_at_run_time(wheel, name):
    """The playground, sources of kernels, the chat template: one of each, by name."""
    assert f"megaspan/{name}" in wheel
