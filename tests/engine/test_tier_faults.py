"""Tiers under the engine: evicted, restored, late, failed, hanging, a request gives what it gives alone."""

import threading
import time
from functools import partial

import pytest

from megaspan.cache.jobs import Backup, Restore
from megaspan.cache.restore_policy import RestorePolicy
from megaspan.engine.request import State
from tests.engine.engines import BOUND, GREEDY, assert_idle, assert_solo, drain, evict_device, prompt

pytestmark = pytest.mark.usefixtures("poisoned_memory")
POLICIES = ("write_through", "write_back")
IDS = prompt(40)  # five times what a token attends to, ten pages


@pytest.fixture
def make(make):
    return partial(make, pages=24, host_pages=40)


def on_host(engine, ids=IDS):
    """Serve the prompt, then evict it: its full pages are in the host tier alone."""
    engine.generate([ids], GREEDY)
    evict_device(engine)
    assert engine.stats().pages_cached == 0


def gate(engine, kind, stop):
    """Make jobs of a kind wait at the segments for which `stop` holds: (somebody waits, go on)."""
    reached, go = threading.Event(), threading.Event()

    def wait(job, segment):
        if isinstance(job, kind) and stop(segment):
            reached.set()
            assert go.wait(BOUND)

    engine.memory.tiers.transfers.before_segment = wait
    return reached, go


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rows", ["float32", "bfloat16", "fp8"])
def test_round_trip_through_the_host(model, make, policy, rows):
    """P40, P44: pages of every pool come back whole: the prefix is a hit, and only the rest is computed."""
    engine = make(write_policy=policy, latent_rows=rows, index_rows=rows)
    first = engine.generate([IDS], GREEDY)[0]
    evict_device(engine)
    computed = engine.stats().prompt_tokens_total
    second = engine.generate([IDS], GREEDY)[0]
    stats = engine.stats()
    assert [each.token_ids for each in second] == [each.token_ids for each in first]
    assert [each.logprobs for each in second] == [each.logprobs for each in first]
    assert second[-1].cached_tokens == stats.host_hits_total == 36
    assert stats.prompt_tokens_total - computed == 4
    if rows == "float32":
        assert_solo(model, IDS, GREEDY, second)
    assert_idle(engine)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_full_device_gives_way_to_what_is_restored(model, make, policy):
    """P44: hits on the host count where every device page is taken, saved or not, by prefixes nobody uses."""
    engine = make(write_policy=policy)
    on_host(engine)
    for seed in (1, 2):
        engine.generate([prompt(44, seed)], GREEDY)
    assert engine.stats().pages_free < 10
    outputs = engine.generate([IDS], GREEDY)[0]
    assert outputs[-1].cached_tokens == 36
    assert_solo(model, IDS, GREEDY, outputs)
    assert_idle(engine)


def test_no_accessor_reads_an_index_row_before_it_is_there(model, make):
    """P39: index rows of a layer come late; the step that has begun waits, and its time teaches nothing."""
    engine = make()
    on_host(engine)
    reached, go = gate(engine, Restore, lambda segment: (segment.pool, segment.layer) == ("index", 6))
    threading.Thread(target=lambda: (reached.wait(BOUND), time.sleep(0.1), go.set()), daemon=True).start()
    measured = []
    engine.cost.measured_chunks = lambda *arguments: measured.append(arguments)
    outputs = engine.generate([IDS], GREEDY)[0]
    assert reached.is_set()
    assert not measured
    assert outputs[-1].cached_tokens == 36
    assert_solo(model, IDS, GREEDY, outputs)


def test_a_restore_slower_than_computing_is_not_made(model, make):
    """P45: a slow host tier is left alone, whatever it holds."""
    engine = make()
    on_host(engine)
    engine.memory.tiers.policy = RestorePolicy(prior=1.0)  # a byte a second
    outputs = engine.generate([IDS], GREEDY)[0]
    assert outputs[-1].cached_tokens == 0
    assert engine.stats().host_hits_total == 0
    assert_solo(model, IDS, GREEDY, outputs)
    assert_idle(engine)


@pytest.mark.parametrize("layer", [0, 4])
def test_a_loader_that_raises_is_done_without(model, make, layer):
    """P47: the request computes what did not come, and gives the same; the next restore is tried anew."""
    engine = make()
    on_host(engine)

    def fail(job, segment):
        if isinstance(job, Restore) and segment.layer == layer:
            raise OSError("injected")

    engine.memory.tiers.transfers.before_segment = fail
    outputs = engine.generate([IDS], GREEDY)[0]
    assert outputs[-1].cached_tokens == 0
    assert engine.stats().failed_restores_total == 1
    assert_solo(model, IDS, GREEDY, outputs)
    engine.memory.tiers.transfers.before_segment = None
    evict_device(engine)
    assert engine.generate([IDS], GREEDY)[0][-1].cached_tokens == 36
    assert_idle(engine)


