"""The tiled next-token loss against plain cross-entropy."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from megaspan.config import ModelConfig
from megaspan.model.transformer import Transformer
from megaspan.train.losses import IGNORED, next_token_loss

CONFIG = ModelConfig.preset("debug").replace(num_nextn_predict_layers=0, num_hidden_layers=1,
    indexer_types=("full",), mlp_layer_types=())  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Transformer:
    model = Transformer(CONFIG)
    model.initialise(0)
    return model


def case(tokens: int, ignored: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, CONFIG.hidden_size, generator=random, requires_grad=True)
    targets = torch.randint(CONFIG.vocab_size, (tokens,), generator=random)
    targets[ignored] = IGNORED
    return hidden, targets


@settings(max_examples=20)
@given(tokens=st.integers(2, 20), tile=st.integers(1, 25), data=st.data())
def test_value_and_gradients_are_those_of_cross_entropy(
    model: Transformer, tokens: int, tile: int, data: st.DataObject
) -> None:
    ignored = data.draw(st.lists(st.integers(0, tokens - 1), unique=True, max_size=tokens - 1))
    hidden, targets = case(tokens, ignored)
    weight = model.lm_head.weight
    loss = next_token_loss(model, hidden, targets, tile)
    expected = F.cross_entropy(hidden @ weight.T, targets, ignore_index=IGNORED)
    torch.testing.assert_close(loss, expected)
    gradients = torch.autograd.grad(loss, (hidden, weight))
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, (hidden, weight)))
    assert not gradients[0][ignored].any()


def test_nothing_to_predict_is_no_loss(model: Transformer) -> None:
    hidden, targets = case(5, [0, 1, 2, 3, 4])
    loss = next_token_loss(model, hidden, targets)
    loss.backward()
    assert loss.item() == 0.0
    assert hidden.grad is not None
    assert not hidden.grad.any()


def test_it_can_be_read_without_gradients(model: Transformer) -> None:
    hidden, targets = case(9, [3])
    with torch.no_grad():
        loss = next_token_loss(model, hidden, targets, tile=4)
    expected = F.cross_entropy(hidden @ model.lm_head.weight.T, targets, ignore_index=IGNORED)
    torch.testing.assert_close(loss, expected.detach())
