"""The properties of the design page, on `debug` and on random models, always longer than top-k."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings

from megaspan.cache.growing import GrowingCache
from megaspan.cache.transient import TransientCache
from megaspan.config import ModelConfig
from megaspan.model.attention import Attention
from megaspan.model.batch import Batch
from megaspan.model.observe import AttentionSeen
from megaspan.model.selection import EVERYTHING, Selection
from megaspan.ops.index_topk import index_topk_reference
from megaspan.ops.rows import RowTable
from tests.model.models import in_chunks, one_shot, random_model, random_tokens, relative_error
from tests.strategies import configs

DEBUG = ModelConfig.preset("debug")
LENGTH = 41  # five times debug's top-k
some_models = settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
pytestmark = pytest.mark.usefixtures("poisoned_memory")


def untied(config: ModelConfig) -> ModelConfig:
    """With few index heads many scores are exactly 0; 32 make such ties at the cut rare."""
    return config.replace(index_n_heads=32)


@some_models
@given(config=configs(), seed=st.integers(0, 3))
@example(config=DEBUG, seed=0)
def test_dense_selection_of_everything_equals_dense_attention(config, seed):
    model = random_model(config.replace(index_topk=LENGTH), seed)
    tokens = random_tokens(config, LENGTH, seed)
    assert relative_error(one_shot(model, tokens)[0], one_shot(model, tokens, dense=True)[0]) < 1e-4


@some_models
@given(config=configs(), seed=st.integers(0, 3))
@example(config=untied(DEBUG), seed=0)
def test_gather_sparse_attention_equals_a_loop_over_the_best_rows(config, seed):
    model = random_model(config, seed)
    tokens = random_tokens(config, LENGTH, seed)
    expected = forward_by_loops(model, tokens)
    assert relative_error(one_shot(model, tokens)[0], expected) < 1e-4


@torch.no_grad()
def forward_by_loops(model, tokens):
    """The model in expanded form, one query at a time over the positions that it selects."""
    batch, config = Batch.of([tokens]), model.config
    hidden = model.model.embed_tokens(tokens)
    table = RowTable(torch.zeros(1, 1, dtype=torch.long), LENGTH)
    from megaspan.model.layers import Rotation

    rotation = Rotation(batch.positions, config.qk_rope_head_dim, config.rope_theta)
    chosen = torch.empty(0)
    for layer in model.model.layers:
        attention: Attention = layer.self_attn
        normed = layer.input_layernorm(hidden)
        latent = attention.q_a_layernorm(attention.q_a_proj(normed))
        query = attention.q_b_proj(latent).unflatten(-1, (config.num_attention_heads, -1))
        query = torch.cat(
            (query[..., : config.qk_nope_head_dim], rotation(query[..., config.qk_nope_head_dim :])), -1
        )
        key, value = attention.expand(attention.new_rows(normed, rotation).rows)
        if attention.indexer is not None:
            keys = attention.indexer.keys(normed, rotation)
            index_query, weights = attention.indexer.queries(normed, latent, rotation)
            chosen = index_topk_reference(
                index_query, weights, keys, table, batch.sequence_ids, batch.visible, config.index_topk
            )
        outputs = []
        for token in range(LENGTH):
            positions = chosen[token][chosen[token] >= 0].long()
            scores = torch.einsum("hd,khd->hk", query[token], key[positions]) * config.qk_head_dim**-0.5
            outputs.append(torch.einsum("hk,khv->hv", scores.softmax(-1), value[positions]).flatten())
        hidden = hidden + attention.o_proj(torch.stack(outputs))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return model.unembed(model.model.norm(hidden))


def test_schedule_chunks_of_every_size_equal_one_shot():
    model, tokens = random_model(untied(DEBUG)), random_tokens(DEBUG, LENGTH)
    expected = one_shot(model, tokens)[0]
    for chunk in range(1, LENGTH + 1):
        chunks = [min(chunk, LENGTH - start) for start in range(0, LENGTH, chunk)]
        assert relative_error(in_chunks(model, tokens, chunks), expected) < 1e-5, chunk


@some_models
@given(configs(index_n_heads=32), st.lists(st.integers(1, 12), min_size=2, max_size=8), st.integers(0, 3))
def test_schedule_random_chunks_equal_one_shot(config, chunks, seed):
    model, tokens = random_model(config, seed), random_tokens(config, sum(chunks), seed)
    assert relative_error(in_chunks(model, tokens, chunks), one_shot(model, tokens)[0]) < 1e-4


@some_models
@given(configs(index_n_heads=32), st.lists(st.integers(1, 30), min_size=2, max_size=4), st.integers(0, 3))
def test_pack_a_packed_sequence_gives_what_it_gives_alone(config, lengths, seed):
    model = random_model(config, seed)
    sequences = [random_tokens(config, length, seed + n) for n, length in enumerate(lengths)]
    for packed, sequence in zip(one_shot(model, *sequences), sequences, strict=True):
        assert relative_error(packed, one_shot(model, sequence)[0]) < 1e-4


def test_pack_sequences_that_grow_together_in_one_cache_equal_each_alone():
    config = untied(DEBUG)
    model = random_model(config)
    sequences = [random_tokens(config, 33, seed) for seed in range(3)]
    cache, starts = GrowingCache(config, 3, capacity=2), [0, 0, 0]
    outputs: list[list[torch.Tensor]] = [[], [], []]
    for sizes in ([5, 1, 20], [1, 30, 1], [27, 2, 12]):  # prefill and decode mixed in one batch
        pieces = [s[a : a + n] for s, a, n in zip(sequences, starts, sizes, strict=True)]
        with torch.no_grad():
            logits = model.unembed(model(Batch.of(pieces, starts), cache))
        for output, piece in zip(outputs, logits.split(sizes), strict=True):
            output.append(piece)
        starts = [a + n for a, n in zip(starts, sizes, strict=True)]
    for output, sequence in zip(outputs, sequences, strict=True):
        assert relative_error(torch.cat(output), one_shot(model, sequence)[0]) < 1e-5


def test_sharing_a_shared_layer_uses_exactly_its_full_layers_selection(monkeypatch):
    model, tokens = random_model(DEBUG), random_tokens(DEBUG, LENGTH)
    used: list[Selection] = []
    original = Attention.forward

    def spy(self, hidden, selection, *rest):
        output, selection = original(self, hidden, selection, *rest)
        used.append(selection)
        return output, selection

    monkeypatch.setattr(Attention, "forward", spy)
    one_shot(model, tokens)
    serving = 0
    for layer, kind in enumerate(DEBUG.indexer_types):
        serving = layer if kind == "full" else serving
        assert used[layer] is used[serving]
    assert len({id(selection) for selection in used}) == len(DEBUG.full_layers)


def test_sharing_shared_layers_have_neither_indexer_weights_nor_index_rows():
    model, cache = random_model(DEBUG), GrowingCache(DEBUG)
    with_indexer = {name.split(".")[2] for name in model.state_dict() if ".indexer." in name}
    assert with_indexer == {str(layer) for layer in DEBUG.full_layers}
    assert tuple(cache.index) == DEBUG.full_layers


def test_order_permuted_physical_rows_change_nothing():
    """P20: rows are found through the table only."""

    class ShuffledCache(TransientCache):
        page_size = 4
        pages = torch.randperm(20, generator=torch.Generator().manual_seed(3))

        def table(self, batch):
            return RowTable((self.pages * self.page_size)[None], self.page_size)

        def place(self, batch, rows):
            storage = torch.full((80, rows.shape[1]), torch.nan)
            numbers = self.table(batch).rows(batch.sequence_ids[:1], batch.positions[None])[0]
            return storage.index_copy(0, numbers, rows)

        def write_latent(self, layer, batch, new):
            return self.place(batch, new.rows)

        def write_index(self, layer, batch, new):
            return self.place(batch, new.rows)

    model, tokens = random_model(untied(DEBUG)), random_tokens(DEBUG, LENGTH)
    with torch.no_grad():
        shuffled = model.unembed(model(Batch.of([tokens]), ShuffledCache()))
    assert relative_error(shuffled, one_shot(model, tokens)[0]) < 1e-6


@pytest.mark.parametrize("cut", range(1, 9))
def test_pipeline_cut_after_any_layer_passes_only_hidden_states_and_selection(cut):
    """P08: a stage that begins on a shared layer needs the selection of the one before, and nothing else."""
    model, tokens = random_model(DEBUG), random_tokens(DEBUG, LENGTH)
    batch = Batch.of([tokens])
    with torch.no_grad():
        hidden = model.model.embed_tokens(tokens)
        caches = (GrowingCache(DEBUG), GrowingCache(DEBUG)) if cut % 2 else (GrowingCache(DEBUG),) * 2
        hidden, selection = model.run_layers(hidden, None, batch, caches[0], range(cut))
        hidden, _ = model.run_layers(hidden, selection, batch, caches[1], range(cut, 9))
        logits = model.unembed(model.model.norm(hidden))
    assert torch.equal(logits, one_shot(model, tokens)[0])


def test_shared_layer_without_a_selection_is_refused():
    model = random_model(DEBUG)
    batch = Batch.of([random_tokens(DEBUG, 5)])
    with pytest.raises(ValueError, match="layer 3 is shared"):
        model.run_layers(torch.zeros(5, DEBUG.hidden_size), None, batch, TransientCache(), range(3, 5))


def test_first_full_layers_run_sparse_once_the_context_is_longer_than_topk():
    """P09: layers before the sharing offset are no exception."""
    model, tokens = random_model(DEBUG), random_tokens(DEBUG, LENGTH)
    changed = {}
    for layer in (0, 1, 2):
        other = random_model(DEBUG)
        other.model.layers[layer].self_attn.indexer.weights_proj.weight.data.neg_()
        changed[layer] = relative_error(one_shot(other, tokens)[0], one_shot(model, tokens)[0])
    assert min(changed.values()) > 1e-3


@pytest.mark.parametrize("length", [7, 8, 9])
def test_prompts_around_topk_alone_and_mixed(length):
    """P10: K - 1, K and K + 1 tokens, where other engines switch between a dense and a sparse path."""
    model = random_model(untied(DEBUG))
    sequences = [random_tokens(DEBUG, n, n) for n in (length, 3, 30, 8)]
    alone = [one_shot(model, sequence)[0] for sequence in sequences]
    for mixed, expected in zip(one_shot(model, *sequences), alone, strict=True):
        assert relative_error(mixed, expected) < 1e-5
    if length <= DEBUG.index_topk:
        assert relative_error(alone[0], one_shot(model, sequences[0], dense=True)[0]) < 1e-5


def test_index_keys_are_written_below_topk_and_under_dense_attention():
    """P11: the first query past K looks back at keys of the time when nothing was scored."""
    model, tokens = random_model(untied(DEBUG)), random_tokens(DEBUG, 24)
    assert relative_error(in_chunks(model, tokens, [8] + [1] * 16), one_shot(model, tokens)[0]) < 1e-5
    sparse, dense = GrowingCache(DEBUG, capacity=8), GrowingCache(DEBUG, capacity=8)
    model = random_model(DEBUG)
    with torch.no_grad():
        model(Batch.of([tokens[:8]]), sparse)
        model(Batch.of([tokens[:8]]), dense, EVERYTHING)
    for layer in DEBUG.full_layers:
        torch.testing.assert_close(dense.index[layer], sparse.index[layer], rtol=1e-4, atol=1e-5)


def test_short_sequences_are_padded_with_minus_one_never_with_hidden_keys():
    """P12: with 3 visible positions and K = 8, slots 3 to 7 are -1."""
    model = random_model(DEBUG)
    seen: list[Selection] = []
    batch = Batch.of([random_tokens(DEBUG, 3)])
    with torch.no_grad():
        _, selection = model.run_layers(
            model.model.embed_tokens(batch.token_ids), None, batch, TransientCache(), range(1)
        )
        seen.append(selection)
    assert seen[0].positions.tolist() == [[0] + [-1] * 7, [0, 1] + [-1] * 6, [0, 1, 2] + [-1] * 5]
    assert torch.equal(seen[0].rows, seen[0].positions.long())


def test_observer_sees_every_layer_and_changes_nothing():
    model, tokens = random_model(DEBUG), random_tokens(DEBUG, LENGTH)
    layers = []
    with torch.no_grad():
        hidden = model(
            Batch.of([tokens]),
            TransientCache(),
            observe=lambda seen: layers.append(seen) if isinstance(seen, AttentionSeen) else None,
        )
    assert [seen.attention.layer for seen in layers] == list(range(9))
    assert torch.equal(model.unembed(hidden), one_shot(model, tokens)[0])


def test_one_token_of_odd_widths_is_read():
    """A rotated slice that begins on an odd place cannot be seen as complex numbers."""
    config = untied(DEBUG).replace(kv_lora_rank=31, qk_nope_head_dim=15, num_attention_heads=1)
    model, tokens = random_model(config), random_tokens(config, 20)
    assert relative_error(in_chunks(model, tokens, [1] * 20), one_shot(model, tokens)[0]) < 1e-5
