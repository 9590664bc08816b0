"""The engine's memory: pools, prefix tree, page table, and the tiers below, built from one config."""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megaspan.cache.disk import DiskTier
from megaspan.cache.host import HostTier
from megaspan.cache.paged import PagedCache
from megaspan.cache.pool import PagePools
from megaspan.cache.prefix import PrefixTree
from megaspan.cache.prefix_cache import PrefixCache
from megaspan.cache.rows import LAYOUT
from megaspan.cache.tiers import Tiers
from megaspan.cache.transfer import Transfers
from megaspan.costs.memory import GIB, Format, activation_bytes, cache_bytes_per_token
from megaspan.engine.config import EngineConfig, RowName
from megaspan.engine.pace import StepCost
from megaspan.errors import UserError
from megaspan.model.transformer import Transformer
from megaspan.ops import native
from megaspan.ops.budget import working_memory

SAMPLED = 256  # values of each weight that go into the fingerprint
SAVING_SECONDS = 10.0
SAMPLING_BYTES = 40  # of a logit, and of what the sampler makes of it in float64
GPU_SPARE = 2 * GIB  # the graphs themselves, workspaces of libraries, the allocator's slack


class Memory:
    """pools: the device's rows. paged: where each slot's rows are. prefixes: who may use which page."""

    def __init__(self, model: Transformer, config: EngineConfig, cost: StepCost):
        device = model.lm_head.weight.device
        latent, index = _format(config.latent_rows, model), _format(config.index_rows, model)
        on_gpu = device.type == "cuda"
        page_bytes = cache_bytes_per_token(model.config, latent, index, mtp=False) * config.page_size
        pages = config.device_pages(page_bytes, gpu_room(model, config) if on_gpu else None)
        with _allocating("cache_gib", pages * page_bytes):
            self.pools = PagePools(
                model.config,
                pages,
                config.page_size,
                latent,
                index,
                device,
                mtp=False,
                scratch=on_gpu,
                rotate_index=config.rotate_index_rows,
            )
        context = config.context_limit(model.config, pages)
        self.paged = PagedCache(self.pools, config.max_running, -(-context // config.page_size))
        fingerprint = bytes  # only files need one
        if config.disk_folder is not None:
            formats = latent, index, config.page_size, config.rotate_index_rows
            fingerprint = partial(_fingerprint, model, *formats)
        tree = PrefixTree(config.page_size, fingerprint)
        self.tiers = self._tiers(config, tree, page_bytes, fingerprint) if config.has_host else None
        self.prefixes = PrefixCache(self.pools, tree, self.tiers, cost.seconds, config.prefix_cache)

    def _tiers(
        self, config: EngineConfig, tree: PrefixTree, page_bytes: int, fingerprint: Callable[[], bytes]
    ) -> Tiers:
        pages = config.tier_pages(page_bytes)
        with _allocating("host_gib", pages * page_bytes):
            host = HostTier(self.pools.segments, pages, pin=self.pools.device.type == "cuda")
        disk = None
        if config.disk_folder is not None:
            disk = DiskTier(config.disk_folder, int(config.disk_gib * GIB), fingerprint(), page_bytes)
        transfers = Transfers(self.pools.segments, host, disk, config.load_timeout)
        return Tiers(self.pools, tree, host, transfers, disk, config.write_policy == "write_back")

    def stats(self) -> dict[str, Any]:
        """The parts of EngineStats that are about memory."""
        tree, tiers = self.prefixes.tree, self.tiers
        return {
            "pages_total": self.pools.total_pages,
            "pages_free": self.pools.free_pages,
            "pages_cached": tree.evictable_device(),
            "pages_locked": self.pools.total_pages - self.pools.free_pages - tree.evictable_device(),
            "host_pages_total": tiers.host.total if tiers else 0,
            "host_pages_used": tiers.host.total - tiers.host.free if tiers else 0,
            "disk_pages_used": tiers.disk.pages if tiers and tiers.disk else 0,
            "host_hits_total": self.prefixes.restored_tokens,
            "failed_restores_total": self.prefixes.failed_restores,
        }

    def close(self) -> None:
        """End leases and transfers. The disk gets the prefixes that it lacks, if SAVING_SECONDS suffice."""
        for lease in list(self.prefixes.leases):
            self.prefixes.close(lease)
        if self.tiers is not None:
            self.tiers.save_all(SAVING_SECONDS)
            self.tiers.transfers.close()


def gpu_room(model: Transformer, config: EngineConfig) -> int:
    """Bytes of the GPU's memory that are neither taken nor needed by steps.

    What graphs work in is theirs alone, so an operation's working memory counts once for them and once for
    the other steps.
    """
    device = model.lm_head.weight.device
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    tokens = config.max_chunk + 2 * config.max_running  # of the largest step, and of the largest graph
    logits = SAMPLING_BYTES * config.max_running * model.config.vocab_size
    steps = activation_bytes(model.config, tokens) + logits + 2 * working_memory(device)
    return free - steps - GPU_SPARE


@contextmanager
def _allocating(name: str, nbytes: int) -> Iterator[None]:
    """Turns a refusal of the allocator into a UserError."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        raise UserError(f"{name} asks for {nbytes / GIB:,.1f} GiB, more than there are: give less") from error


def _format(name: RowName, model: Transformer) -> Format:
    if name != "auto":
        return name
    return "bfloat16" if model.lm_head.weight.dtype == torch.bfloat16 else "float32"


@torch.no_grad()
def _fingerprint(
    model: Transformer, latent: Format, index: Format, page_size: int, rotate_index: bool = True
) -> bytes:
    """Tells apart what would give other rows: architecture, formats, arithmetic, samples of the weights."""
    formats = LAYOUT, latent, index, page_size, rotate_index
    settings = (model.config.to_dict(), *formats, *_arithmetic(model))
    digest = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=16)
    for name, parameter in model.named_parameters():
        values = parameter.detach().flatten()
        stride = max(1, len(values) // SAMPLED)
        digest.update(name.encode() + values[::stride].float().cpu().numpy().tobytes())
    return digest.digest()


def _arithmetic(model: Transformer) -> tuple[str | bool, ...]:
    """What the last bits of a row depend on beside weights and tokens. The number of threads is not among it.

    A compiled operation's name tells its source, its compiler and the processor.
    """
    weight = model.lm_head.weight
    sources = sorted(Path(native.__file__).parent.glob("*/kernel.c")) if weight.is_cpu else []
    libraries = [native.load(source) for source in sources]
    names = [Path(library._name).name for library in libraries if library is not None]
    return str(weight.dtype), weight.device.type, model.batch_invariant, torch.__version__, *names
