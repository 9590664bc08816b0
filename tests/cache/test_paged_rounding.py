"""Passes over rows in rounded formats: how far they err, and where."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megaspan.model.batch import Batch
from megaspan.model.selection import EVERYTHING, Selection
from megaspan.model.transformer import Transformer
from tests.cache.paged_reads import DEBUG, LENGTH, TOKENS, cuts, paged, read
from tests.model.models import random_tokens

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def smooth_model(topk: int) -> Transformer:
    """Every token goes through every expert, so that rounding a row cannot flip a route."""
    config = DEBUG.replace(n_routed_experts=2, num_experts_per_tok=2, initializer_range=0.08, index_topk=topk)
    model = Transformer(config)
    model.initialise(0)
    return model.eval()


@pytest.mark.parametrize("selection", [None, EVERYTHING], ids=["sparse", "dense"])
@pytest.mark.parametrize(("name", "bound"), [("bfloat16", 0.005), ("fp8", 0.05)])
def test_rounded_latent_rows_err_little_and_flatly_by_position(name, bound, selection):
    """P66: a lost or shared scale shows as an error that is large, or that grows with the position.

    All positions are selected: another selection would be another model.
    """
    model, tokens, logits = smooth_model(topk=240), random_tokens(DEBUG, 240), []
    for latent in ("float32", name):
        cache = paged(60, latent=latent, index="float32")
        cache.assign(0, 0, list(reversed(range(60))))
        logits.append(read(cache, tokens, [60] * 4, selection=selection, model=model))
    error = (logits[1] - logits[0]).norm(dim=-1) / logits[0].norm(dim=-1)  # [T]
    assert error.mean() < bound
    early, late = error[60:120].mean(), error[180:].mean()
    assert 0.3 < early / late < 3


@pytest.mark.parametrize("rotate", [True, False])
def test_fp8_index_keys_select_nearly_what_exact_keys_select(rotate):
    """Of the first layer, whose inputs are the same: a random indexer's scores lie close together.

    With the rotation of the cache's setting, in the keys and in the queries that meet them.
    """
    model, tokens, positions = smooth_model(topk=32), random_tokens(DEBUG, 240), []
    for index in ("float32", "fp8"):
        cache, batch = paged(60, index=index, rotate_index=rotate), Batch.of([tokens])
        cache.assign(0, 0, list(reversed(range(60))))
        with torch.no_grad():
            hidden = model.model.embed_tokens(tokens)
            _, selection = model.run_layers(hidden, None, batch, cache, range(1))
        assert isinstance(selection, Selection)
        positions.append(selection.positions[120:])
    kept = (positions[0][:, :, None] == positions[1][:, None]).any(-1).float().mean()
    assert 0.8 < kept < 1


@settings(max_examples=5)
@given(st.permutations(range(24)), cuts(LENGTH))
def test_order_of_physical_pages_changes_nothing_in_fp8(order, chunks):
    """P20, P45: packed rows of 52 and 20 bytes, as of 656 and 132, are found by the same row numbers."""
    shuffled, ordered = paged(slots=3, latent="fp8"), paged(latent="fp8")
    shuffled.assign(2, 0, order[:11])
    ordered.assign(0, 0, range(11))
    assert torch.equal(read(shuffled, TOKENS, chunks, slot=2), read(ordered, TOKENS, chunks))
