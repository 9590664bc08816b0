"""The indexers' loss against a plain KL, one query after the other."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megaspan.cache.transient import TransientCache
from megaspan.config import ModelConfig
from megaspan.model.batch import Batch
from megaspan.model.layers import Rotation
from megaspan.model.observe import AttentionSeen, RoutingSeen
from megaspan.model.selection import EVERYTHING
from megaspan.model.transformer import Transformer
from megaspan.train.index_loss import IndexLoss
from tests.model.models import random_model, random_tokens
from tests.strategies import configs

CONFIG = ModelConfig.preset("debug").replace(num_nextn_predict_layers=0, num_hidden_layers=5,
    indexer_types=("full", "full", "shared", "shared", "full"), mlp_layer_types=())  # fmt: skip


def observed(
    model: Transformer, lengths: list[int], sampled: Tensor, dense: bool = True
) -> tuple[IndexLoss, list[AttentionSeen], Batch]:
    """The loss of a pack of random sequences, and what it was computed from."""
    batch = Batch.of([random_tokens(model.config, length, seed) for seed, length in enumerate(lengths)])
    loss, layers = IndexLoss(batch, sampled), []

    def observe(seen: AttentionSeen | RoutingSeen) -> None:
        loss(seen)
        if isinstance(seen, AttentionSeen):
            layers.append(seen)

    model(batch, TransientCache(), EVERYTHING if dense else None, observe)
    return loss, layers, batch


def plain_attention(seen: AttentionSeen, first: int, token: int) -> Tensor:
    """[token + 1 - first]: the token's attention, averaged over heads, from keys as in plain MLA."""
    keys, _ = seen.attention.expand(seen.rows[first : token + 1])
    query = torch.cat((seen.query_nope[token], seen.query_rope[token]), -1)
    per_head = [(keys[:, head] @ query[head] * seen.attention.scale).softmax(0) for head in range(len(query))]
    return torch.stack(per_head).mean(0)


def plain_scores(seen: AttentionSeen, first: int, token: int) -> Tensor:
    indexer = seen.attention.indexer
    assert indexer is not None
    keys = indexer.keys(seen.hidden, seen.rotation)[first : token + 1]
    query, weights = (part[token] for part in indexer.queries(seen.hidden, seen.query_latent, seen.rotation))
    return sum((weights[j] * (keys @ query[j]).relu() for j in range(len(query))), torch.zeros(len(keys)))


def plain_loss(layers: list[AttentionSeen], batch: Batch, sampled: Tensor) -> Tensor:
    full = [n for n, seen in enumerate(layers) if seen.attention.indexer is not None]
    values = []
    for start, stop in zip(full, [*full[1:], len(layers)], strict=True):
        for token in sampled.tolist():
            first = max(begin for begin in batch.query_starts[:-1] if begin <= token)
            with torch.no_grad():
                served = [plain_attention(seen, first, token) for seen in layers[start:stop]]
                target = sum(served[1:], served[0]) / len(served)
            guess = plain_scores(layers[start], first, token).softmax(0)
            values.append((target * (target / guess).log()).sum())
    return torch.stack(values).mean()


@settings(max_examples=15)
@given(config=configs(), lengths=st.lists(st.integers(1, 7), min_size=1, max_size=4), data=st.data())
def test_it_is_a_plain_kl(config: ModelConfig, lengths: list[int], data: st.DataObject) -> None:
    chosen = data.draw(st.sets(st.integers(0, sum(lengths) - 1), min_size=1))
    sampled = torch.tensor(sorted(chosen))
    loss, layers, batch = observed(random_model(config), lengths, sampled, data.draw(st.booleans()))
    torch.testing.assert_close(loss.value(), plain_loss(layers, batch, sampled), rtol=1e-4, atol=1e-6)


def test_gradients_are_those_of_the_plain_kl_and_reach_indexers_only() -> None:
    model = random_model(CONFIG)
    sampled = torch.tensor([1, 4, 5, 9, 12])
    loss, layers, batch = observed(model, [6, 1, 7], sampled)
    loss.value().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    indexers = [name for name, _ in model.named_parameters() if ".indexer." in name]
    assert sorted(gradients) == sorted(indexers)
    assert all(gradient.any() for gradient in gradients.values())
    parameters = dict(model.named_parameters())
    plain = plain_loss(layers, batch, sampled)
    expected = torch.autograd.grad(plain, [parameters[name] for name in gradients])
    torch.testing.assert_close(list(gradients.values()), list(expected), rtol=1e-3, atol=1e-6)


