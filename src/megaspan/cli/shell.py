"""The shell of every command: bad input of any kind is one line, and options that many commands share."""

import errno
import io
import json
import os
import re
import sys
from enum import StrEnum
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from megaspan.errors import UserError

MODEL = Path("models/span-code")
UNWRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT}
UNWRITABLE |= {errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP}
FIELD = re.compile(r"\b[a-z]+(?:_[a-z]+)+\b")
SPIN_COUNT = 2000  # some 40 µs: what a thread that sleeps instead takes to wake up


class Commands(TyperGroup):
    """Bad input of any kind is one line on stderr and exit code 2; the unforeseen keeps its traceback."""

    def main(self, *args: Any, standalone_mode: bool = True, **kwargs: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # without UTF-8: escapes, no traceback
                stream.reconfigure(errors="backslashreplace")
        try:
            code = super().main(*args, standalone_mode=False, **kwargs)
        except UserError as error:
            _fail(str(error))
        except OSError as error:
            # Where a file or folder that the user named does not let itself be used.
            if error.errno not in UNWRITABLE:
                raise
            if error.filename is None:
                _fail(f"cannot write to standard output: {error.strerror}")
            _fail(f"cannot use {error.filename}: {error.strerror}")
        except typer.Abort:
            sys.exit(130)
        except Exception as error:
            # The classes of usage errors are not part of typer's public names; this method is.
            if not hasattr(error, "format_message"):
                raise
            _fail(error.format_message())  # pyright: ignore[reportAttributeAccessIssue]
        else:
            sys.exit(code if isinstance(code, int) else 0)

    def invoke(self, ctx: typer.Context) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Where a command sets fields of a config, an error about one of them names the option instead."""
        try:
            return super().invoke(ctx)
        except UserError as error:
            options = _options(self.commands[ctx.invoked_subcommand or ""])
            raise UserError(FIELD.sub(lambda field: options.get(field[0], field[0]), str(error))) from error


def _options(command: Any) -> dict[str, str]:
    """The options of a command and of those below it, by their parameters."""
    own = {parameter.name: parameter.opts[0] for parameter in command.params}
    return reduce(or_, map(_options, getattr(command, "commands", {}).values()), own)


def share_processors() -> None:
    """Keep parallel loops from spinning on processors that others need. For use before torch is loaded.

    At the end of a loop GNU's OpenMP spins for milliseconds, until the last thread is there. Where another
    process keeps that thread from running, each of the hundreds of loops of a decoding step takes as long.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))


def _fail(message: str) -> None:
    print("megaspan:", " ".join(message.split()), file=sys.stderr)
    sys.exit(2)


class DType(StrEnum):
    auto, float32, bfloat16 = "auto", "float32", "bfloat16"


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
ModelFolder = Annotated[Path, typer.Option(help="Folder of a Hugging Face glm_moe_dsa checkpoint.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads; all cores unless given.")]


def print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, indent=2))
