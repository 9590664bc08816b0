"""`megaspan serve` in a process of its own."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.server.live_server import wait_until

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


class Server:
    """A running one: its process, its base address, and the file that has its log."""

    def __init__(self, folder: Path, log: Path, *options: object) -> None:
        command = [sys.executable, "-m", "megaspan", "serve", folder, "--port", 0, "--threads", 1, *options]
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [str(part) for part in command], stdout=file, stderr=file, env=ENVIRONMENT
            )
        wait_until(lambda: "http://" in log.read_text() or self.process.poll() is not None, 60)
        assert self.process.poll() is None, log.read_text()
        self.base = log.read_text().split()[-1]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


@contextmanager
def serve_process(folder: Path, log: Path, *options: object) -> Iterator[Server]:
    """Killed at the end, if it has not ended."""
    server = Server(folder, log, *options)
    try:
        yield server
    finally:
        server.kill()
