"""Page pools: the rows of every layer in pages that all pools hand out together."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megaspan.cache.rows import RowFormat
from megaspan.config import ModelConfig
from megaspan.costs.memory import Format
from megaspan.errors import UserError

PAGE_SIZE = 64


@dataclass(frozen=True)
class Segment:
    """One layer's pages in one pool, as bytes: pages [pages, page_size * row bytes] uint8."""

    pool: str
    layer: int
    pages: Tensor


class PagePools:
    """Latent rows of every layer and index keys of the full layers, in pages of `page_size` tokens.

    A page id names the same token rows in every layer of both pools, so a token is there in all of them
    or in none. The draft (multi-token prediction) layers follow the others in both pools, numbered
    from `num_hidden_layers` on.

    storage: for "latent" and "index" one tensor [pages * page_size, stored width] for each of the
    pool's layers. segments: the same memory as bytes, in the order in which a forward pass reads it.
    scratch_page: with `scratch`, a page behind the others for rows that nobody needs; it is never handed
    out, and no segment has it. rotate_index: see `RowFormat`.
    """

    def __init__(
        self,
        config: ModelConfig,
        pages: int,
        page_size: int = PAGE_SIZE,
        latent_format: Format = "bfloat16",
        index_format: Format | None = None,
        device: str | torch.device = "cpu",
        mtp: bool = True,
        scratch: bool = False,
        rotate_index: bool = True,
    ):
        for name, value in (("pages", pages), ("page_size", page_size)):
            if value < 1:
                raise UserError(f"{name} is {value}: a pool needs at least 1")
        self.page_size, self.device = page_size, torch.device(device)
        self.formats = {
            "latent": RowFormat.latent(config, latent_format),
            "index": RowFormat.index(config, index_format or latent_format, rotate_index),
        }
        if self.formats["index"].name == "fp8" and page_size * config.index_head_dim % 4:
            raise UserError(
                f"page_size is {page_size}, but FP8 index keys of {config.index_head_dim} numbers need pages "
                "of a multiple of 4 numbers: choose a page_size that is a multiple of 4"
            )
        target = config.num_hidden_layers
        drafts = range(target, target + config.num_nextn_predict_layers) if mtp else ()
        self.layers = {"latent": (*range(target), *drafts), "index": (*config.full_layers, *drafts)}
        self.scratch_page = pages if scratch else None
        self.storage = {
            pool: [
                torch.empty((pages + scratch) * page_size, form.stored_width, dtype=form.dtype, device=device)
                for _ in self.layers[pool]
            ]
            for pool, form in self.formats.items()
        }
        self._slots = {
            (pool, layer): slot for pool, layers in self.layers.items() for slot, layer in enumerate(layers)
        }
        self.segments = [
            Segment(pool, layer, self.rows(pool, layer).view(torch.uint8).view(pages + scratch, -1)[:pages])
            for layer in self.layers["latent"]
            for pool in ("latent", "index")
            if (pool, layer) in self._slots
        ]
        self._free = list(reversed(range(pages)))
        self._taken = bytearray(pages)

    def rows(self, pool: str, layer: int) -> Tensor:
        """All the rows of a layer, [pages * page_size, stored width]. ValueError where it has none."""
        slot = self._slots.get((pool, layer))
        if slot is None:
            raise ValueError(f"layer {layer} keeps no {pool} rows")
        return self.storage[pool][slot]

    def take(self, count: int) -> list[int] | None:
        """Hand out `count` pages, or none at all where fewer are free. Their rows hold anything."""
        if count > len(self._free):
            return None
        pages = self._free[len(self._free) - count :][::-1]
        del self._free[len(self._free) - count :]
        for page in pages:
            self._taken[page] = 1
        return pages

    def give(self, pages: Sequence[int]) -> None:
        """Take pages back. ValueError, and nothing changes, where one of them is not handed out."""
        for count, page in enumerate(pages):
            if not (0 <= page < len(self._taken) and self._taken[page]):
                for returned in pages[:count]:
                    self._taken[returned] = 1
                raise ValueError(f"page {page} is given back, but it is not handed out")
            self._taken[page] = 0
        self._free.extend(reversed(pages))

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def total_pages(self) -> int:
        return len(self._taken)

    @property
    def nbytes(self) -> int:
        """Bytes of the storage."""
        return sum(rows.nbytes for tensors in self.storage.values() for rows in tensors)
