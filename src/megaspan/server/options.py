"""What the HTTP server is told when it starts."""

from dataclasses import dataclass

from megaspan.errors import UserError

LEAST_BODY_LIMIT = 4 << 20  # bytes
BYTES_PER_TOKEN = 16  # three to four times what a token of code, escaped as JSON, or an id in a list takes


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Checked on construction; UserError names the field and what it must be."""

    model_name: str
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    api_keys: tuple[str, ...] = ()  # none: everyone may ask
    max_body_bytes: int | None = None  # None: `body_limit` of the context
    max_choices: int = 8  # the largest `n`
    drain_seconds: float = 30.0  # how long running requests may go on after SIGTERM
    stall_seconds: float = 60.0  # how long a client may leave its stream unread before the request is aborted
    upload_seconds: float = 120.0  # how long a request's body may take to arrive
    ping_seconds: float = 10.0  # silence after which a stream carries a sign of life
    cors: tuple[str, ...] = ()  # origins whose pages may call; "*": all

    def __post_init__(self) -> None:
        if not self.model_name.strip():
            raise UserError("the model's name is empty; give the one that clients are to ask for")
        if not 0 <= self.port <= 65535:
            raise UserError(f"port is {self.port}; it must be from 0 to 65535")
        for field in ("max_body_bytes", "max_choices"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise UserError(f"{field} is {value}; it must be at least 1")
        for field in ("stall_seconds", "upload_seconds", "ping_seconds"):
            if not getattr(self, field) > 0:
                raise UserError(f"{field} is {getattr(self, field)}; it must be above 0")
        if not self.drain_seconds >= 0:
            raise UserError(f"drain_seconds is {self.drain_seconds}; it must be 0 or more")
        for key in self.api_keys:
            if not key or not key.isascii() or key != key.strip():
                raise UserError("an API key is empty or holds spaces or characters that headers cannot carry")


def body_limit(options: ServerOptions, max_context: int) -> int:
    """Bytes of a request's body, unless they were chosen: in proportion to the tokens that a prompt may have.

    More would only be read to be refused, and while a body is read the server does little else.
    """
    return options.max_body_bytes or max(LEAST_BODY_LIMIT, BYTES_PER_TOKEN * max_context)
