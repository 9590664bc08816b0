"""The HTTP application: every endpoint, and what stands around them."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import FileResponse
from starlette.middleware.cors import CORSMiddleware

from megaspan.server import anthropic_api, control_api, generate_api, openai_chat, openai_completions
from megaspan.server.errors import install_error_handlers
from megaspan.server.middleware import BoundedBody, RequestIdentity, RequireKey, WatchedConnection
from megaspan.server.options import ServerOptions, body_limit
from megaspan.server.service import Service, ServingEngine

PLAYGROUND = Path(__file__).parent / "playground"
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def create_app(engine: ServingEngine, options: ServerOptions) -> FastAPI:
    """The application on an engine, which starts and stops with it. `app.state.service` is its state."""
    service = Service(engine, options)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await engine.start()
        try:
            yield
        finally:
            await engine.stop()

    app = FastAPI(title="megaspan", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    for module in (openai_chat, openai_completions, anthropic_api, generate_api, control_api):
        app.include_router(module.router)
    page_paths = add_playground(app)
    install_error_handlers(app)
    # The last one added is the outermost.
    app.add_middleware(WatchedConnection, stall_seconds=options.stall_seconds)
    limits = {"max_bytes": body_limit(options, engine.max_context), "seconds": options.upload_seconds}
    app.add_middleware(BoundedBody, service=service, **limits)
    if options.api_keys:
        app.add_middleware(RequireKey, keys=options.api_keys, open_paths=["/health", *page_paths])
    if options.cors:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.cors,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id"],
        )
    app.add_middleware(RequestIdentity)
    return app


def add_playground(app: FastAPI) -> list[str]:
    """A route for each of the page's files. A mount at `/` would answer for wrong paths and methods, too."""
    files = {"/" if path.name == "index.html" else f"/{path.name}": path for path in PLAYGROUND.glob("*.*")}
    for route, path in files.items():
        app.get(route, include_in_schema=False)(file_endpoint(path))
    return list(files)


def file_endpoint(path: Path) -> Callable[[], Awaitable[FileResponse]]:
    async def page() -> FileResponse:
        return FileResponse(path, headers=PAGE_HEADERS)

    return page
