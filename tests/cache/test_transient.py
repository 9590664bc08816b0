"""The cache of one call: its table, its refusal of a past, and the gradients that it lets through."""

import pytest
import torch

from megaspan.cache.transient import TransientCache
from megaspan.config import ModelConfig
from megaspan.model.batch import Batch
from tests.cache.finished_rows import finished
from tests.model.models import random_model, random_tokens

DEBUG = ModelConfig.preset("debug")


def test_the_table_names_the_batchs_own_rows():
    batch = Batch.of([[1] * 3, [1], [], [1] * 4])
    table = TransientCache().table(batch)
    rows = table.rows(batch.sequence_ids, batch.positions[:, None])
    assert rows[:, 0].tolist() == list(range(8))


def test_rows_come_back_as_they_are():
    cache, batch, rows = TransientCache(), Batch.of([[1, 2]]), torch.randn(2, 40)
    assert cache.write_latent(0, batch, finished(rows)) is rows
    assert cache.write_index(0, batch, finished(rows)) is rows


def test_a_past_is_refused():
    with pytest.raises(ValueError, match="from its first token"):
        TransientCache().table(Batch.of([[1], [2]], [0, 3]))


def test_a_later_tokens_loss_reaches_the_rows_that_it_selected():
    """The gradient of the last token flows through the cache to the embeddings of earlier ones."""
    model, tokens = random_model(DEBUG), random_tokens(DEBUG, 30)
    embedded = model.model.embed_tokens(tokens).detach().requires_grad_()
    hidden, selection = model.run_layers(embedded, None, Batch.of([tokens]), TransientCache(), range(1))
    hidden[-1].sum().backward()
    assert embedded.grad is not None
    reached = embedded.grad.abs().sum(-1) > 0
    assert reached.nonzero()[:, 0].tolist() == sorted({*selection.positions[-1].tolist(), 29})
