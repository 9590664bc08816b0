"""Seats of running requests: given out once, emptied whole."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaspan.engine.request import Request
from megaspan.engine.sampling import SamplingParams
from megaspan.engine.slots import Slots


def request(number: int = 0, stop_ids: tuple[int, ...] = ()) -> Request:
    return Request(str(number), [1, 2, 3], SamplingParams(), 5, 0, number, stop_ids)


def test_a_slot_starts_with_what_the_request_has():
    """Nothing is left of who sat there before; what was drawn before a preemption counts."""
    slots = Slots(1)
    slots.enter(first := request(stop_ids=(7, 8)))
    slots.room[0], slots.last[0] = 9, 9
    slots.leave(first)
    again = request(1, (5,))
    again.tokens.append(4)
    again.computed = 2
    slots.enter(again)
    assert (slots.cached[0], slots.room[0], slots.drawn[0], slots.limit[0]) == (2, 0, 1, 5)
    assert slots.stops[0].tolist() == [5, *[-1] * 7]


@pytest.mark.parametrize(("count", "special"), [(8, False), (9, True)])
def test_more_stop_ids_than_places_make_a_request_special(count, special):
    slots = Slots(1)
    slots.enter(request(stop_ids=tuple(range(count))))
    assert bool(slots.special[0]) is special


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=40))
def test_seats_and_who_decodes(moves):
    """A model of dictionaries: each move seats or unseats request n, or switches its decoding."""
    slots, seated = Slots(3), {}
    for number, switching in moves:
        if number in seated and switching:
            one = seated[number]
            slots.set_decoding(one.slot, not slots.is_decoding[one.slot])
        elif number in seated:
            one = seated.pop(number)
            slots.leave(one)
            assert one.slot == -1
        elif slots.free:
            seated[number] = request(number)
            slots.enter(seated[number])
        taken = [one.slot for one in seated.values()]
        assert sorted(taken + slots.free) == [0, 1, 2]
        assert all(slots.requests[one.slot] is one for one in seated.values())
        assert slots.decoding.tolist() == sorted(slot for slot in taken if slots.is_decoding[slot])
        assert all(not slots.is_decoding[slot] for slot in slots.free)
