"""Engines one after the other on a disk folder: what the next one finds, and what it must not."""

import os
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megaspan.costs.memory import Format
from megaspan.engine.memory import _arithmetic, _fingerprint
from megaspan.model.batch_invariance import set_batch_invariant
from megaspan.ops import native
from tests.engine.engines import DEBUG, GREEDY, assert_idle, assert_solo, debug_model, make_engine, prompt
from tests.model.models import random_model

pytestmark = pytest.mark.usefixtures("poisoned_memory")
IDS = prompt(40)


@pytest.fixture(scope="module")
def model():
    return debug_model()


@pytest.fixture
def make(model, tmp_path):
    made = []

    def make(of=model, **options):
        made.append(make_engine(of, pages=24, host_pages=8, disk_folder=tmp_path, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.mark.parametrize("policy", ["write_back", "write_through"])
def test_the_second_turn_is_restored_from_the_disk_after_a_restart(model, make, policy):
    """P44: though no page was ever evicted, and there are more of them than host slots."""
    first = make(write_policy=policy)
    turn = IDS + [token for output in first.generate([IDS], GREEDY)[0] for token in output.token_ids]
    first.close()
    again = make(write_policy=policy)
    assert again.stats().disk_pages_used == 11
    outputs = again.generate([[*turn, 5]], GREEDY)[0]
    assert outputs[-1].cached_tokens == again.stats().host_hits_total == 44
    assert_solo(model, [*turn, 5], GREEDY, outputs)
    assert_idle(again)


def test_a_request_that_runs_at_the_end_leaves_what_it_has_read(model, make):
    first = make(write_policy="write_back")
    first.submit(IDS, GREEDY)
    while not first.stats().generation_tokens_total:
        first.step()
    first.close()
    assert make().generate([IDS], GREEDY)[0][-1].cached_tokens == 36


def test_after_a_flush_nothing_is_found_now_or_by_the_next_engine(model, make):
    first = make()
    first.generate([IDS], GREEDY)
    first.flush_cache()
    assert first.generate([IDS], GREEDY)[0][-1].cached_tokens == 0
    first.flush_cache()
    first.close()
    assert make().generate([IDS], GREEDY)[0][-1].cached_tokens == 0


@pytest.mark.parametrize(
    "tell", [lambda engine: engine.flush_cache(), lambda engine: engine.set_weights_version("1")]
)
def test_rows_of_weights_that_were_changed_are_not_found_under_the_old_ones(make, tell):
    """The next process begins with those again, and may come to other ones under the same version."""
    changed = debug_model()
    first = make(of=changed)
    first.generate([IDS], GREEDY)
    with torch.no_grad():
        changed.model.embed_tokens.weight[IDS] *= 2
    tell(first)
    outputs = first.generate([IDS], GREEDY)[0]
    assert_solo(changed, IDS, GREEDY, outputs)
    first.close()
    again = make()
    again.set_weights_version(first.weights_version)
    assert again.generate([IDS], GREEDY)[0][-1].cached_tokens == 0


def test_an_engine_ends_though_its_disk_hangs(make, monkeypatch):
    """P47: within the bound, and a second."""
    engine, go = make(write_policy="write_back"), threading.Event()
    engine.generate([IDS], GREEDY)
    monkeypatch.setattr("megaspan.engine.memory.SAVING_SECONDS", 0.1)
    monkeypatch.setattr(engine.memory.tiers.disk, "_write_file", lambda *arguments: go.wait(10.0))
    began = time.monotonic()
    engine.close()
    assert time.monotonic() - began < 3.0
    go.set()


def test_rows_of_other_arithmetic_are_told_apart():
    """O4: rows that another process goes on from must have the bits that it would have computed."""

    def name(model, latent: Format = "float32", index: Format = "float32", page_size=4):
        return _fingerprint(model, latent, index, page_size)

    model = random_model(DEBUG)
    names = [name(model), name(model, latent="fp8"), name(model, index="fp8"), name(model, page_size=8)]
    names.append(_fingerprint(model, "float32", "float32", 4, rotate_index=False))
    set_batch_invariant(model)
    names.append(name(model))
    names.append(name(random_model(DEBUG, 1)))
    names.append(name(random_model(DEBUG).bfloat16()))
    assert len(set(names)) == len(names)
    assert name(random_model(DEBUG)) == names[0]
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    assert name(random_model(DEBUG)) == names[0]
    torch.set_num_threads(threads)


def test_rows_of_another_layout_are_told_apart(monkeypatch):
    """Pages of the disk are bytes: those of an older layout would read as other numbers."""
    model = random_model(DEBUG)
    name = _fingerprint(model, "float32", "fp8", 4)
    monkeypatch.setattr("megaspan.engine.memory.LAYOUT", 1)
    assert _fingerprint(model, "float32", "fp8", 4) != name


@pytest.mark.skipif(os.environ.get("MEGASPAN_NATIVE") == "0", reason="without compiled operations")
def test_rows_of_compiled_operations_are_told_from_pytorchs(monkeypatch):
    """O4: they add in another order; and those of other sources in yet another."""
    model = random_model(DEBUG)
    names = [_fingerprint(model, "float32", "float32", 4)]
    monkeypatch.setattr(native, "load", lambda source: None)
    names.append(_fingerprint(model, "float32", "float32", 4))
    for folder in ("one", "another"):
        library = SimpleNamespace(_name=f"/{folder}/linear-of-other-sources.so")
        monkeypatch.setattr(native, "load", lambda source, library=library: library)
        names.append(_fingerprint(model, "float32", "float32", 4))
    assert names.pop() == names[-1]
    assert len(set(names)) == 3


def test_rows_of_another_kind_of_device_are_told_apart(monkeypatch):
    """O4: of a CPU and a GPU engine on one folder."""
    monkeypatch.setattr(native, "load", lambda source: None)
    models: Any = [
        SimpleNamespace(lm_head=SimpleNamespace(weight=torch.empty(1, device=device)), batch_invariant=False)
        for device in ("cpu", "meta")
    ]
    assert _arithmetic(models[0]) != _arithmetic(models[1])
