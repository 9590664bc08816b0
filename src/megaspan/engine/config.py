"""What an engine is given: memory, tiers, and how long a step may take."""

from dataclasses import dataclass, fields
from math import isfinite
from pathlib import Path
from typing import Literal, get_args

from megaspan.config import ModelConfig
from megaspan.costs.memory import GIB
from megaspan.errors import UserError

RowName = Literal["auto", "float32", "bfloat16", "fp8"]
WritePolicy = Literal["write_through", "write_back"]
CHOICES = {
    "latent_rows": get_args(RowName),
    "index_rows": get_args(RowName),
    "write_policy": get_args(WritePolicy),
}
LEAST = {
    "max_running": 1,
    "max_waiting": 1,
    "max_context": 2,  # a token to read and one to write
    "page_size": 1,
    "pages": 1,
    "max_chunk": 1,
    "host_pages": 0,
}
DEFAULT_CACHE_GIB = 2.0
MOST_RUNNING = 4096  # each has a row of the page table and, once one has penalties, of the vocabulary


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of one engine.

    max_running: requests that hold a slot at once. max_waiting: requests that may queue. max_context: tokens
    of one request, prompt and completion together (None: what the model and the pool hold). page_size: tokens
    of a page. pages: device pages (None: as many as `cache_gib` hold). cache_gib: of rows on the device
    (None: 2 on a CPU, on a GPU what is free beside what steps need). latent_rows, index_rows: the format of
    cached rows ("auto": the model's dtype). rotate_index_rows: multiply FP8 index keys, and the queries that
    meet them, by a Hadamard matrix before they are rounded. host_gib: the tier in host memory (0: none).
    disk_folder, disk_gib: the tier on disk, below the host's. write_policy: save a page as soon as it is full
    ("write_through") or when its device page is wanted ("write_back"). step_seconds: the time that a step
    with prompt chunks in it may take. max_chunk: most prompt tokens of a step. load_timeout: seconds after
    which a restore is given up and its tokens are computed again. prefix_cache: whether finished requests'
    pages are kept for others.
    """

    max_running: int = 64
    max_waiting: int = 1024
    max_context: int | None = None
    page_size: int = 64
    pages: int | None = None
    cache_gib: float | None = None
    latent_rows: RowName = "auto"
    index_rows: RowName = "auto"
    rotate_index_rows: bool = True
    prefix_cache: bool = True
    host_gib: float = 0.0
    host_pages: int | None = None
    write_policy: WritePolicy = "write_through"
    disk_folder: Path | None = None
    disk_gib: float = 8.0
    step_seconds: float = 0.25
    max_chunk: int = 4096
    load_timeout: float = 30.0
    weights_version: str = "0"

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            value = getattr(self, name)
            _require(value is None or value >= least, name, f"must be at least {least}", value)
        most = f"must be at most {MOST_RUNNING:,}"
        _require(self.max_running <= MOST_RUNNING, "max_running", most, self.max_running)
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type in (float, float | None) and value is not None:
                _require(isfinite(value) and value >= 0, field.name, "must be a number from 0 on", value)
        _require(self.step_seconds > 0, "step_seconds", "must be above 0", self.step_seconds)
        _require(self.load_timeout > 0, "load_timeout", "must be above 0", self.load_timeout)
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            _require(value in choices, name, f"must be {', '.join(choices[:-1])} or {choices[-1]}", value)
        if self.disk_folder is not None and not self.has_host:
            raise UserError("a disk tier needs a host tier to pass through: set host_gib above 0")
        if self.has_host and not self.prefix_cache:
            raise UserError(
                "host_gib keeps cached prefixes, but prefix_cache is off: turn one of them around"
            )

    @property
    def has_host(self) -> bool:
        return bool(self.host_pages) if self.host_pages is not None else self.host_gib > 0

    def device_pages(self, page_bytes: int, room: int | None = None) -> int:
        """Pages of the device pools, whose pages are `page_bytes` long over all pools.

        room: bytes that the device has for them (None: unknown). UserError where it is too little.
        """
        asked = DEFAULT_CACHE_GIB if self.cache_gib is None and room is None else self.cache_gib
        nbytes = int(asked * GIB) if asked is not None else room or 0
        pages = self.pages if self.pages is not None else nbytes // page_bytes
        if room is not None and max(pages, 1) * page_bytes > room:
            raise UserError(
                f"the cache needs {max(pages, 1) * page_bytes / GIB:,.3f} GiB, but the device has "
                f"{max(room, 0) / GIB:,.3f} beside weights and steps: lower cache_gib, pages or max_chunk"
            )
        if pages < 1:
            raise UserError(
                f"cache_gib is {nbytes / GIB:g}, less than one page of {page_bytes} bytes: give more"
            )
        return pages

    def tier_pages(self, page_bytes: int) -> int:
        """Slots of the host tier."""
        return self.host_pages if self.host_pages is not None else int(self.host_gib * GIB // page_bytes)

    def context_limit(self, model: ModelConfig, pages: int) -> int:
        """Most tokens of a request: what was asked for, what the model reads, what the pool holds."""
        limits = [model.max_position_embeddings, pages * self.page_size]
        return min([*limits, self.max_context] if self.max_context is not None else limits)


def _require(holds: bool, name: str, what: str, value: object) -> None:
    if not holds:
        raise UserError(f"{name} {what}, not {value!r}")
