"""Page copies through a buffer: for main memory, and for host memory that a GPU cannot reach."""

from collections.abc import Callable

from torch import Tensor


def copy_buffered(
    source: Tensor,
    target: Tensor,
    source_pages: Tensor,
    target_pages: Tensor,
    buffer_bytes: int,
    keep_pace: Callable[[], None],
) -> None:
    """Set `target[target_pages]` to `source[source_pages]`, [N, B] and [M, B], `buffer_bytes` at a time.

    source_pages, target_pages: int64 [P], on the device of their side. From a GPU it returns when all has
    arrived; towards one it goes on in the current stream. keep_pace: called after each part.
    """
    count = max(1, buffer_bytes // (source.shape[1] * source.element_size()))
    for some_sources, some_targets in zip(source_pages.split(count), target_pages.split(count), strict=True):
        rows = source.index_select(0, some_sources)
        if target.is_cuda and not rows.is_cuda:
            rows = rows.pin_memory().to(target.device, non_blocking=True)
        target.index_copy_(0, some_targets, rows.to(target.device))
        keep_pace()
