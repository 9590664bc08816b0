"""The growing cache: where rows land, what growth keeps, what it refuses, and its bytes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megaspan.cache.growing import GrowingCache
from megaspan.config import ModelConfig
from megaspan.costs.memory import cache_bytes_per_token
from megaspan.model.batch import Batch
from megaspan.model.selection import EVERYTHING
from tests.cache.finished_rows import finished
from tests.model.models import one_shot, random_model, random_tokens, relative_error
from tests.strategies import configs

DEBUG = ModelConfig.preset("debug")
pytestmark = pytest.mark.usefixtures("poisoned_memory")


def take(cache, batch):
    """What a forward pass does to the lengths."""
    cache.table(batch)
    cache.commit(batch)


@settings(max_examples=40)
@given(
    st.lists(st.lists(st.integers(0, 7), min_size=3, max_size=3), min_size=1, max_size=6),
    st.integers(0, 9),
)
def test_rows_are_found_again_however_it_grew(steps, capacity):
    """Sequences that lengthen at their own pace, moved whenever one outgrows the capacity."""
    cache = GrowingCache(DEBUG, sequences=3, capacity=capacity)
    generator = torch.Generator().manual_seed(0)
    held = {kind: [torch.empty(0, width)] * 3 for kind, width in (("latent", 40), ("index", 16))}
    past = [0, 0, 0]
    for sizes in steps:
        batch = Batch.of([[1] * size for size in sizes], past)
        table = cache.table(batch)
        past = [old + size for old, size in zip(past, sizes, strict=True)]
        for kind, layer in (("latent", 8), ("index", 6)):
            new = torch.randn(sum(sizes), held[kind][0].shape[1], generator=generator)
            write = cache.write_latent if kind == "latent" else cache.write_index
            rows = write(layer, batch, finished(new))
            held[kind] = [torch.cat(pair) for pair in zip(held[kind], new.split(sizes), strict=True)]
            for sequence, expected in enumerate(held[kind]):
                places = table.rows(torch.tensor([sequence]), torch.arange(past[sequence])[None])[0]
                assert torch.equal(rows[places], expected)
        cache.commit(batch)
        assert cache.lengths == past


def test_rows_of_a_pass_that_failed_are_not_past():
    cache, failed = GrowingCache(DEBUG, capacity=4), Batch.of([[1, 2, 3]])
    cache.table(failed)
    cache.write_latent(0, failed, finished(torch.full((3, 40), torch.nan)))
    again = Batch.of([[4, 5]])
    table = cache.table(again)
    rows = cache.write_latent(0, again, finished(torch.ones(2, 40)))
    cache.commit(again)
    assert cache.lengths == [2]
    assert rows[table.rows(torch.tensor([0]), torch.arange(2)[None])[0]].eq(1).all()


def test_layers_do_not_share_rows():
    cache, batch = GrowingCache(DEBUG, capacity=4), Batch.of([[1, 2, 3]])
    cache.table(batch)
    for layer in range(DEBUG.num_hidden_layers):
        cache.write_latent(layer, batch, finished(torch.full((3, 40), float(layer))))
    for layer in DEBUG.full_layers:
        cache.write_index(layer, batch, finished(torch.full((3, 16), 100.0 + layer)))
    for layer in range(DEBUG.num_hidden_layers):
        assert (cache.latent[layer][:3] == layer).all()
    for layer in DEBUG.full_layers:
        assert (cache.index[layer][:3] == 100 + layer).all()


def test_growth_doubles_so_that_moving_is_rare():
    cache, capacities = GrowingCache(DEBUG, capacity=2), set()
    for length in range(100):
        take(cache, Batch.of([[1]], [length]))
        capacities.add(cache.capacity)
    assert sorted(capacities) == [2, 4, 8, 16, 32, 64, 128]
    assert all(len(rows) == 128 for rows in (*cache.latent, *cache.index.values()))


@pytest.mark.parametrize("past", [0, 2, 4, 7])
def test_a_past_other_than_what_is_held_is_refused(past):
    cache = GrowingCache(DEBUG)
    take(cache, Batch.of([[1, 2, 3]]))
    with pytest.raises(ValueError, match=r"tokens are cached, but \[3\] are"):
        cache.table(Batch.of([[4]], [past]))
    assert cache.lengths == [3]
    cache.table(Batch.of([[4]], [3]))


def test_a_batch_of_more_sequences_is_refused():
    with pytest.raises(ValueError, match="tokens are cached"):
        GrowingCache(DEBUG, sequences=2).table(Batch.of([[1], [2], [3]]))


@settings(max_examples=20)
@given(configs(), st.sampled_from(["float32", "bfloat16"]), st.integers(0, 9))
def test_memory_is_what_the_plan_says(config, dtype, capacity):
    """P25: the same bytes per token as `megaspan plan`, which counts the draft layers' rows too."""
    config = config.replace(num_nextn_predict_layers=0)
    cache = GrowingCache(config, 2, capacity, getattr(torch, dtype))
    assert cache.memory() == {"latent": 0, "index": 0}
    take(cache, Batch.of([[1] * 5, [1] * 11]))
    assert sum(cache.memory().values()) == 16 * cache_bytes_per_token(config, dtype)


def test_memory_of_bf16_index_keys():
    def memory(**dtypes):
        cache = GrowingCache(DEBUG, **dtypes)
        take(cache, Batch.of([[1] * 10]))
        return cache.memory()

    both = memory()
    assert both == {"latent": 10 * 9 * 40 * 4, "index": 10 * 4 * 16 * 4}
    assert memory(index_dtype=torch.bfloat16) == {"latent": both["latent"], "index": both["index"] // 2}


@pytest.mark.parametrize("capacity", [1, 11, 64])
def test_dense_attention_reads_through_the_table(capacity):
    """Room that is reserved but empty, rows of several sequences, and a past: none of it is in order."""
    model = random_model(DEBUG)
    sequences = [random_tokens(DEBUG, 21, seed) for seed in range(2)]
    cache, past, outputs = GrowingCache(DEBUG, 2, capacity), [0, 0], [[], []]
    for sizes in ([5, 11], [16, 1], [0, 9]):
        pieces = [s[a : a + n] for s, a, n in zip(sequences, past, sizes, strict=True)]
        with torch.no_grad():
            logits = model.unembed(model(Batch.of(pieces, past), cache, EVERYTHING))
        for output, piece in zip(outputs, logits.split(sizes), strict=True):
            output.append(piece)
        past = [a + n for a, n in zip(past, sizes, strict=True)]
    for output, expected in zip(outputs, one_shot(model, *sequences, dense=True), strict=True):
        assert relative_error(torch.cat(output), expected) < 1e-5
