"""megaspan: the GLM-5.2 million-token system in one codebase."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megaspan.pretrained import load, save

__all__ = ["load", "save"]


def __getattr__(name: str) -> Any:
    """Import PyTorch only when a model is wanted, so that `megaspan --help` answers at once."""
    if name in __all__:
        from megaspan import pretrained

        return getattr(pretrained, name)
    raise AttributeError(f"module 'megaspan' has no attribute {name!r}")
