"""The paged cache: any pages in any order, any slots, no rows but its own."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megaspan.cache.growing import GrowingCache
from megaspan.cache.paged import UNASSIGNED, PagedCache
from megaspan.cache.pool import PagePools
from megaspan.model.batch import Batch
from megaspan.model.selection import EVERYTHING
from tests.cache.finished_rows import finished
from tests.cache.paged_reads import DEBUG, LENGTH, MODEL, PAGE, TOKENS, cuts, paged, read
from tests.model.models import one_shot, random_tokens, relative_error

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@settings(max_examples=15)
@given(st.permutations(range(24)), cuts(LENGTH))
def test_order_of_physical_pages_changes_nothing(order, chunks):
    """P20: bit-equal to pages in order and to a growing cache, whatever the pages are and the chunks."""
    shuffled, ordered = paged(slots=3), paged()
    shuffled.assign(2, 0, order[:11])
    ordered.assign(0, 0, range(11))
    logits = read(shuffled, TOKENS, chunks, slot=2)
    assert torch.equal(logits, read(ordered, TOKENS, chunks))
    growing = GrowingCache(DEBUG, capacity=64)
    assert torch.equal(logits, read(growing, TOKENS, chunks))


def test_one_shot_is_bit_equal_to_no_cache_at_all():
    cache = paged()
    cache.assign(0, 0, [5, 23, 0, 7, 9, 2, 11, 3, 20, 21, 1])
    assert torch.equal(read(cache, TOKENS, [LENGTH]), one_shot(MODEL, TOKENS)[0])
    dense = read(cache, TOKENS, [LENGTH], selection=EVERYTHING)
    assert torch.equal(dense, one_shot(MODEL, TOKENS, dense=True)[0])


@pytest.mark.parametrize("size", [1, 3, 4, 5, 40])
@pytest.mark.parametrize("selection", [None, EVERYTHING], ids=["sparse", "dense"])
def test_schedule_of_chunks_gives_what_one_shot_gives(size, selection):
    """O3, with a page assigned when its first token comes."""
    cache, order = paged(), [5, 23, 0, 7, 9, 2, 11, 3, 20, 21, 1]
    pieces, held = [], 0
    for start in range(0, LENGTH, size):
        stop = min(start + size, LENGTH)
        needed = -(-stop // PAGE)
        cache.assign(0, held, order[held:needed])
        held = needed
        batch = Batch.of([TOKENS[start:stop]], [start])
        with torch.no_grad():
            pieces.append(MODEL.unembed(MODEL(batch, cache, selection)))
    expected = one_shot(MODEL, TOKENS, dense=selection is EVERYTHING)[0]
    assert relative_error(torch.cat(pieces), expected) < 1e-4


def test_dense_shortcut_still_writes_index_keys():
    """P11: a prompt of top-k tokens reads densely; what follows selects among its keys."""
    cache, short = paged(), DEBUG.index_topk
    cache.assign(0, 0, [8, 1, 6, 3, 4, 10, 2, 7, 0, 9, 5])
    read(cache, TOKENS, [short], selection=EVERYTHING)
    with torch.no_grad():
        rest = MODEL.unembed(MODEL(Batch.of([TOKENS[short:]], [short]), cache))
    assert relative_error(rest, one_shot(MODEL, TOKENS)[0][short:]) < 1e-4


@pytest.mark.parametrize("selection", [None, EVERYTHING], ids=["sparse", "dense"])
def test_slots_in_any_order_give_what_each_sequence_gives_alone(selection):
    """Seven slots, three in use, in another order in every step, one of them not in every batch."""
    cache, slots = paged(40, slots=7), [5, 0, 3]
    sequences = [random_tokens(DEBUG, 30, seed) for seed in range(3)]
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0)).tolist()
    for place, slot in enumerate(slots):
        cache.assign(slot, 0, order[8 * place : 8 * place + 8])
    outputs, past = [[], [], []], [0, 0, 0]
    for order, sizes in (((0, 1, 2), (9, 14, 1)), ((2, 0), (20, 1)), ((1, 2, 0), (16, 9, 20))):
        pieces = [sequences[s][past[s] : past[s] + n] for s, n in zip(order, sizes, strict=True)]
        batch = Batch.of(pieces, [past[s] for s in order], slots=[slots[s] for s in order])
        with torch.no_grad():
            logits = MODEL.unembed(MODEL(batch, cache, selection)).split(list(sizes))
        for s, n, piece in zip(order, sizes, logits, strict=True):
            outputs[s].append(piece)
            past[s] += n
    assert past == [30, 30, 30]
    for output, expected in zip(outputs, one_shot(MODEL, *sequences, dense=bool(selection)), strict=True):
        assert relative_error(torch.cat(output), expected) < 1e-4


def test_two_slots_may_read_the_same_prefix_pages():
    cache = paged(slots=2)
    cache.assign(0, 0, range(11))
    read(cache, TOKENS, [LENGTH])
    cache.assign(1, 0, [0, 1, 2, 3, 4, 20, 21, 22, 23, 12, 13])
    batch = Batch.of([TOKENS[20:]], [20], slots=[1])
    with torch.no_grad():
        again = MODEL.unembed(MODEL(batch, cache))
    assert relative_error(again, one_shot(MODEL, TOKENS)[0][20:]) < 1e-4


def test_a_step_writes_nothing_but_its_own_rows():
    """P32: a batch of changed make-up leaves every other row of every pool as it was."""
    cache = paged(slots=3)
    for slot in range(3):
        cache.assign(slot, 0, range(8 * slot, 8 * slot + 8))
    for tensors in cache.pools.storage.values():
        for rows in tensors:
            rows.fill_(7.0)
    with torch.no_grad():
        MODEL(Batch.of([TOKENS[:1], TOKENS[:5]], [30, 3], slots=[2, 0]), cache)
    expected = {16 * PAGE + 30, *range(3, 8)}
    for pool, layers in (("latent", range(9)), ("index", DEBUG.full_layers)):
        for layer in layers:
            changed = (cache.rows(pool, layer) != 7.0).any(1).nonzero()[:, 0].tolist()
            assert set(changed) == expected


def test_the_table_is_updated_in_place():
    cache = paged(slots=2)
    table = cache.table(Batch.of([[], []]))
    address = table.starts.data_ptr()
    cache.assign(1, 0, [3, 9])
    cache.assign(1, 2, [4])
    assert table.starts[1, :4].tolist()[:3] == [12, 36, 16]
    again = cache.table(Batch.of([[1]], [11], slots=[1]))
    assert again is table
    assert again.starts.data_ptr() == address
    cache.assign(1, 1, [5])
    assert table.starts[1, :2].tolist() == [12, 20]
    assert (table.starts[1, 2:] == UNASSIGNED).all()


def test_row_numbers_are_int64():
    """P18: a page whose first row is beyond 2^31."""
    pools: Any = SimpleNamespace(
        page_size=2**20, total_pages=2**12, device=torch.device("cpu"), scratch_page=None
    )
    cache = PagedCache(pools, 1, 4)
    cache.assign(0, 0, [2**11 - 1, 2**11, 2**12 - 1])
    batch = Batch.of([[1, 2]], [2**20 - 1])
    rows = cache.table(batch).rows(batch.sequence_ids, batch.positions[:, None])
    assert rows[:, 0].tolist() == [2**31 - 1, 2**31]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 2, [1]), "no page before page 2"),
        ((0, -1, [1]), "no page before page -1"),
        ((0, 0, [1] * 25), "would have 25 pages, but the table holds 24"),
        ((0, 0, [3, 24]), "a page outside the 24"),
        ((0, 0, [-1]), "a page outside the 24"),
    ],
)
def test_pages_that_do_not_fit_are_refused(arguments, message):
    cache = paged()
    cache.assign(0, 0, [7])
    with pytest.raises(ValueError, match=message):
        cache.assign(*arguments)
    assert cache.starts[0, 0] == 7 * PAGE


def test_a_sequence_longer_than_its_pages_is_refused():
    cache = paged(slots=2)
    cache.assign(1, 0, [7, 8])
    cache.table(Batch.of([[1] * 8], slots=[1]))
    with pytest.raises(ValueError, match="slot 1 has pages for 8 tokens, but the batch needs 9"):
        cache.table(Batch.of([[1]], [8], slots=[1]))
    cache.release(1)
    with pytest.raises(ValueError, match="slot 1 has pages for 0 tokens"):
        cache.table(Batch.of([[1]], slots=[1]))


def test_rows_of_another_batch_are_refused():
    cache = paged()
    cache.assign(0, 0, [1])
    cache.table(Batch.of([[1]]))
    with pytest.raises(ValueError, match="its table was not asked for"):
        cache.write_latent(0, Batch.of([[2]]), finished(torch.zeros(1, 40)))


def test_the_scratch_slot_is_one_more_and_has_one_page_everywhere():
    cache = PagedCache(PagePools(DEBUG, 5, PAGE, scratch=True), 2, max_pages=3)
    assert cache.scratch_slot == 2
    assert cache.starts[2].tolist() == [5 * PAGE] * 3
    assert (cache.starts[:2] == UNASSIGNED).all()
    cache.require_room([2, 2], [3 * PAGE, 1])
    with pytest.raises(ValueError, match="slot 2 has pages for 12 tokens, but the batch needs 13"):
        cache.require_room([2], [3 * PAGE + 1])
    with pytest.raises(ValueError, match="a page outside the 5"):
        cache.assign(0, 0, [5])
    assert paged().scratch_slot is None
