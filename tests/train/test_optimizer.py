"""Orthogonal updates, and float32 masters behind bf16 parameters."""

import pytest
import torch
from torch import Tensor, nn

from megaspan.train.optimizer import MasterWeights, Muon, orthogonalise


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(16, 16), (8, 40), (40, 8), (1, 12), (12, 1), (64, 48)])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_singular_values_come_near_one(shape: tuple[int, int], scale: float) -> None:
    matrix = scale * normal(1, *shape)
    result = orthogonalise(matrix)[0]
    singular = torch.linalg.svdvals(result)
    assert singular.min() > 0.6
    assert singular.max() < 1.3
    # The singular vectors stay: the result is close to the nearest (semi-)orthogonal matrix.
    u, _, v = torch.linalg.svd(matrix[0], full_matrices=False)
    assert (result - u @ v).norm() < 0.4 * (u @ v).norm()


@pytest.mark.parametrize("shape", [(6, 10), (10, 6)])
def test_a_batch_is_its_matrices_apart(shape: tuple[int, int]) -> None:
    matrices = normal(3, *shape) * torch.tensor([1.0, 100.0, 0.01])[:, None, None]
    apart = torch.cat([orthogonalise(matrix[None]) for matrix in matrices])
    torch.testing.assert_close(orthogonalise(matrices), apart)


def test_a_zero_matrix_stays_zero() -> None:
    assert not orthogonalise(torch.zeros(2, 4, 5)).any()


def muon_by_hand(weight: Tensor, gradients: list[Tensor], lr: float, decay: float) -> Tensor:
    momentum = torch.zeros_like(weight)
    for gradient in gradients:
        momentum = 0.95 * momentum + 0.05 * gradient
        update = orthogonalise((0.05 * gradient + 0.95 * momentum)[None])[0]
        weight = weight * (1 - lr * decay) - lr * 0.2 * max(weight.shape) ** 0.5 * update
    return weight


def test_muon_takes_each_matrix_on_its_own() -> None:
    plain, twin, idle = (nn.Parameter(normal(6, 10, seed=seed)) for seed in range(3))
    experts = nn.Parameter(normal(4, 5, 3, seed=3))
    before = {p: p.detach().clone() for p in (plain, twin, idle, experts)}
    gradients = {p: [normal(*p.shape, seed=10 * n + step) for step in range(3)]
                 for n, p in enumerate((plain, twin, experts))}  # fmt: skip
    optimizer = Muon([plain, twin, idle, experts], lr=0.1, weight_decay=0.3)
    for step in range(3):
        for parameter, of_steps in gradients.items():
            parameter.grad = of_steps[step].clone()
        optimizer.step()
    for parameter in (plain, twin):
        expected = muon_by_hand(before[parameter], gradients[parameter], 0.1, 0.3)
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-4, atol=1e-5)
    for expert in range(4):
        of_expert = [gradient[expert] for gradient in gradients[experts]]
        expected = muon_by_hand(before[experts][expert], of_expert, 0.1, 0.3)
        torch.testing.assert_close(experts[expert].detach(), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(idle.detach(), before[idle])


def test_masters_keep_steps_that_bf16_would_lose() -> None:
    parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    weights = MasterWeights([parameter])
    (master,) = weights.masters
    optimizer = torch.optim.SGD([master], lr=1e-3)
    for _ in range(20):
        parameter.grad = torch.ones(4, dtype=torch.bfloat16)
        weights.take_gradients(clip=100.0)
        assert parameter.grad is None
        optimizer.step()
        weights.give_back()
        assert master.grad is None
        assert torch.equal(parameter.detach(), master.bfloat16())
    assert (parameter.dtype, master.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(master, torch.full((4,), 0.98))
    assert torch.equal(torch.ones(4, dtype=torch.bfloat16) - 1e-3, torch.ones(4, dtype=torch.bfloat16))


def test_float32_parameters_are_their_own_masters() -> None:
    parameter, frozen = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3), requires_grad=False)
    weights = MasterWeights([parameter, frozen])
    assert len(weights.masters) == 1
    assert weights.masters[0] is parameter
    parameter.grad = torch.full((3,), 2.0)
    weights.take_gradients(clip=100.0)
    assert parameter.grad is not None  # it is the master's
    weights.give_back()
    assert parameter.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_clipped_by_their_common_norm(dtype: torch.dtype) -> None:
    parameters = [nn.Parameter(torch.zeros(n, dtype=dtype)) for n in (1, 4, 2)]
    weights = MasterWeights(parameters)

    def gradients(scale: float, clip: float) -> tuple[float, list[Tensor]]:
        parameters[0].grad = torch.full((1,), 3 * scale, dtype=dtype)
        parameters[1].grad = torch.full((4,), 2 * scale, dtype=dtype)
        norm = float(weights.take_gradients(clip))
        taken = [master.grad for master in weights.masters if master.grad is not None]
        assert len(taken) == 2  # the third had none
        weights.give_back()
        return norm, taken

    norm, (first, second) = gradients(scale=4.0, clip=1.0)
    assert norm == pytest.approx(20.0)
    torch.testing.assert_close(first, torch.full((1,), 0.6))
    torch.testing.assert_close(second, torch.full((4,), 0.4))
    norm, (first, _) = gradients(scale=0.125, clip=1.0)
    assert norm == pytest.approx(0.625)
    assert first.item() == 0.375
