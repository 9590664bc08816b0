"""The documents: commands that they show exist with every option, and their links lead somewhere."""

import re
from pathlib import Path

import pytest
import typer.main

from megaspan.cli import app

ROOT = Path(__file__).parents[1]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
COMMAND = re.compile(r"^\s*(?:\$ )?(?:\.venv/bin/)?megaspan (\S.*)$")
FENCED = re.compile(r"^```.*?$\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OPTION = re.compile(r"--[a-z][a-z0-9-]*")
LINK = re.compile(r"\]\(([^)\s]+)\)")


def commands(markdown: str) -> list[str]:
    """What follows `megaspan` in the lines of fenced blocks and between backticks."""
    lines = [line for block in FENCED.findall(markdown) for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`([^`\n]+)`", FENCED.sub("", markdown))
    return [match[1] for line in lines if (match := COMMAND.match(line))]


def check(command: str) -> None:
    """Follow the words down to a subcommand; every option must be one of those passed on the way."""
    place, known = typer.main.get_command(app), {"--help"}
    words = re.sub(r"\s(?:#|&&|\| \w).*", "", command).split()
    while True:
        known |= {name for option in place.params for name in (*option.opts, *option.secondary_opts)}
        subcommands = getattr(place, "commands", {})
        if not subcommands or not words or words[0].startswith("-"):
            break
        assert words[0] in subcommands, f"megaspan {command}: no command {words[0]!r}"
        place = subcommands[words.pop(0)]
    assert set(OPTION.findall(" ".join(words))) <= known, f"megaspan {command}: not an option"


def test_commands_are_found_where_documents_have_them() -> None:
    block = "```sh\n$ megaspan c \\\n  --d\nmegaspan: no\n```\n"
    markdown = f"`megaspan a --b`, `x`\n{block}| `megaspan e f [--g N]` |\n"
    assert commands(markdown) == ["c    --d", "a --b", "e f [--g N]"]


@pytest.mark.parametrize("command", ["nothing", "bench nothing", "plan --nothing 1", "--nothing"])
def test_what_does_not_exist_is_noticed(command: str) -> None:
    with pytest.raises(AssertionError, match="megaspan"):
        check(command)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_exists_with_its_options(document: Path) -> None:
    for command in commands(document.read_text(encoding="utf-8")):
        check(command)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_relative_link_leads_to_a_file(document: Path) -> None:
    for link in LINK.findall(FENCED.sub("", document.read_text(encoding="utf-8"))):
        if not re.match(r"[a-z]+:|#", link):
            assert (document.parent / link.split("#")[0]).exists(), link


def test_the_readme_shows_the_main_commands() -> None:
    shown = {command.split()[0] for command in commands((ROOT / "README.md").read_text(encoding="utf-8"))}
    assert {"complete", "plan"} <= shown
