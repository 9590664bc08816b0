"""Whether a waiting request had better wait on, because others have more of its prefix ready soon."""

from collections.abc import Sequence

import numpy as np

from megaspan.cache.prefix_cache import Lease, PrefixCache
from megaspan.engine.request import Request, State


def waits_for_others(request: Request, weights_version: str) -> bool:
    """Whether its prefix is still being computed, or brought up, for another request that will share it."""
    if request.behind is not None:
        reader, tokens = request.behind
        if _shares(reader, weights_version) and reader.computed < tokens:
            return True
        request.behind = None
    return any(node.pending for node in request.awaited)


def _shares(reader: Request, weights_version: str) -> bool:
    """Whether what it reads will be there for requests of that version; after a flush or change it is not."""
    is_reading = reader.state in (State.loading, State.reading)
    is_private = reader.lease is None or reader.lease.private
    return is_reading and not is_private and reader.weights_version == weights_version


def open_lease(prefixes: PrefixCache, request: Request, readers: Sequence[Request]) -> Lease | None:
    """Lease the request's prefix; None where it is better to wait for one of the `readers` or a restore."""
    ids = np.frombuffer(request.tokens, dtype=np.int32)
    lease = prefixes.open(ids, request.weights_version)
    request.awaited = [node for node in lease.below if node.pending]
    if prefixes.reuse:
        ready = (len(lease.pages) + len(lease.sources)) * prefixes.page_size
        request.behind = _reader_ahead(request, ids, ready, readers, prefixes.page_size)
    if request.awaited or request.behind is not None:
        prefixes.close(lease)
        return None
    return lease


def _reader_ahead(
    request: Request, ids: np.ndarray, ready: int, readers: Sequence[Request], page_size: int
) -> tuple[Request, int] | None:
    """Who computes more of this request's prefix than the `ready` tokens it has, and how much."""
    best = None
    for reader in readers:
        if not _shares(reader, request.weights_version):
            continue
        length = min((len(ids) - 1) // page_size * page_size, len(reader.tokens))
        differ = ids[:length] != np.frombuffer(reader.tokens, dtype=np.int32, count=length)
        common = (int(differ.argmax()) if differ.any() else length) // page_size * page_size
        if common > max(ready, reader.computed) and (best is None or common > best[1]):
            best = (reader, common)
    return best
