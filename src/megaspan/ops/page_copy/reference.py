"""Page copies in plain PyTorch, without regard to time or memory."""

from collections.abc import Sequence

from torch import Tensor


def copy_pages_reference(
    sources: Sequence[Tensor], targets: Sequence[Tensor], source_pages: Tensor, target_pages: Tensor
) -> None:
    """Set in every segment `target[target_pages]` to `source[source_pages]`; see `PageCopy`."""
    for source, target in zip(sources, targets, strict=True):
        target[target_pages] = source[source_pages].to(target.device)
