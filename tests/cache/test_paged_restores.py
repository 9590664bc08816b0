"""Passes over pages whose rows are still on their way, or do not come."""

import threading
from types import SimpleNamespace

import pytest
import torch

from megaspan.model.batch import Batch
from megaspan.model.selection import EVERYTHING
from tests.cache.finished_rows import finished
from tests.cache.paged_reads import DEBUG, LENGTH, MODEL, TOKENS, paged, read
from tests.model.models import one_shot

pytestmark = pytest.mark.usefixtures("poisoned_memory")


class Loader(threading.Thread):
    """Restores pages from a copy of the segments, one after the other; `gate` opens at each layer."""

    def __init__(self, pools, saved, pages, delays=()):
        super().__init__(daemon=True)
        self.pools, self.saved, self.pages, self.delays = pools, saved, pages, dict(delays)
        self.marks = [threading.Event() for _ in pools.layers["latent"]]
        self.waited: list[int] = []

    def run(self):
        segments = self.pools.segments
        for place, (segment, rows) in enumerate(zip(segments, self.saved, strict=True)):
            held = self.delays.get((segment.pool, segment.layer))
            if held is not None:
                held.wait(5)
            segment.pages[self.pages] = rows
            if place + 1 == len(segments) or segments[place + 1].layer != segment.layer:
                self.marks[segment.layer].set()

    def wait(self, layer):
        self.waited.append(layer)
        assert self.marks[layer].wait(5)


def evicted(cache, pages):
    """Copy the pages out of every segment and poison what they leave behind."""
    saved = [segment.pages[pages].clone() for segment in cache.pools.segments]
    for segment in cache.pools.segments:
        segment.pages[pages] = 255
    return saved


@pytest.mark.parametrize("accessor", ["write_latent", "write_index", "rows latent", "rows index"])
def test_every_accessor_waits_for_the_restore_of_its_layer(accessor):
    """P39: an index page of layer 6 is late; nobody gets that layer's rows of either pool before it."""
    cache = paged()
    cache.assign(0, 0, [0, 1, 2])
    late, returned = threading.Event(), threading.Event()
    loader = Loader(cache.pools, evicted(cache, [0, 1]), [0, 1], {("index", 6): late})
    batch = Batch.of([[1]], [8])
    cache.depend_on([loader])
    cache.table(batch)
    loader.start()
    calls = {
        "write_latent": lambda layer: cache.write_latent(layer, batch, finished(torch.zeros(1, 40))),
        "write_index": lambda layer: cache.write_index(layer, batch, finished(torch.zeros(1, 16))),
        "rows latent": lambda layer: cache.rows("latent", layer),
        "rows index": lambda layer: cache.rows("index", layer),
    }
    call = calls[accessor]
    call(2)  # an earlier layer is ready already
    reader = threading.Thread(target=lambda: (call(6), returned.set()), daemon=True)
    reader.start()
    assert not returned.wait(0.05)
    late.set()
    assert returned.wait(5)
    assert loader.waited == [2, 6]


@pytest.mark.parametrize("late", [("latent", 0), ("index", 1), ("latent", 4), ("index", 6), ("latent", 8)])
@pytest.mark.parametrize("selection", [None, EVERYTHING], ids=["sparse", "dense"])
def test_round_trip_that_is_still_under_way_changes_nothing(late, selection):
    """P39, O4: the pass begins while the poisoned pages are being filled, one of them late."""
    cache, pages = paged(), [5, 23, 0, 7, 9]
    cache.assign(0, 0, [*pages, 2, 11, 3, 20, 21, 1])
    read(cache, TOKENS, [20], selection=selection)
    batch = Batch.of([TOKENS[20:]], [20])
    with torch.no_grad():
        expected = MODEL.unembed(MODEL(batch, cache, selection))
    gate = threading.Event()
    loader = Loader(cache.pools, evicted(cache, pages), pages, {late: gate})
    cache.depend_on([loader])
    loader.start()
    opener = threading.Timer(0.02, gate.set)
    opener.start()
    with torch.no_grad():
        logits = MODEL.unembed(MODEL(batch, cache, selection))
    opener.join()
    assert torch.equal(logits, expected)


def test_a_restore_that_fails_stops_the_pass_and_the_next_does_not_ask_it():
    """P47: the exception comes out of the pass; recomputing without the restore then works."""

    class Lost:
        def wait(self, layer):
            if layer == 3:
                raise OSError("the host tier is gone")

    cache = paged()
    cache.assign(0, 0, range(11))
    cache.depend_on([Lost()])
    with pytest.raises(OSError, match="is gone"):
        read(cache, TOKENS, [LENGTH])
    cache.depend_on([])
    assert torch.equal(read(cache, TOKENS, [LENGTH]), one_shot(MODEL, TOKENS)[0])


def test_restores_are_waited_for_in_one_pass_only():
    cache, calls = paged(), []
    cache.assign(0, 0, range(11))
    cache.depend_on([SimpleNamespace(wait=calls.append)])
    read(cache, TOKENS, [LENGTH - 1])
    latent, index = list(range(9)), list(DEBUG.full_layers)
    assert sorted(calls) == sorted(latent + index)
    with torch.no_grad():
        MODEL(Batch.of([TOKENS[-1:]], [LENGTH - 1]), cache)
    assert len(calls) == 13
