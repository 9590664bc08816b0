"""What a cache is handed, made of rows that are finished already."""

from types import SimpleNamespace
from typing import Any

from torch import Tensor


def finished(rows: Tensor) -> Any:
    """In place of a projection whose rows these are."""
    return SimpleNamespace(rows=rows)
