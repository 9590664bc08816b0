"""What memory a completion needs, and what this process can still take."""

import os
from pathlib import Path

from megaspan.config import ModelConfig
from megaspan.costs.memory import Format, activation_bytes, cache_bytes_per_token, weight_bytes
from megaspan.errors import UserError
from megaspan.ops.budget import BYTES

MIB = 1 << 20
SCRATCH = {"cpu": BYTES["cpu"], "cuda": 2 * BYTES["cuda"]}  # of one operation; a graph works in its own
SPARE = 256 * MIB  # the interpreter's own growth, threads, the allocator's slack
ROUND = 256  # a stated largest context is rounded down: what is free moves between two runs


def needed_memory(config: ModelConfig, dtype: Format, tokens: int, chunk: int, device: str = "cpu") -> int:
    """Bytes to load the weights and hold `tokens` cached rows while reading `chunk` tokens at a time."""
    per_token = cache_bytes_per_token(config, dtype, mtp=False)
    return fixed_memory(config, dtype, chunk, device) + tokens * per_token


def fixed_memory(config: ModelConfig, dtype: Format, chunk: int, device: str = "cpu") -> int:
    """Bytes needed whatever the context: weights, working memory, the activations of one chunk in float32."""
    scratch = SCRATCH[kind_of(device)]
    return weight_bytes(config, dtype) + scratch + SPARE + activation_bytes(config, chunk)


def kind_of(device: str) -> str:
    """Which of "cpu" and "cuda" a device is."""
    return "cuda" if device.startswith("cuda") else "cpu"


def _largest_capacity(config: ModelConfig, dtype: Format, chunk: int, device: str, available: int) -> int:
    """Tokens of prompt and completion together that `available` bytes hold, rounded down; 0 when none."""
    room = max(available - fixed_memory(config, dtype, chunk, device), 0)
    tokens = room // cache_bytes_per_token(config, dtype, mtp=False)
    return tokens - tokens % ROUND


def check_memory(
    config: ModelConfig, dtype: Format, tokens: int, max_tokens: int, chunk: int, device: str = "cpu"
) -> None:
    """Raise UserError, with the largest context that fits, when `tokens` + `max_tokens` rows do not.

    Free memory is read anew on each call.
    """
    available = free_memory(device)
    needed = needed_memory(config, dtype, tokens + max_tokens, chunk, device)
    if available is None or needed <= available:
        return
    largest = _largest_capacity(config, dtype, chunk, device, available) - max_tokens
    short = (
        f"not enough memory: a context of {tokens:,} tokens needs {needed / MIB:,.0f} MiB, "
        f"and {available / MIB:,.0f} MiB are free"
    )
    if largest < 1:
        raise UserError(f"{short}; none fits beside the weights: free some memory")
    raise UserError(f"{short}; the largest context that fits is {largest} tokens")


def fitting_context(
    config: ModelConfig, dtype: Format, wanted: int, max_tokens: int, chunk: int, device: str = "cpu"
) -> int:
    """The largest context up to `wanted` that fits in memory. Raises UserError when none does."""
    available = free_memory(device)
    needed = needed_memory(config, dtype, wanted + max_tokens, chunk, device)
    if available is None or needed <= available:
        return wanted
    fitting = _largest_capacity(config, dtype, chunk, device, available) - max_tokens
    if fitting < 1:
        check_memory(config, dtype, wanted, max_tokens, chunk, device)
    return fitting


def free_memory(device: str) -> int | None:
    """Bytes of the device's memory that can still be taken; None where nobody tells."""
    if kind_of(device) == "cpu":
        return available_memory()
    import torch

    return torch.cuda.mem_get_info(device)[0]


def available_memory() -> int | None:
    """Bytes this process can still take, by the machine, its control groups and its own limit.

    None where the system does not tell.
    """
    rooms = [
        *_machine_room(Path("/proc/meminfo")),
        *_group_rooms(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")),
        *_process_room(),
    ]
    return max(min(rooms), 0) if rooms else None


def _machine_room(meminfo: Path) -> list[int]:
    for line in _read(meminfo).splitlines():
        if line.startswith("MemAvailable:"):
            return [int(line.split()[1]) * 1024]
    return []


def _group_rooms(membership: Path, mount: Path) -> list[int]:
    """What each control group (version 1 or 2) above this process leaves; its file cache counts as free."""
    rooms = []
    for line in _read(membership).splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            root, limit, usage, reclaimable = mount, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, limit, usage = mount / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            reclaimable = "total_inactive_file"
        else:
            continue
        folder = root / group.lstrip("/")
        # In a container the path may be the host's: then the mount itself is this process's group.
        for level in [folder, *folder.parents]:
            bytes_allowed, bytes_used = _read(level / limit).strip(), _read(level / usage).strip()
            if bytes_allowed.isdigit() and bytes_used.isdigit():
                cached = dict(entry.split() for entry in _read(level / "memory.stat").splitlines())
                rooms.append(int(bytes_allowed) - int(bytes_used) + int(cached.get(reclaimable, 0)))
            if level == root:
                break
    return rooms


def _process_room() -> list[int]:
    """What `ulimit -v` leaves, if it is set."""
    try:
        import resource
    except ImportError:  # not a Unix system
        return []
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    pages = _read(Path("/proc/self/statm")).split()
    if limit == resource.RLIM_INFINITY or not pages:
        return []
    return [limit - int(pages[0]) * os.sysconf("SC_PAGE_SIZE")]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