def test_a_loader_that_never_returns_is_done_without(model, make):
    """P47: within the bound, its pages untouched until it lets go; others are served meanwhile."""
    engine = make(load_timeout=0.2)
    on_host(engine)
    reached, go = gate(engine, Restore, lambda segment: segment.layer == 3)
    began = time.monotonic()
    ids = [engine.submit(IDS, GREEDY), engine.submit(prompt(20, 1), GREEDY)]
    outputs = drain(engine, 100_000)
    assert time.monotonic() - began < 5.0
    assert reached.is_set()
    assert_solo(model, IDS, GREEDY, outputs[ids[0]])
    assert_solo(model, prompt(20, 1), GREEDY, outputs[ids[1]])
    assert engine.stats().pages_locked == 9  # the hanging thread may still write to them
    engine.check()
    go.set()
    assert_idle(engine)


def failing_at_the_second_layer(engine):
    """Restores fail there, once they are let go: (they have come so far, let them go)."""
    reached, go = threading.Event(), threading.Event()

    def fail(job, segment):
        if isinstance(job, Restore) and segment.layer == 1:
            reached.set()
            assert go.wait(BOUND)
            raise OSError("injected")

    engine.memory.tiers.transfers.before_segment = fail
    return reached, go


def test_a_restore_that_fails_between_two_steps_is_not_read(model, make):
    """P39, P47: failed and over before the step that would wait for it; its pages hold poison."""
    engine = make()
    on_host(engine)
    reached, go = failing_at_the_second_layer(engine)
    engine.submit(IDS, GREEDY, "one")
    engine._receive()
    engine.scheduler.admit()
    assert reached.wait(BOUND)
    engine.scheduler.admit()  # as while another request's step runs: the first layer is there
    request = engine.requests["one"]
    assert request.state is State.reading
    go.set()
    assert engine.memory.tiers.transfers.flush(BOUND)
    outputs = drain(engine)["one"]
    assert_solo(model, IDS, GREEDY, outputs)
    assert outputs[-1].cached_tokens == 0
    assert_idle(engine)


def test_rows_of_a_failed_restore_are_not_published_by_an_abort(model, make):
    """P39, P61: who is aborted before it noticed leaves no rows behind that others would find."""
    engine = make()
    on_host(engine)
    reached, go = failing_at_the_second_layer(engine)
    engine.submit(IDS, GREEDY, "one")
    engine._receive()
    engine.scheduler.admit()
    assert reached.wait(BOUND)
    engine.scheduler.admit()
    go.set()
    assert engine.memory.tiers.transfers.flush(BOUND)
    engine.abort("one")
    drain(engine)
    engine.memory.tiers.transfers.before_segment = None
    assert_solo(model, IDS, GREEDY, engine.generate([IDS], GREEDY)[0])
    assert_idle(engine)


def test_pages_of_an_aborted_restore_are_nobodys_until_it_lets_go(model, make):
    """P52: a late write hits pages that no other request has been given."""
    engine = make()
    on_host(engine)
    reached, go = gate(engine, Restore, lambda segment: segment.layer == 0)
    engine.submit(IDS, GREEDY, "one")
    engine.step()
    assert reached.wait(BOUND)
    (pages,) = (list(lease.pages) for lease in engine.memory.prefixes.leases)
    engine.abort("one")
    assert [output.finish_reason for output in engine.step()] == ["abort"]
    other = prompt(50, 1)
    engine.submit(other, GREEDY, "two")
    outputs = []
    while engine.has_work:
        assert not [
            page for lease in engine.memory.prefixes.leases for page in lease.pages if page in set(pages)
        ]
        outputs += engine.step()
    assert engine.stats().pages_locked == len(pages)
    go.set()
    assert_solo(model, other, GREEDY, outputs)
    assert_idle(engine)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_backup_that_fails_costs_a_hit_and_nothing_else(model, make, policy):
    """P48: its slots come back, its pages can be evicted."""
    engine = make(write_policy=policy)

    def fail(job, segment):
        if isinstance(job, Backup):
            raise OSError("injected")

    engine.memory.tiers.transfers.before_segment = fail
    on_host(engine)
    assert engine.stats().host_pages_used == 0
    outputs = engine.generate([IDS], GREEDY)[0]
    assert outputs[-1].cached_tokens == 0
    assert_solo(model, IDS, GREEDY, outputs)
    assert_idle(engine)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_backup_that_hangs_does_not_hold_up_the_engine(model, make, policy):
    """P47, P48: what it reads stays where it is; requests that fit beside it are served."""
    engine = make(write_policy=policy, load_timeout=0.2)
    engine.generate([IDS], GREEDY)
    reached, go = gate(engine, Backup, lambda segment: True)
    prompts = [prompt(30, seed) for seed in range(1, 7)]
    for ids, each in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
        assert_solo(model, ids, GREEDY, each)
    assert reached.wait(BOUND)
    go.set()
    assert_idle(engine)


def test_who_needs_a_prefix_that_another_is_restoring_waits_for_it(make):
    """The transfer is made once."""
    engine = make()
    on_host(engine)
    longer = [IDS + prompt(6, seed) for seed in (1, 2, 3)]
    outputs = engine.generate(longer, GREEDY)
    assert [each[-1].cached_tokens for each in outputs] == [40, 40, 40]
    assert engine.stats().host_hits_total == 40
    assert_idle(engine)
