"""The indexer's arithmetic against independent formulas."""

import pytest
import torch
import torch.nn.functional as F

from megaspan.config import ModelConfig
from megaspan.model.indexer import Indexer
from megaspan.model.layers import Rotation

CONFIG = ModelConfig.preset("debug").replace(index_n_heads=4)


@pytest.fixture
def indexer():
    torch.manual_seed(0)
    return Indexer(CONFIG).eval()


def complex_rotation(states, positions, width, theta):
    """Pairs (0, 1), (2, 3), … as complex numbers, turned by position · theta^(-2j / width)."""
    frequencies = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    turn = torch.polar(
        torch.ones(len(positions), width // 2, dtype=torch.float64), positions[:, None] * frequencies
    )
    pairs = torch.view_as_complex(states[..., :width].double().unflatten(-1, (-1, 2)).contiguous())
    turned = torch.view_as_real(pairs * turn.view(len(positions), *(1,) * (states.dim() - 2), -1)).flatten(-2)
    return torch.cat((turned, states[..., width:].double()), -1)


@torch.no_grad()
def test_rope_pairs_are_interleaved_on_the_first_dimensions_only(indexer):
    """P03: half-split pairs look right up to top-k and rot beyond it."""
    hidden, latent = torch.randn(16, CONFIG.hidden_size), torch.randn(16, CONFIG.q_lora_rank)
    positions = torch.arange(16) * 37
    rotation = Rotation(positions, CONFIG.qk_rope_head_dim, CONFIG.rope_theta)
    arguments = (positions.double(), CONFIG.qk_rope_head_dim, CONFIG.rope_theta)
    plain_keys = F.layer_norm(
        hidden @ indexer.wk.weight.T, (16,), indexer.k_norm.weight, indexer.k_norm.bias, 1e-6
    )
    plain_queries = (latent @ indexer.wq_b.weight.T).view(16, 4, 16)
    queries, weights = indexer.queries(hidden, latent, rotation)
    keys = indexer.keys(hidden, rotation)
    expected_keys = complex_rotation(plain_keys, *arguments)
    expected_queries = complex_rotation(plain_queries, *arguments)

    def scores(query, key):
        return torch.einsum("th,ths->ts", weights.double(), torch.einsum("thd,sd->ths", query, key).relu())

    ours = scores(queries.double(), keys.double())
    torch.testing.assert_close(ours, scores(expected_queries, expected_keys), rtol=1e-4, atol=1e-5)
    half_split = complex_rotation(plain_keys[..., [0, 4, 1, 5, 2, 6, 3, 7, *range(8, 16)]], *arguments)
    assert (scores(queries.double(), half_split) - scores(queries.double(), keys.double())).abs().max() > 1e-2


@torch.no_grad()
def test_key_norm_is_a_layer_norm_with_bias_and_its_own_epsilon(indexer):
    """P04: RMS norm or eps 1e-5 shows on keys of tiny variance and mean other than 0."""
    indexer.k_norm.bias.normal_()
    hidden = torch.randn(6, CONFIG.hidden_size) * 3e-3 + 1e-3
    still = Rotation(torch.zeros(6, dtype=torch.long), CONFIG.qk_rope_head_dim, CONFIG.rope_theta)
    raw = hidden @ indexer.wk.weight.T
    expected = F.layer_norm(raw, (16,), indexer.k_norm.weight, indexer.k_norm.bias, eps=1e-6)
    other = F.layer_norm(raw, (16,), indexer.k_norm.weight, indexer.k_norm.bias, eps=1e-5)
    torch.testing.assert_close(indexer.keys(hidden, still), expected)
    assert (expected - other).abs().max() > 1e-2


@torch.no_grad()
def test_head_weights_stay_float32_in_a_bf16_model(indexer):
    """P05: rounding them to bf16 reorders near ties."""
    hidden, latent = torch.randn(5, CONFIG.hidden_size), torch.randn(5, CONFIG.q_lora_rank)
    still = Rotation(torch.zeros(5, dtype=torch.long), CONFIG.qk_rope_head_dim, CONFIG.rope_theta)
    indexer.bfloat16()
    _, weights = indexer.queries(hidden.bfloat16(), latent.bfloat16(), still)
    exact = hidden.bfloat16().double() @ indexer.weights_proj.weight.double().T * (4 * 16) ** -0.5
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights.double(), exact, rtol=1e-5, atol=1e-7)


def test_head_dim_of_the_config_file_does_not_change_the_rotary_width():
    """P07."""
    written = ModelConfig.preset("debug").to_dict() | {"head_dim": 192}
    assert ModelConfig.from_json(written) == ModelConfig.preset("debug")


def test_indexer_learns_nothing_from_and_gives_nothing_to_the_backbone(indexer):
    hidden = torch.randn(5, CONFIG.hidden_size, requires_grad=True)
    latent = torch.randn(5, CONFIG.q_lora_rank, requires_grad=True)
    rotation = Rotation(torch.arange(5), CONFIG.qk_rope_head_dim, CONFIG.rope_theta)
    query, weights = indexer.queries(hidden, latent, rotation)
    (query.sum() + weights.sum() + indexer.keys(hidden, rotation).pow(2).sum()).backward()
    assert hidden.grad is None
    assert latent.grad is None
    assert all(parameter.grad is not None for parameter in indexer.parameters())
