"""Compile the C file beside an operation on first use and load it, or say that it cannot be had.

The compiler tunes for the processor it runs on, so the library is built where it runs and kept in a
cache folder under a name that holds the source with the headers beside it, the flags, the compiler and the
processor. Without a compiler, or with MEGASPAN_NATIVE=0, `load` returns None and the callers fall back to
plain PyTorch.
MEGASPAN_CFLAGS adds flags at the end, say `-mno-avx512f`.
"""

import ctypes
import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fopenmp", "-shared", "-fPIC")
# What vectorised sums need of -ffast-math, without its link-time change of the process's denormal mode.
FLAGS += ("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math")


@functools.cache
def load(source: Path) -> ctypes.CDLL | None:
    """Return the shared library built from the C file `source`, or None where none can be built."""
    if os.environ.get("MEGASPAN_NATIVE", "1") == "0":
        return None
    wanted = os.environ.get("CC", "gcc")
    compiler = shutil.which(wanted)
    if compiler is None:
        warnings.warn(f"no compiler {wanted!r}: using the slower PyTorch versions", stacklevel=2)
        return None
    try:
        library = cache_folder() / f"{source.parent.name}-{_fingerprint(source, compiler)}.so"
        if not library.exists():
            _compile(compiler, source, library)
        try:
            return ctypes.CDLL(str(library))
        except OSError:  # a damaged file in the cache
            _compile(compiler, source, library)
            return ctypes.CDLL(str(library))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        name = f"{source.parent.name}/{source.name}"
        warnings.warn(f"{name} did not build, using the slower PyTorch version: {detail}", stacklevel=2)
        return None


def cache_folder() -> Path:
    """Where built libraries are kept: $MEGASPAN_CACHE, else megaspan/ in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("MEGASPAN_CACHE") or Path(base) / "megaspan")


def _flags() -> tuple[str, ...]:
    return (*FLAGS, *shlex.split(os.environ.get("MEGASPAN_CFLAGS", "")))


def _fingerprint(source: Path, compiler: str) -> str:
    version = subprocess.run([compiler, "-v"], capture_output=True, text=True, check=False).stderr
    parts = (*texts(source), " ".join(_flags()), version, _processor(), torch.__version__)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def texts(file: Path) -> Iterator[str]:
    """The text of a C file and of the headers beside it that it includes, directly or through another."""
    text = file.read_text()
    yield text
    for header in re.findall(r'^\s*#\s*include\s+"(.+?)"', text, re.MULTILINE):
        yield from texts(file.parent / header)


def _processor() -> str:
    """A string that differs between machines whose instruction sets differ."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    kept = {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}
    return "\n".join(sorted(kept))


def _compile(compiler: str, source: Path, library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / library.name
        runtime = openmp_of_torch()
        openmp = [str(runtime), f"-Wl,-rpath,{runtime.parent}"] if runtime is not None else []
        command = [compiler, *_flags(), str(source), "-o", str(built), *openmp, "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True)
        built.replace(library)  # atomic: another process sees a whole library or none


def openmp_of_torch() -> Path | None:
    """PyTorch's OpenMP runtime, which the libraries link: two in one process would fight for the cores."""
    runtimes = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return runtimes[0] if runtimes else None
