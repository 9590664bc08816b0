"""A model of random weights that reads the shipped tokenizer's ids, and engines on it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from megaspan.config import ModelConfig
from megaspan.config_json import scheduled_indexer_types
from megaspan.engine.async_engine import AsyncEngine
from megaspan.engine.config import EngineConfig
from megaspan.engine.engine import Engine
from megaspan.model.folder import LanguageModel, save_folder, set_batch_invariant
from megaspan.server.app import create_app
from megaspan.server.options import ServerOptions
from tests.server.asking import MODEL
from tests.server.fake_engine import shipped_tokenizer
from tests.server.live_server import live_server, wait_until

LAYERS = 4
LONG_TEXT = "def add(a, b):\n    return a + b\n" * 20  # of some pages
LEVELS = {
    "type": "object",
    "properties": {"level": {"enum": ["low", "high"]}, "on": {"type": "boolean"}},
    "required": ["level", "on"],
    "additionalProperties": False,
}
CONFIG = ModelConfig.preset("debug").replace(
    vocab_size=12288,
    num_hidden_layers=LAYERS,
    mlp_layer_types=(),
    indexer_types=scheduled_indexer_types(LAYERS, freq=2, offset=1),
    num_nextn_predict_layers=0,
    eos_token_id=(12262, 12269, 12271),
)


def check_levels(arguments: Any) -> None:
    """They fit LEVELS."""
    assert arguments.keys() == {"level", "on"}
    assert arguments["level"] in ("low", "high")
    assert isinstance(arguments["on"], bool)


@cache
def small_model() -> LanguageModel:
    """Batch-invariant, so that an answer does not depend on what else is asked."""
    model = LanguageModel(CONFIG)
    model.initialise(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(0.2 / CONFIG.initializer_range)
    model.tokenizer = shipped_tokenizer()
    set_batch_invariant(model, True)
    return model.eval()


def write_small_model(folder: Path) -> Path:
    """A checkpoint folder of it, which is called what the server calls its model."""
    path = folder / MODEL
    path.mkdir()
    save_folder(small_model(), path)
    return path


def small_engine(**settings: Any) -> AsyncEngine:
    """Ready to be started, once."""
    defaults: dict[str, Any] = {"pages": 512, "page_size": 16, "max_running": 16}
    return AsyncEngine(Engine(small_model(), EngineConfig(**{**defaults, **settings})))


@contextmanager
def served(engine: AsyncEngine, **options: Any) -> Iterator[str]:
    """The base address of a true server on the engine."""
    with live_server(create_app(engine, ServerOptions(**{"model_name": MODEL, **options}))) as address:
        yield address


def assert_idle(engine: AsyncEngine) -> None:
    """Sooner or later nothing runs and every page and slot is accounted for."""

    def idle() -> bool:
        stats = engine.stats()
        return not (stats.running or stats.waiting or stats.loading or stats.pages_locked)

    wait_until(idle)
    engine.engine.check()


def at_once(*calls: Any) -> list[Any]:
    """What each call returns, all made at the same time, each on a thread of its own."""
    results: list[Any] = [None] * len(calls)

    def run(place: int) -> None:
        try:
            results[place] = calls[place]()
        except Exception as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failed = next((result for result in results if isinstance(result, Exception)), None)
    if failed is not None:
        raise failed
    return results