def test_gradients_flow_when_the_forward_pass_has_none() -> None:
    model = random_model(CONFIG)
    with torch.no_grad():
        loss, _, _ = observed(model, [6], torch.arange(6))
    loss.value().backward()
    assert all(p.grad is None or ".indexer." in name for name, p in model.named_parameters())
    assert any(p.grad is not None for p in model.parameters())


def test_a_sample_of_all_is_the_mean_of_samples_of_one() -> None:
    model = random_model(CONFIG)
    with torch.no_grad():
        everything = observed(model, [5, 3], torch.arange(8))[0].value()
        ones = [observed(model, [5, 3], torch.tensor([token]))[0].value() for token in range(8)]
    torch.testing.assert_close(everything, torch.stack(ones).mean())


def exact_layer(rows: Tensor, query: Tensor, rotation: Rotation, aim: Tensor | None) -> AttentionSeen:
    """A layer of one head whose rows are its keys; its indexer's scores are log `aim` + a constant."""
    indexer = None
    if aim is not None:
        scores = aim.clamp(min=1e-9).log() + 30.0  # above 0, where ReLU changes nothing
        indexer = SimpleNamespace(
            heads=1,
            keys=lambda *_: torch.eye(len(rows)),
            queries=lambda *_: (scores[:, None], torch.ones(len(rows), 1)),
        )
    attention = SimpleNamespace(heads=1, indexer=indexer, absorb=lambda nope, rope: nope, scale=1.0)
    return AttentionSeen(attention, rows, rows, query, query, rows, rotation)  # type: ignore[arg-type]


def causal_softmax(scores: Tensor) -> Tensor:
    return scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf).softmax(-1)


@pytest.mark.parametrize("shared", [0, 1, 2])
def test_it_is_zero_when_the_indexer_is_the_mean_of_the_layers_it_serves(shared: int) -> None:
    tokens = 9
    random = torch.Generator().manual_seed(shared)
    states = [torch.randn(2, tokens, 5, generator=random) for _ in range(1 + shared)]
    aim = torch.stack([causal_softmax(query @ rows.T) for rows, query in states]).mean(0)
    batch = Batch.of([list(range(tokens))])
    rotation = Rotation(batch.positions, 2, 1e4)

    def value(aim: Tensor) -> float:
        loss = IndexLoss(batch, torch.arange(tokens))
        for layer, (rows, query) in enumerate(states):
            loss(exact_layer(rows, query[:, None], rotation, aim if layer == 0 else None))
        return loss.value().item()

    assert value(aim) == pytest.approx(0.0, abs=1e-5)
    assert value(aim.flip(1).tril() + 0.1) > 0.1


def test_any_working_memory_gives_the_same_loss_and_gradients(monkeypatch):
    """What stands per head, token and row stays within the working memory (P23)."""

    def measured(budget):
        asked = []
        monkeypatch.setattr(
            "megaspan.ops.index_loss.working_memory", lambda device: asked.append(1) or budget
        )
        model, batch = (
            random_model(CONFIG),
            Batch.of([random_tokens(CONFIG, 30, 1), random_tokens(CONFIG, 17, 2)]),
        )
        watch = IndexLoss(batch, torch.arange(0, 47, 2))
        with torch.no_grad():
            model(batch, TransientCache(), EVERYTHING, watch)
        watch.value().backward()
        assert asked
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return watch.value().detach(), gradients

    loss, gradients = measured(1 << 30)
    tiled_loss, tiled_gradients = measured(16 * CONFIG.num_attention_heads * 40)
    torch.testing.assert_close(tiled_loss, loss)
    assert gradients.keys() == tiled_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(tiled_gradients[name], gradient, rtol=1e-4, atol=1e-7)


def test_what_a_group_attended_with_is_let_go_before_the_next_one():
    """A layer's queries in latent form are large: those of one group exist at a time."""
    model, batch = random_model(CONFIG), Batch.of([random_tokens(CONFIG, 9, 1)])
    watch, served = IndexLoss(batch, torch.arange(9)), []

    def observe(seen: AttentionSeen | RoutingSeen) -> None:
        watch(seen)
        if isinstance(seen, AttentionSeen):
            assert watch._group is not None
            served.append(len(watch._group.layers))

    model(batch, TransientCache(), EVERYTHING, observe)
    watch.value()
    assert served == [1, 1, 2, 3, 1]
    assert watch._group is None
