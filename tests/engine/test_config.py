"""What an engine's settings may be, said before anything is allocated."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megaspan.config import ModelConfig
from megaspan.costs.memory import GIB, cache_bytes_per_token
from megaspan.engine.config import EngineConfig
from megaspan.engine.memory import gpu_room
from megaspan.errors import UserError
from tests.engine.engines import debug_model, make_engine

NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_running", 0),
        ("max_waiting", -1),
        ("page_size", 0),
        ("max_chunk", 0),
        ("max_context", 0),
        ("pages", 0),
        ("host_pages", -1),
        ("cache_gib", -0.1),
        ("cache_gib", NAN),
        ("host_gib", INFINITY),
        ("disk_gib", -1.0),
        ("step_seconds", 0.0),
        ("step_seconds", NAN),
        ("load_timeout", 0.0),
        ("latent_rows", "int4"),
        ("index_rows", ""),
        ("write_policy", "write_around"),
    ],
)
def test_a_value_that_cannot_be_is_refused_in_a_line_that_names_it(name, value):
    with pytest.raises(UserError, match=name) as caught:
        EngineConfig(**{name: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"disk_folder": Path("somewhere")},
        {"disk_folder": Path("somewhere"), "host_gib": 1.0, "host_pages": 0},
        {"host_gib": 1.0, "prefix_cache": False},
        {"host_pages": 4, "prefix_cache": False},
    ],
)
def test_combinations_that_do_not_work_are_refused_at_the_start(settings):
    """P58: not when the first request needs them."""
    with pytest.raises(UserError):
        EngineConfig(**settings)


def test_pages_come_from_memory_or_as_asked_for():
    assert EngineConfig(cache_gib=1.0).device_pages(GIB // 10) == 10
    assert EngineConfig(pages=7).device_pages(GIB // 10) == 7
    assert EngineConfig(host_gib=0.5).tier_pages(GIB // 10) == 5
    assert EngineConfig(host_pages=3).tier_pages(GIB // 10) == 3
    with pytest.raises(UserError, match="less than one page"):
        EngineConfig(cache_gib=0.5).device_pages(GIB)
    assert EngineConfig().device_pages(GIB // 10) == 20


def test_pages_of_a_device_whose_room_is_known():
    """All of it unless less is asked for; what does not fit is refused before a step runs out of it."""
    assert EngineConfig().device_pages(GIB, room=5 * GIB + 1) == 5
    assert EngineConfig(cache_gib=3.0).device_pages(GIB, room=5 * GIB) == 3
    assert EngineConfig(pages=2).device_pages(GIB, room=5 * GIB) == 2
    for config in (EngineConfig(cache_gib=6.0), EngineConfig(pages=6)):
        with pytest.raises(UserError, match=r"needs 6.000 GiB, but the device has 5.500 beside weights"):
            config.device_pages(GIB, room=11 * GIB // 2)
    with pytest.raises(UserError, match=r"needs 1.000 GiB, but the device has 0.000 beside weights"):
        EngineConfig().device_pages(GIB, room=-GIB)


def test_room_on_a_gpu_is_what_is_free_beside_what_steps_need(monkeypatch):
    """Larger chunks, more requests and a wider vocabulary need more."""
    free = 100 * GIB
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 141 * GIB))
    real = ModelConfig.preset("glm-5.2")
    model: Any = SimpleNamespace(config=real, lm_head=SimpleNamespace(weight=torch.empty(0)))
    room = gpu_room(model, EngineConfig())
    assert free - 16 * GIB < room < free - 4 * GIB
    assert gpu_room(model, EngineConfig(max_chunk=8192)) < room - GIB
    assert gpu_room(model, EngineConfig(max_running=256)) < room
    free = 101 * GIB
    assert gpu_room(model, EngineConfig()) == room + GIB


def test_the_shortest_limit_of_the_context_holds():
    model = ModelConfig.preset("debug")  # reads 4096
    assert EngineConfig(page_size=64).context_limit(model, 10) == 640
    assert EngineConfig(page_size=64).context_limit(model, 1000) == 4096
    assert EngineConfig(page_size=64, max_context=100).context_limit(model, 1000) == 100


@pytest.mark.parametrize("rows", ["float32", "bfloat16", "fp8"])
def test_a_page_takes_the_bytes_that_are_planned(rows):
    """P25, P50: of every pool, in its own format."""
    model = debug_model()
    engine = make_engine(model, pages=5, host_pages=3, latent_rows=rows, index_rows=rows)
    token = cache_bytes_per_token(model.config, rows, rows, mtp=False)
    assert engine.memory.pools.nbytes == 5 * 4 * token
    assert engine.memory.tiers is not None
    assert engine.memory.tiers.host.memory.nbytes == 3 * 4 * token
    engine.close()
