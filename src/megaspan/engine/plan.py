"""What one step does, and how its time is shared between the prompts that are being read.

Half of the time, and of the tokens, goes to whoever is nearest to its first token, the rest to whoever has
waited longest: a short question gets through while a long prompt is being read, and that gets read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from megaspan.cache.jobs import Restore
from megaspan.engine.pace import StepCost
from megaspan.engine.request import Request
from megaspan.engine.slots import Slots

LEAST_CHUNK = 16  # tokens: a smaller one costs as much


@dataclass
class Plan:
    """One step. decoding: slots that read their last token. chunks: requests, and how much they read."""

    decoding: np.ndarray
    chunks: list[tuple[Request, int]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.chunks)

    @property
    def pairs(self) -> float:
        """Σ over the chunks' tokens of the cached tokens each may meet."""
        return sum(count * (request.computed + count / 2) for request, count in self.chunks)

    def requests(self, slots: Slots) -> list[Request]:
        """Who takes part."""
        decoding = [slots.requests[slot] for slot in self.decoding.tolist()]
        return [*(request for request in decoding if request), *(request for request, _ in self.chunks)]

    @cached_property
    def restores(self) -> list[Restore]:
        """Transfers that bring the rows that the step reads; waiting for one that failed raises."""
        leases = [request.lease for request, _ in self.chunks if request.lease is not None]
        restores = [lease.restore for lease in leases if lease.restore is not None]
        return [restore for restore in restores if restore.error or not restore.done]


def share_out(reading: Sequence[Request], seconds: float, cost: StepCost, most: int) -> dict[Request, int]:
    """How many prompt tokens each request gets of a step's `seconds`, `most` in all.

    reading: by arrival. The nearest and the oldest get a least chunk each, however slow the machine.
    """
    shares: dict[Request, int] = {}
    nearest = sorted(reading, key=lambda request: (request.remaining, request.order))
    for order, part in ((nearest, 0.5), (reading, 1.0)):
        time = part * seconds - _time_of(shares, cost)
        left = int(part * most) - sum(shares.values())
        for place, request in enumerate(order):
            taken = shares.get(request, 0)
            wanted = min(request.remaining - taken, left)
            fitting = cost.tokens_within(time, request.computed + taken)
            if place == 0 and not taken:
                fitting = max(fitting, LEAST_CHUNK)
            count = min(wanted, fitting)
            if count <= 0 or (not taken and count < min(wanted, LEAST_CHUNK)):
                continue
            shares[request] = taken + count
            time -= cost.seconds(count, request.computed + taken)
            left -= count
    return shares


def _time_of(shares: dict[Request, int], cost: StepCost) -> float:
    return sum(cost.seconds(count, request.computed) for request, count in shares.items())
