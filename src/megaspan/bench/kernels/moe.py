"""The mixture of experts: many tokens, where arithmetic decides, and few, where reading weights does."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from megaspan.bench.device_time import Calls
from megaspan.bench.kernels import inputs
from megaspan.bench.kernels.registry import Case, Scale, Trial, operation, require_close
from megaspan.ops.moe import moe, moe_fp8, moe_fp8_reference, moe_grouped, moe_reference
from megaspan.ops.quant import block_grid

TOLERANCE = 2e-2


@operation("moe")
def moe_cases(scale: Scale) -> Iterator[Case]:
    for kind, tokens in (
        *(("bfloat16", count) for count in (scale.tokens, *_few(scale))),
        *(("fp8", count) for count in (scale.tokens, *_few(scale))),
    ):
        name = f"moe, {tokens} token{'s' * (tokens > 1)}, {'FP8' if kind == 'fp8' else 'bf16'} weights"
        yield _case(scale, name, tokens, kind)


def _few(scale: Scale) -> tuple[int, ...]:
    return scale.batches[0], scale.batches[1], 2 * scale.batches[-1]


def _case(scale: Scale, name: str, tokens: int, kind: str) -> Case:
    config, few = scale.config, tokens < scale.tokens
    expert = 3 * config.hidden_size * config.moe_intermediate_size
    experts, slots = config.n_routed_experts, config.num_experts_per_tok
    reached = experts * (1 - (1 - slots / experts) ** tokens)  # of even routing, on average
    return Case(
        name=name,
        make=partial(_make, scale, tokens, kind),
        unit="µs" if few else "TFLOP/s",
        flops=2 * tokens * slots * expert,
        kind=kind,
        nbytes=reached * expert * (1 if kind == "fp8" else 2) + 4 * tokens * config.hidden_size,
        decode=few,
        shows_memory=not few,
    )


class Mixture:
    """Weights of all the experts, and tokens that are routed evenly."""

    def __init__(self, scale: Scale, kind: str, device: torch.device):
        config = scale.config
        self.config, self.kind, self.device = config, kind, device
        experts, hidden, inner = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up, self.gate_up_scales = _weights((experts, 2 * inner, hidden), kind, device)
        self.down, self.down_scales = _weights((experts, hidden, inner), kind, device)

    def operands(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """hidden [T, D], expert ids [T, k], expert weights [T, k]."""
        config = self.config
        scores = torch.rand(tokens, config.n_routed_experts, device=self.device)
        weights, ids = scores.topk(config.num_experts_per_tok, 1)
        return inputs.normal((tokens, config.hidden_size), self.device), ids, weights

    def output(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        if self.gate_up_scales is not None and self.down_scales is not None:
            scaled = self.gate_up, self.gate_up_scales, self.down, self.down_scales
            return moe_fp8(hidden, ids, weights, *scaled)
        with torch.inference_mode():
            return moe(hidden, ids, weights, self.gate_up, self.down)

    def check(self, tokens: int, count: int) -> None:
        """Some tokens of a call against the reference with the weights of their experts alone."""
        hidden, ids, weights = self.operands(tokens)
        actual = self.output(hidden, ids, weights)[:count]
        used, places = ids[:count].unique(return_inverse=True)
        routed = hidden[:count].float(), places, weights[:count]
        gate_up, down = self.gate_up[used], self.down[used]
        if self.gate_up_scales is None or self.down_scales is None:
            expected = moe_reference(*routed, gate_up.float(), down.float())
        else:
            scales = self.gate_up_scales[used], self.down_scales[used]
            expected = moe_fp8_reference(*routed, gate_up, scales[0], down, scales[1])
        require_close(actual, expected, TOLERANCE)


def _weights(shape: tuple[int, int, int], kind: str, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Weights [E, O, I], and the scales of their blocks where they are FP8."""
    drawn = inputs.weight(shape, device)
    if kind == "bfloat16":
        return drawn, None
    largest = 448.0
    for matrix in drawn:  # one at a time: all of them in another format would not fit beside these
        matrix.mul_(largest / matrix.abs().max())
    grid = block_grid(shape[1], shape[2])
    scales = torch.full((shape[0], *grid), 4 * shape[2] ** -0.5 / largest, device=device)
    return drawn.to(torch.float8_e4m3fn), scales


def _make(scale: Scale, tokens: int, kind: str, device: torch.device) -> Trial:
    mixture = Mixture(scale, kind, device)
    expert = 3 * scale.config.hidden_size * scale.config.moe_intermediate_size
    copies = scale.copies(expert * min(tokens * scale.config.num_experts_per_tok, 64))
    made = [mixture.operands(tokens) for _ in range(copies if tokens < scale.tokens else 1)]
    return Trial(
        [partial(mixture.output, *operands) for operands in made],
        partial(mixture.check, tokens, min(scale.sampled, tokens)),
        _grouped(mixture, made) if kind == "bfloat16" and tokens == scale.tokens else {},
    )


def _grouped(mixture: Mixture, made: list[tuple[Tensor, Tensor, Tensor]]) -> dict[str, Calls]:
    weights = mixture.gate_up, mixture.down
    grouped = torch.inference_mode()(moe_grouped)
    return {"torch grouped_mm": [partial(grouped, *operands, *weights) for operands in made]}
