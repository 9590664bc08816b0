"""The disk tier: one checksummed file per page, safe against kill -9, damage and a disk that fails."""

import fcntl
import hashlib
import logging
import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megaspan.errors import UserError

log = logging.getLogger(__name__)

# magic, format version, bytes of token ids, bytes of payload, fingerprint, checksum of all else and the key
HEADER = struct.Struct("<8sIIQ16s32s")
MAGIC, VERSION = b"megaspan", 1


class DiskTier:
    """Pages by the hash of their tokens and all before them. Every file is `<key in hex>.page`, written under
    a temporary name and renamed, so that a page is there whole or not at all; and since a disk may still
    lose or change bytes, a page is served only when its checksum, fingerprint and token ids agree.

    folder: made if absent; pages go to a subfolder per fingerprint. limit_bytes: where more would be written,
    the least recently used pages go. fingerprint: bytes that tell model, weights, row formats and page size
    apart. page_bytes: payload of one page.

    Threads may share a tier, and processes a folder (each keeps to the limit by the pages it knows of). What
    the disk refuses is logged once, counted in `failures`, and otherwise as if the page were not there; only
    a folder that cannot be made is a UserError.
    """

    def __init__(self, folder: str | Path, limit_bytes: int, fingerprint: bytes, page_bytes: int):
        self._fingerprint = hashlib.blake2b(fingerprint, digest_size=16).digest()
        self.folder = Path(folder) / self._fingerprint.hex()
        self.limit_bytes, self.page_bytes = limit_bytes, page_bytes
        self.failures = 0  # refused by the disk
        self.damaged = 0  # dropped because something in them was wrong
        self.generation = 0  # how often it was cleared
        self.nbytes = 0
        self._sizes: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._open()
        except OSError as error:
            raise UserError(
                f"the disk tier cannot use {folder}: {error.strerror}; choose another folder"
            ) from error

    @property
    def pages(self) -> int:
        """How many pages are there."""
        return len(self._sizes)

    def keys(self) -> list[bytes]:
        """Pages there, least recently used first."""
        with self._lock:
            return list(self._sizes)

    def has(self, key: bytes) -> bool:
        """Whether the page is there, as far as is known without reading it."""
        return key in self._sizes

    def capacity(self, token_bytes: int) -> int:
        """How many pages fit that have so many bytes of token ids each."""
        return self.limit_bytes // (HEADER.size + token_bytes + self.page_bytes)

    def touch(self, keys: Iterable[bytes]) -> None:
        """Pages that are to make room after all others, the last of them last. Does not wait for the disk."""
        with self._lock:
            for key in keys:
                if key in self._sizes:
                    self._sizes.move_to_end(key)

    def read(self, key: bytes, tokens: bytes) -> memoryview | None:
        """The page's payload, or None; a page with anything wrong is removed."""
        path = self._path(key)
        content = None
        with self._failing("read"):
            content = path.read_bytes()
            os.utime(path)  # the order of use, for the next process
        payload = None if content is None else self._payload(content, key, tokens)
        with self._lock:
            if payload is None:
                self._forget(key)
            elif key in self._sizes:
                self._sizes.move_to_end(key)
        if content is not None and payload is None:
            self.damaged += 1
            with suppress(OSError):
                path.unlink()
        return payload

    def write(
        self, key: bytes, tokens: bytes, payload: bytes | memoryview, generation: int | None = None
    ) -> bool:
        """Keep a page; whether it is there afterwards.

        generation: the tier's when the rows were on their way here; not kept if it was cleared since.
        """
        generation = self.generation if generation is None else generation
        if self.has(key):
            return True
        size = HEADER.size + len(tokens) + len(payload)
        if size > self.limit_bytes or generation != self.generation:
            return False
        self._make_room(size)
        with self._failing("write"):
            self._write_file(self._path(key), self._header(key, tokens, payload), tokens, payload)
            with self._lock:
                if generation != self.generation:
                    return False  # cleared while it was written: `remove_unlisted` takes the file
                self._forget(key)
                self._sizes[key] = size
                self.nbytes += size
            return True
        return False

    def clear(self) -> None:
        """Forget every page, at once; `remove_unlisted` removes the files."""
        with self._lock:
            self._sizes.clear()
            self.nbytes = 0
            self.generation += 1

    def remove_unlisted(self) -> None:
        """Remove the files of pages that are not listed here, whichever process wrote them."""
        with self._failing("clear"), os.scandir(self.folder) as entries:
            for entry in entries:
                key = self._key(entry.name)
                if key and not self.has(key) and entry.is_file(follow_symlinks=False):
                    os.unlink(entry.path)

    def _open(self) -> None:
        """List the pages of earlier processes; remove what a killed one left half-written."""
        pages = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                with suppress(OSError):  # gone meanwhile
                    if not entry.is_file(follow_symlinks=False):
                        continue
                    if entry.name.endswith(".partial"):
                        _remove_orphan(entry.path)
                    elif key := self._key(entry.name):
                        status = entry.stat()
                        pages.append((status.st_mtime_ns, key, status.st_size))
        for _, key, size in sorted(pages):
            self._sizes[key] = size
            self.nbytes += size
        self._make_room(0)

    def _path(self, key: bytes) -> Path:
        return self.folder / f"{key.hex()}.page"

    def _key(self, name: str) -> bytes:
        """The key of the page in a file of this name; empty for a file that is not ours."""
        with suppress(ValueError):
            key = bytes.fromhex(name.removesuffix(".page"))
            return key if self._path(key).name == name else b""
        return b""

    def _header(self, key: bytes, tokens: bytes, payload: bytes | memoryview) -> bytes:
        fields = (MAGIC, VERSION, len(tokens), len(payload), self._fingerprint)
        checksum = hashlib.blake2b(HEADER.pack(*fields, b"") + key + tokens, digest_size=32)
        checksum.update(payload)
        return HEADER.pack(*fields, checksum.digest())

    def _payload(self, content: bytes, key: bytes, tokens: bytes) -> memoryview | None:
        """The payload of a file that is, header and all, what would be written for this page."""
        payload = memoryview(content)[HEADER.size + len(tokens) :]
        if len(payload) != self.page_bytes:
            return None
        right = content.startswith(self._header(key, tokens, payload) + tokens)
        return payload if right else None

    def _write_file(self, path: Path, *parts: bytes | memoryview) -> None:
        # No fsync: after a power cut the checksum tells, and a page lost is a page computed again.
        temporary = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.partial")
        path.parent.mkdir(parents=True, exist_ok=True)  # it may have been removed
        try:
            with open(temporary, "wb") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # tells whoever opens the folder that its writer lives
                for part in parts:
                    file.write(part)
                file.flush()
                os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    def _make_room(self, size: int) -> None:
        with self._lock:
            victims = []
            while self._sizes and self.nbytes + size > self.limit_bytes:
                victims.append(next(iter(self._sizes)))
                self._forget(victims[-1])
        for key in victims:
            with self._failing("remove"):
                self._path(key).unlink(missing_ok=True)

    def _forget(self, key: bytes) -> None:
        self.nbytes -= self._sizes.pop(key, 0)

    @contextmanager
    def _failing(self, action: str) -> Iterator[None]:
        """Go on without the disk where it refuses."""
        try:
            yield
        except OSError as error:
            if action == "read" and isinstance(error, FileNotFoundError):
                return  # another process made room
            self.failures += 1
            if self.failures == 1:
                log.warning(
                    "the disk tier cannot %s in %s (%s); going on without", action, self.folder, error
                )


def _remove_orphan(path: str) -> None:
    """Remove a half-written file unless its writer, here or in another process, still holds it."""
    with open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        os.unlink(path)
