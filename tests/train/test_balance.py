"""The routers' bias evens out the experts' load."""

import torch

from megaspan.config import ModelConfig
from megaspan.model.moe import Router
from megaspan.model.observe import RoutingSeen
from megaspan.train.balance import LoadBalance

CONFIG = ModelConfig.preset("debug")


def skewed_router() -> tuple[Router, torch.Tensor]:
    """A router that favours some experts by far, and tokens for it."""
    random = torch.Generator().manual_seed(0)
    router, hidden = Router(CONFIG), torch.randn(2000, CONFIG.hidden_size, generator=random)
    hidden[:, 0] = 1.0
    with torch.no_grad():
        router.weight.normal_(0.0, 0.1, generator=random)
        router.weight[:, 0] = torch.linspace(-1.0, 1.0, CONFIG.n_routed_experts)
    return router, hidden


def test_one_step_moves_each_bias_towards_the_mean_load() -> None:
    router = Router(CONFIG.replace(n_routed_experts=4))
    balance = LoadBalance(0.5)
    balance(RoutingSeen(router, torch.tensor([[0, 1], [0, 2], [0, 1], [0, 2]])))  # loads 4 2 2 0
    assert float(balance.step()) == 2.0
    assert router.e_score_correction_bias.tolist() == [-0.5, 0.0, 0.0, 0.5]
    assert float(balance.step()) == 1.0  # nothing was seen since
    assert router.e_score_correction_bias.tolist() == [-0.5, 0.0, 0.0, 0.5]


def test_the_load_becomes_even() -> None:
    router, hidden = skewed_router()
    balance = LoadBalance(0.01)
    busiest = []
    with torch.no_grad():
        for _ in range(150):
            balance(RoutingSeen(router, router(hidden)[0]))
            busiest.append(float(balance.step()))
    assert busiest[0] > 2.0
    assert max(busiest[-5:]) < 1.2


def test_rate_zero_only_counts() -> None:
    router, hidden = skewed_router()
    balance = LoadBalance(0.0)
    with torch.no_grad():
        balance(RoutingSeen(router, router(hidden)[0]))
    assert float(balance.step()) > 2.0
    assert not router.e_score_correction_bias.any()


def test_the_step_reports_the_busiest_of_all_routers() -> None:
    routers = [Router(CONFIG.replace(n_routed_experts=4)) for _ in range(2)]
    balance = LoadBalance(0.1)
    balance(RoutingSeen(routers[0], torch.tensor([[0, 1], [2, 3]])))
    balance(RoutingSeen(routers[1], torch.tensor([[0, 1], [0, 1]])))
    assert float(balance.step()) == 2.0
    assert not routers[0].e_score_correction_bias.any()
