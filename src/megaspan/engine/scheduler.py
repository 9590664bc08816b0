"""Who runs in the next step: every decoding request, and chunks of prompts as the time allows."""

from bisect import insort
from collections import deque
from collections.abc import Callable
from itertools import islice

import numpy as np

from megaspan.cache.paged import PagedCache
from megaspan.cache.prefix_cache import Lease, PrefixCache
from megaspan.engine.admission import open_lease, waits_for_others
from megaspan.engine.config import EngineConfig
from megaspan.engine.pace import StepCost
from megaspan.engine.plan import Plan, share_out
from megaspan.engine.request import Request, State
from megaspan.engine.slots import Slots
from megaspan.engine.stats import Counters

LOOK_AHEAD = 64  # waiting requests that are considered at each step


class Scheduler:
    """Queues, admission, preemption. Calls `enter` when a request gets a slot, `leave` when it loses it."""

    def __init__(
        self,
        config: EngineConfig,
        prefixes: PrefixCache,
        paged: PagedCache,
        cost: StepCost,
        counters: Counters,
        enter: Callable[[Request], None],
        leave: Callable[[Request], None],
    ):
        self.config, self.prefixes, self.paged = config, prefixes, paged
        self.cost, self.counters = cost, counters
        self.weights_version = config.weights_version
        self.slots = Slots(config.max_running)
        self.waiting: deque[Request] = deque()  # by arrival
        self.loading: list[Request] = []
        self.reading: list[Request] = []  # by arrival
        self._enter, self._leave = enter, leave
        self._published = 0  # pages, since the start

    # ---- arrivals and departures

    def add(self, request: Request) -> None:
        request.state = State.waiting
        position = len(self.waiting)
        while position and self.waiting[position - 1].order > request.order:
            position -= 1
        self.waiting.insert(position, request)

    def remove(self, request: Request) -> None:
        """The request is finished, whatever it was doing: its pages are cached or free, its slot is free."""
        self._vacate(request)
        request.state = State.finished

    @property
    def is_empty(self) -> bool:
        return not (self.waiting or self.loading or self.reading or len(self.slots.decoding))

    def admit(self) -> None:
        """Give slots to those who wait, in order of arrival, as long as their prompts have room.

        Who waits keeps no lease: it would lock pages that the others need.
        """
        self._begin_loaded()
        if not self.slots.free:
            return
        version = self.weights_version
        ready = (request for request in list(self.waiting) if not waits_for_others(request, version))
        for request in islice(ready, LOOK_AHEAD):
            if not self.slots.free or not self._try_to_seat(request):
                return

    def _try_to_seat(self, request: Request) -> bool:
        """Give it a slot and its prefix; False where it has no room, which nobody after it is to take."""
        if not self._has_room(request.missing - (self._published - request.tried_at)):
            return False
        request.weights_version, request.tried_at = self.weights_version, self._published
        lease = open_lease(self.prefixes, request, (*self.reading, *self.loading))
        if lease is None:
            return True
        request.missing = self._pages(request) - len(lease.pages)
        restoring = self.prefixes.begin_restore(lease) if self._has_room(request.missing) else None
        if restoring is None:
            self.prefixes.close(lease)
            return False
        self._seat(request, lease, restoring)
        return True

    def _seat(self, request: Request, lease: Lease, restoring: bool) -> None:
        self.waiting.remove(request)
        request.lease = lease
        self._enter(request)
        self.paged.assign(request.slot, 0, lease.pages)
        self.slots.room[request.slot] = len(lease.pages) * self.prefixes.page_size
        if restoring:
            request.state = State.loading
            self.loading.append(request)
        else:
            self._read(request)

    def _begin_loaded(self) -> None:
        """Requests whose prefix has been found good and whose first layer is there begin to read."""
        for request in list(self.loading):
            lease = request.lease
            assert lease is not None
            assert lease.restore is not None
            if lease.restore.error is not None:
                self.loading.remove(request)
                self.give_up_restore(request)
                self._read(request)
            elif lease.restore.staged and lease.restore.ready(0):
                self.loading.remove(request)
                self.prefixes.settle_restore(lease)
                self.paged.assign(request.slot, len(lease.pages), [])
                self.slots.room[request.slot] = len(lease.pages) * self.prefixes.page_size
                self._read(request)

    def give_up_restore(self, request: Request) -> None:
        """What was to come from a lower tier is computed instead."""
        lease = request.lease
        assert lease is not None
        self.prefixes.abandon_restore(lease)
        self.paged.assign(request.slot, len(lease.pages), [])
        request.computed = len(lease.pages) * self.prefixes.page_size
        request.cached_tokens = min(request.cached_tokens, request.computed)
        self.slots.room[request.slot] = self.slots.cached[request.slot] = request.computed

    def _read(self, request: Request) -> None:
        assert request.lease is not None
        request.computed = len(request.lease.pages) * self.prefixes.page_size
        self.slots.cached[request.slot] = request.computed
        if request.cached_tokens < 0:
            request.cached_tokens = request.computed
        request.state = State.reading
        insort(self.reading, request, key=lambda one: one.order)

    def _has_room(self, missing: int) -> bool:
        """Whether so many pages can be had beside what others still need, with a page's growth for each."""
        promised = sum(
            self._pages(other) - len(other.lease.pages)
            for other in (*self.reading, *self.loading)
            if other.lease
        )
        running = len(self.reading) + len(self.loading) + len(self.slots.decoding)
        return self.prefixes.available() >= missing + promised + running

    def _pages(self, request: Request) -> int:
        return -(-len(request.tokens) // self.prefixes.page_size)

    # ---- the next step

    def plan(self) -> Plan | None:
        """Choose who runs, with pages for all that they will write; None when nobody can."""
        stalled = self._grow_decoding()
        plan = Plan(self._decoding_but(stalled))
        if self.reading:
            busy = self.cost.decode_seconds if len(plan.decoding) else 0.0
            seconds = self.config.step_seconds - busy - self.cost.base_seconds
            shares = share_out(self.reading, seconds, self.cost, self.config.max_chunk)
            for request, count in shares.items():
                if request.state is State.reading and self._make_room(request, request.computed + count):
                    plan.chunks.append((request, count))
            # Room for a chunk can have cost another request its place.
            plan.chunks = [
                (request, count) for request, count in plan.chunks if request.state is State.reading
            ]
            plan.decoding = self._decoding_but(stalled)
        return plan if len(plan.decoding) or plan.chunks else None

    def _grow_decoding(self) -> list[int]:
        """Pages for the decoding requests whose next row begins one; returns those that must sit it out.

        Few begin one at a time, so most steps do nothing here.
        """
        slots, stalled = self.slots, []
        decoding = slots.decoding
        for slot in decoding[slots.cached[decoding] >= slots.room[decoding]].tolist():
            request = slots.requests[slot]
            if request is not None and not self._make_room(request, int(slots.cached[slot]) + 1):
                stalled.append(slot)
        return stalled

    def _decoding_but(self, stalled: list[int]) -> np.ndarray:
        decoding = self.slots.decoding
        return decoding[~np.isin(decoding, stalled)] if stalled else decoding

    def _make_room(self, request: Request, tokens: int) -> bool:
        """Pages for so many rows; False if there are none just now, or the request had to give way itself.

        Where no transfer is about to free pages, the latest arrivals lose their place.
        """
        lease = request.lease
        assert lease is not None
        while (added := self.prefixes.grow(lease, tokens)) is None:
            if self.prefixes.is_moving:
                return False
            victim = self._latest()
            self.preempt(victim)
            if victim is request:
                return False
        if added:
            self.paged.assign(request.slot, len(lease.pages) - len(added), added)
            self.slots.room[request.slot] = len(lease.pages) * self.prefixes.page_size
        return True

    def _latest(self) -> Request:
        running = [request for request in self.slots.requests if request is not None]
        return max(running, key=lambda request: request.order)

    def preempt(self, request: Request) -> None:
        """Take a running request's slot and pages; it waits for new ones.

        The full ones stay cached, and go to the host tier before they are reused: it goes on from there.
        """
        self.counters.preempted += 1
        self._vacate(request)
        request.computed = request.missing = 0
        self.add(request)

    def _vacate(self, request: Request) -> None:
        if request.lease is not None:
            self.publish(request)
            self.prefixes.close(request.lease)
            request.lease = None
        if request.state is State.waiting and request in self.waiting:
            self.waiting.remove(request)
        for queue in (self.loading, self.reading):
            if request in queue:
                queue.remove(request)
        if request.slot >= 0:
            self._leave(request)

    # ---- after a step

    def advance(self, plan: Plan) -> None:
        """The step's rows are in the cache: full pages become reusable."""
        slots, size = self.slots, self.prefixes.page_size
        slots.cached[plan.decoding] += 1
        cached = slots.cached[plan.decoding]
        for slot in plan.decoding[cached % size == 0].tolist():
            request = slots.requests[slot]
            assert request is not None
            self.publish(request)
        for request, count in plan.chunks:
            request.computed += count
            slots.cached[request.slot] = request.computed
            self.publish(request)

    def begin_decoding(self, request: Request) -> None:
        """Its prompt has been read and its next token drawn, its first unless it was preempted."""
        if not request.generated:
            self.counters.prefix_queries += request.prompt_tokens
            self.counters.prefix_hits += request.cached_tokens
        self.reading.remove(request)
        request.state = State.decoding
        self.slots.set_decoding(request.slot, True)

    def publish(self, request: Request) -> None:
        """Hand the request's full pages to the tree, unless the weights changed while they were computed."""
        lease = request.lease
        if lease is None or request.slot < 0 or request.weights_version != self.weights_version:
            return
        size = self.prefixes.page_size
        full = int(self.slots.cached[request.slot]) // size
        if full > lease.published and request.state in (State.reading, State.decoding):
            before = lease.published
            tokens = request.ids(before * size, full * size)
            swaps = self.prefixes.publish(lease, tokens)
            self._published += lease.published - before
            if swaps:  # the pages behind them stay assigned
                first = swaps[0][0]
                self.paged.assign(request.slot, first, lease.pages[first:])
