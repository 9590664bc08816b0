"""Muon for the matrices inside the layers, AdamW for the rest, on float32 master weights."""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

NEWTON_SCHULZ = ((4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037),
                 (2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012))  # fmt: skip


class Muon(torch.optim.Optimizer):
    """Momentum whose matrices are orthogonalised before they are applied (Jordan et al., 2024).

    Parameters are [..., rows, columns]; leading dimensions are separate matrices, so an expert's
    weights are orthogonalised on their own. The update's size is matched to AdamW's by
    0.2 · sqrt(max(rows, columns)) (Moonlight, arXiv 2502.16982, section 2.2).
    """

    def __init__(
        self, parameters: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.1
    ):
        super().__init__(list(parameters), {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for parameters in by_shape.values():
                self._step_alike(parameters, group["lr"], group["momentum"], group["weight_decay"])

    def _step_alike(self, parameters: list[Tensor], lr: float, momentum: float, weight_decay: float) -> None:
        """Change parameters of one shape, whose updates are orthogonalised in one batch."""
        looking_ahead = []
        for parameter in parameters:
            gradient = parameter.grad
            assert gradient is not None
            average = self._momentum(parameter).lerp_(gradient, 1 - momentum)
            looking_ahead.append(gradient.lerp(average, momentum))
        shape = parameters[0].shape
        updates = orthogonalise(torch.stack(looking_ahead).flatten(0, -3)).view(len(parameters), *shape)
        size = 0.2 * max(shape[-2:]) ** 0.5
        for parameter, update in zip(parameters, updates, strict=True):
            parameter.mul_(1 - lr * weight_decay).add_(update.to(parameter.dtype), alpha=-lr * size)

    def _momentum(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        return state["momentum"]


def orthogonalise(matrices: Tensor) -> Tensor:
    """Push the singular values of matrices [B, rows, columns] towards 1 by Newton-Schulz steps.

    The five quintic polynomials are those of You Jiacheng, in use for Muon since early 2025. bf16 on
    a GPU, float32 elsewhere.
    """
    work = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    tall = work.shape[-2] > work.shape[-1]
    work = work.mT if tall else work
    work = work / (work.norm(dim=(-2, -1), keepdim=True) * 1.01 + 1e-7)
    for a, b, c in NEWTON_SCHULZ:
        gram = work @ work.mT
        work = a * work + (b * gram + c * gram @ gram) @ work
    return work.mT if tall else work


class MasterWeights:
    """float32 copies of a model's parameters, which the optimizers change; the model gets them rounded.

    So the model runs in exactly the precision that it is served in. Float32 parameters are their own masters.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]):
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.masters = [
            parameter if parameter.dtype == torch.float32 else parameter.detach().float()
            for parameter in self.parameters
        ]

    def take_gradients(self, clip: float) -> Tensor:
        """Move the gradients to the masters, scaled so that their norm is at most `clip`; return the norm."""
        gradients = []
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if parameter.grad is not None:
                gradient, parameter.grad = parameter.grad.float(), None
                master.grad = gradient
                gradients.append(gradient)
        norm = get_total_norm(gradients)
        clip_grads_with_norm_(self.masters, clip, norm)
        return norm

    @torch.no_grad()
    def give_back(self) -> None:
        """Round the masters into the model's parameters and drop their gradients."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad = None
            if master is not parameter:
                parameter.copy_(master)
