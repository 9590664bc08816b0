"""What stands between the matrix products, where reading and writing is all there is to do."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megaspan.bench.device_time import Calls
from megaspan.bench.kernels import inputs
from megaspan.bench.kernels.registry import Case, Scale, Trial, WrongResult, operation, require_close
from megaspan.ops.linear import rms_norm
from megaspan.ops.rotation import rotate, rotate_reference, turns
from megaspan.ops.router import route, route_reference

TOLERANCE = 1e-2
EPS = 1e-5


@operation("small")
def small_cases(scale: Scale) -> Iterator[Case]:
    config = scale.config
    heads_and_rope = config.num_attention_heads * config.qk_rope_head_dim
    for tokens in (scale.batches[0], scale.tokens):
        few = tokens < scale.tokens
        plural = "s" * (tokens > 1)
        for name, make, nbytes in (
            ("rms_norm", _make_norm, 4 * tokens * config.hidden_size),
            ("rotate", _make_rotate, 4 * tokens * heads_and_rope),
            ("route", _make_route, 2 * tokens * config.hidden_size + _router_bytes(scale)),
        ):
            yield Case(
                name=f"{name}, {tokens} token{plural}",
                make=partial(make, scale, tokens),
                unit="µs" if few else "GB/s",
                nbytes=nbytes,
                decode=few,
            )


def _router_bytes(scale: Scale) -> int:
    return 4 * scale.config.n_routed_experts * scale.config.hidden_size


def _calls(call: Callable[..., Any], operands: list[Tensor]) -> Calls:
    return [torch.inference_mode()(partial(call, one)) for one in operands]


def _states(scale: Scale, tokens: int, width: tuple[int, ...], device: torch.device) -> list[Tensor]:
    """States [T, *width], some sets of them for few tokens."""
    count = min(20, scale.copies(1)) if tokens < scale.tokens else 1
    return [inputs.normal((tokens, *width), device) for _ in range(count)]


def _make_norm(scale: Scale, tokens: int, device: torch.device) -> Trial:
    width = scale.config.hidden_size
    states, weight = _states(scale, tokens, (width,), device), inputs.normal((width,), device)
    calls = _calls(lambda one: rms_norm(one, weight, EPS), states)
    expected = torch.nn.functional.rms_norm(states[0].float(), (width,), eps=EPS) * weight.float()
    return Trial(calls, lambda: require_close(calls[0](), expected, TOLERANCE))


def _make_rotate(scale: Scale, tokens: int, device: torch.device) -> Trial:
    config = scale.config
    width = config.qk_rope_head_dim
    states = _states(scale, tokens, (config.num_attention_heads, width), device)
    positions = torch.arange(scale.contexts[-1] - tokens, scale.contexts[-1], device=device)
    turned = turns(positions, width, config.rope_theta)
    calls = _calls(lambda one: rotate(one, turned), states)

    def check() -> None:
        some = slice(-scale.sampled, None)
        on_cpu = turns(positions[some].cpu(), width, config.rope_theta)
        expected = rotate_reference(states[0][some].cpu().float(), on_cpu)
        require_close(calls[0]()[some].cpu(), expected, TOLERANCE)

    return Trial(calls, check)


def _make_route(scale: Scale, tokens: int, device: torch.device) -> Trial:
    config = scale.config
    weight = inputs.weight((config.n_routed_experts, config.hidden_size), device, torch.float32)
    bias = torch.zeros(config.n_routed_experts, device=device)
    settings = weight, bias, config.num_experts_per_tok, config.norm_topk_prob, config.routed_scaling_factor
    states = _states(scale, tokens, (config.hidden_size,), device)
    calls = _calls(lambda one: route(one, *settings), states)

    def check() -> None:
        """Weights in order of size: two experts whose scores round alike may change places."""
        (ids, weights), (_, wanted) = calls[0](), route_reference(states[0], *settings)
        if not (ids.sort(1).values.diff(dim=1) > 0).all():
            raise WrongResult("an expert is chosen twice")
        require_close(weights.sort(1).values, wanted.sort(1).values, TOLERANCE)

    return Trial(calls, check)
