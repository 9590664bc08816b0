"""Runs the server: one socket, one event loop, and an orderly end on SIGTERM."""

import asyncio
import socket
from types import FrameType

import uvicorn
from fastapi import FastAPI

from megaspan.errors import UserError
from megaspan.server.app import create_app
from megaspan.server.options import ServerOptions
from megaspan.server.service import Service, ServingEngine

BACKLOG = 2048
POLL_SECONDS = 0.05
LAST_SECONDS = 5  # for the ends of aborted answers to reach their clients


class DrainingServer(uvicorn.Server):
    """On SIGTERM or Ctrl-C new requests get 503 and running ones may finish; a second signal ends all."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.service = service
        self.signals = 0
        self.draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.signals += 1
        self.service.draining = True  # `on_tick` sees it: a signal handler must not touch the loop

    async def on_tick(self, counter: int) -> bool:
        if self.service.draining and self.draining is None:
            self.draining = asyncio.ensure_future(self._drain())
        return await super().on_tick(counter)

    async def _drain(self) -> None:
        clock = asyncio.get_running_loop().time
        deadline = clock() + self.service.options.drain_seconds
        while self.service.running and clock() < deadline and self.signals < 2:
            await asyncio.sleep(POLL_SECONDS)
        self.service.abort_all()
        self.should_exit = True


def run(engine: ServingEngine, options: ServerOptions) -> None:
    """Serve until SIGTERM or Ctrl-C, then return. Raises UserError when the address cannot be had."""
    listener = bind(options.host, options.port)
    app = create_app(engine, options)
    server = make_server(app)
    host, port = listener.getsockname()[:2]
    print(
        f"{options.model_name} is served at http://{f'[{host}]' if ':' in host else host}:{port}", flush=True
    )
    with listener:
        server.run(sockets=[listener])


def make_server(app: FastAPI) -> DrainingServer:
    config = uvicorn.Config(
        app, log_level="error", timeout_graceful_shutdown=LAST_SECONDS, ws="none", server_header=False
    )
    return DrainingServer(config, app.state.service)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises UserError, one line, when the port is taken or the host is not this one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol by name: asyncio turns off Nagle's delay, 40 ms an answer, only where it is named.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        raise UserError(
            f"cannot listen on {host}:{port}: {error}; choose another --port or --host"
        ) from error
    listener.setblocking(False)
    return listener
