"""`megaspan bench slice`: some layers at real widths; a whole context read, and decoded after, in one run."""

from megaspan.bench.slice.options import PARTS, Options
from megaspan.bench.slice.report import Report, record, refuse, render
from megaspan.bench.slice.runner import run

__all__ = ["PARTS", "Options", "Report", "record", "refuse", "render", "run"]
