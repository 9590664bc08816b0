"""What the HTTP server is told when it starts."""

from dataclasses import dataclass

from megaspan.errors import UserError

MEBIBYTE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Checked on construction; UserError names the field and what it must be."""

    model_name: str
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    api_keys: tuple[str, ...] = ()  # none: everyone may ask
    max_body_bytes: int = 64 * MEBIBYTE
    max_waiting: int = 256  # requests that may wait for the engine before new ones are turned away
    max_choices: int = 8  # the largest `n`
    drain_seconds: float = 30.0  # how long running requests may go on after SIGTERM
    stall_seconds: float = 60.0  # how long a client may leave its stream unread before the request is aborted
    ping_seconds: float = 10.0  # silence after which a stream carries a sign of life
    cors: tuple[str, ...] = ()  # origins whose pages may call; "*": all

    def __post_init__(self) -> None:
        if not self.model_name.strip():
            raise UserError("model_name is empty; give the name that clients are to ask for")
        if not 0 <= self.port <= 65535:
            raise UserError(f"port is {self.port}; it must be from 0 to 65535")
        for field in ("max_body_bytes", "max_waiting", "max_choices"):
            if getattr(self, field) < 1:
                raise UserError(f"{field} is {getattr(self, field)}; it must be at least 1")
        for field in ("stall_seconds", "ping_seconds"):
            if not getattr(self, field) > 0:
                raise UserError(f"{field} is {getattr(self, field)}; it must be above 0")
        if not self.drain_seconds >= 0:
            raise UserError(f"drain_seconds is {self.drain_seconds}; it must be 0 or more")
        for key in self.api_keys:
            if not key or not key.isascii() or key != key.strip():
                raise UserError("an API key is empty or holds spaces or characters that headers cannot carry")
