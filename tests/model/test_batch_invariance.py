"""The property `invariant` of the design page: a token has the same bits whatever shares its batch."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from torch import Tensor

from megaspan.cache.growing import GrowingCache
from megaspan.config import ModelConfig
from megaspan.model.batch import Batch
from megaspan.model.batch_invariance import set_batch_invariant
from megaspan.model.folder import LanguageModel, load_folder, save_folder
from megaspan.model.selection import EVERYTHING, Everything, Selection
from megaspan.model.transformer import Transformer
from megaspan.ops.linear import native
from tests.model.models import random_model, random_tokens, relative_error
from tests.strategies import configs

DEBUG = ModelConfig.preset("debug")
DTYPES = [torch.float32, torch.bfloat16]
pytestmark = pytest.mark.usefixtures("poisoned_memory")
needs_native = pytest.mark.skipif(native._library() is None, reason="no compiler here")
some_models = settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])


def invariant_model(config: ModelConfig, dtype: torch.dtype, seed: int = 0) -> Transformer:
    model = random_model(config, seed).to(dtype)
    for module in model.modules():  # what a checkpoint keeps in float32
        if hasattr(module, "e_score_correction_bias"):
            module.float()
    set_batch_invariant(model)
    return model


@dataclass
class Seen:
    """All that the model made of one sequence, in pieces as it was read."""

    hidden: list[Tensor] = field(default_factory=list)  # [T, D]
    selections: list[tuple[int, Tensor]] = field(default_factory=list)  # layer, the positions of one token
    log_probs: list[Tensor] = field(default_factory=list)  # [T, V]


@contextmanager
def selections_of(model: Transformer) -> Iterator[list[Selection | Everything | None]]:
    """The selection that leaves each layer of the next pass."""
    chosen: list[Selection | Everything | None] = []
    hooks = [
        layer.register_forward_hook(lambda _module, _inputs, output: chosen.append(output[1]))
        for layer in model.model.layers
    ]
    yield chosen
    for hook in hooks:
        hook.remove()


@torch.no_grad()
def read(
    model: Transformer, sequences: list[Tensor], schedule: list[list[int]], dense: bool = False
) -> list[Seen]:
    """schedule: for each batch, how many tokens of each sequence it holds."""
    seen, starts = [Seen() for _ in sequences], [0] * len(sequences)
    cache = GrowingCache(model.config, len(sequences), 4, model.lm_head.weight.dtype)
    for sizes in schedule:
        pieces = [s[a : a + n] for s, a, n in zip(sequences, starts, sizes, strict=True)]
        with selections_of(model) as chosen:
            hidden = model(Batch.of(pieces, starts), cache, EVERYTHING if dense else None)
        for one, states in zip(seen, hidden.split(sizes), strict=True):
            one.hidden.append(states)
            one.log_probs.append(model.unembed(states).log_softmax(-1))
        for layer, selection in enumerate(chosen):
            if isinstance(selection, Selection):
                for one, rows in zip(seen, selection.positions.split(sizes), strict=True):
                    one.selections.extend((layer, row[row >= 0]) for row in rows)
        starts = [a + n for a, n in zip(starts, sizes, strict=True)]
    for one in seen:
        one.selections.sort(key=lambda selection: selection[0])
    return seen


def assert_same_bits(actual: Seen, expected: Seen) -> None:
    pairs = zip(actual.selections, expected.selections, strict=True)
    assert all(a == b and rows.equal(rows_2) for (a, rows), (b, rows_2) in pairs)
    assert torch.cat(actual.hidden).equal(torch.cat(expected.hidden))
    assert torch.cat(actual.log_probs).equal(torch.cat(expected.log_probs))


def alone(model: Transformer, sequence: Tensor, chunks: list[int] | None = None, dense: bool = False) -> Seen:
    return read(model, [sequence], [[n] for n in chunks or [len(sequence)]], dense)[0]


@needs_native
@some_models
@given(
    config=configs(),
    chunks=st.lists(st.integers(1, 21), min_size=1, max_size=6),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 3),
)
@example(config=DEBUG, chunks=[1] * 41, dtype=torch.bfloat16, seed=0)
@example(config=DEBUG, chunks=[5, 1, 2, 19, 1, 3, 1, 9], dtype=torch.float32, seed=0)
def test_chunks_do_not_matter(config, chunks, dtype, seed):
    """A prompt read at once, cut anywhere, or token by token."""
    model, tokens = invariant_model(config, dtype, seed), random_tokens(config, sum(chunks), seed)
    assert_same_bits(alone(model, tokens, chunks), alone(model, tokens))


@needs_native
@some_models
@given(
    config=configs(),
    schedule=st.lists(st.tuples(*[st.integers(1, 13)] * 3), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 3),
)
@example(config=DEBUG, schedule=[(5, 1, 20), (1, 30, 1), (27, 2, 12)], dtype=torch.bfloat16, seed=0)
def test_company_does_not_matter(config, schedule, dtype, seed):
    """Three sequences that prefill and decode in the same batches, and each of them alone."""
    model = invariant_model(config, dtype, seed)
    sequences = [
        random_tokens(config, sum(lengths), seed + n) for n, lengths in enumerate(zip(*schedule, strict=True))
    ]
    together = read(model, sequences, [list(sizes) for sizes in schedule])
    for result, sequence in zip(together, sequences, strict=True):
        assert_same_bits(result, alone(model, sequence))


@needs_native
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_tokens_at_once(dtype):
    """513 of them take the versions that are for many tokens, and several threads."""
    model, tokens = invariant_model(DEBUG, dtype), random_tokens(DEBUG, 513)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        expected = alone(model, tokens)
    finally:
        torch.set_num_threads(before)
    assert_same_bits(alone(model, tokens, [64, 2, 1, 1, 5, 440]), expected)


@needs_native
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dense_attention_is_the_selection_of_everything(dtype):
    model, tokens = invariant_model(DEBUG.replace(index_topk=64), dtype), random_tokens(DEBUG, 41)
    dense, sparse = alone(model, tokens, [7, 1, 33], dense=True), alone(model, tokens)
    assert len(sparse.selections) == 9 * 41
    dense.selections = sparse.selections  # dense attention makes none
    assert_same_bits(dense, sparse)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_the_compiled_versions(monkeypatch, dtype):
    """PyTorch's own operations, a token at a time. The selection and sparse attention stay compiled."""
    for name in ("linear", "moe", "router", "rotation"):
        module = import_module(f"megaspan.ops.{name}.native")
        for question in ("can_take", "supports", "available"):
            if hasattr(module, question):
                monkeypatch.setattr(module, question, lambda *_, **__: False)
    model, sequences = invariant_model(DEBUG, dtype), [random_tokens(DEBUG, 23, seed) for seed in range(2)]
    together = read(model, sequences, [[5, 1], [1, 16], [17, 6]])
    for result, sequence in zip(together, sequences, strict=True):
        assert_same_bits(result, alone(model, sequence))


@some_models
@given(config=configs(index_n_heads=32), seed=st.integers(0, 3))
def test_close_to_the_default_mode(config, seed):
    model, tokens = invariant_model(config, torch.float32, seed), random_tokens(config, 41, seed)
    (invariant,) = alone(model, tokens).log_probs
    set_batch_invariant(model, False)
    assert relative_error(alone(model, tokens).log_probs[0], invariant) < 1e-4


def test_the_mode_is_a_property_of_the_loaded_model(tmp_path):
    save_folder(random_model(DEBUG), tmp_path)
    assert not load_folder(tmp_path, "float32", "cpu", LanguageModel).batch_invariant
    model = load_folder(tmp_path, "float32", "cpu", LanguageModel, batch_invariant=True)
    assert model.batch_invariant
    assert all(module.invariant for module in model.modules() if hasattr(module, "invariant"))
    set_batch_invariant(model, False)
    assert not model.batch_invariant
