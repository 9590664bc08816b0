"""A true server on a free port of this machine, in a thread, for clients that need one."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI


@contextmanager
def live_server(app: FastAPI) -> Iterator[str]:
    """Yields its base address, without a slash at the end."""
    server = uvicorn.Server(
        uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=1, ws="none")
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    try:
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)


def wait_until(condition: Callable[[], object], seconds: float = 20) -> None:
    """Poll until it holds; an AssertionError when it does not in that time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def half_a_request(base: str) -> socket.socket:
    """A connection on which a body begins and does not go on."""
    connection = socket.create_connection(("127.0.0.1", int(base.rpartition(":")[2])), timeout=10)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection.sendall(f'{head}Content-Length: 900\r\n\r\n{{"prompt": "'.encode())
    return connection


def everything(connection: socket.socket) -> bytes:
    """What comes until the other side closes the connection."""
    with connection:
        return b"".join(iter(lambda: connection.recv(10_000), b""))
