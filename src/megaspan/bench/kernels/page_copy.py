"""Pages of several layers between the device's memory and the host's."""

from collections.abc import Iterator
from functools import partial

import torch

from megaspan.bench.kernels.registry import Case, Scale, Trial, WrongResult, operation
from megaspan.costs.memory import latent_row_bytes
from megaspan.ops.page_copy import PageCopy

LAYERS = 8
PAGES_FACTOR = 32  # pages that are copied for each sequence of the largest batch


@operation("page_copy")
def page_copy_cases(scale: Scale) -> Iterator[Case]:
    pages = PAGES_FACTOR * scale.batches[-1]
    row_bytes = latent_row_bytes(scale.config, "fp8") // 8 * 8
    for to_host in (True, False):
        yield Case(
            name=f"page_copy {'to' if to_host else 'from'} the host, {pages} pages of {LAYERS} layers",
            make=partial(_make, pages, scale.page_size * row_bytes, to_host),
            unit="GB/s",
            nbytes=pages * LAYERS * scale.page_size * row_bytes,
            through_host=True,
        )


def _make(pages: int, page_bytes: int, to_host: bool, device: torch.device) -> Trial:
    on_gpu, shape = device.type == "cuda", (LAYERS, pages, page_bytes // 8)
    here = torch.randint(1 << 62, shape, device=device)
    there = torch.randint(1 << 62, shape, pin_memory=on_gpu)
    sources, targets = (here, there) if to_host else (there, here)
    copying = PageCopy(list(sources), list(targets))
    read, written = torch.randperm(pages), torch.randperm(pages)
    numbers = copying.numbers(read.tolist(), written.tolist())
    step = copying.segments_at_once(pages)
    segments = [range(first, min(first + step, LAYERS)) for first in range(0, LAYERS, step)]

    def copy() -> None:
        for some in segments:
            copying.copy(some, *numbers)

    def check() -> None:
        targets.zero_()
        copy()
        if on_gpu:
            torch.cuda.synchronize(device)
        if not torch.equal(targets.cpu()[:, written], sources.cpu()[:, read]):
            raise WrongResult("a page differs from its source")

    return Trial([copy], check, {"one large copy": [lambda: targets.copy_(sources, non_blocking=True)]})
