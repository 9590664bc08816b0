"""Products with weight matrices: of few tokens, where reading the weights decides, and batch-invariant."""

from collections.abc import Iterator
from functools import partial

import torch

from megaspan.bench.kernels import inputs, peers
from megaspan.bench.kernels.registry import Case, Scale, Trial, operation, require_close
from megaspan.config import ModelConfig
from megaspan.ops.linear import linear

TOLERANCE = 1e-2


@operation("linear")
def linear_cases(scale: Scale) -> Iterator[Case]:
    few = scale.batches[0], scale.batches[1]
    for name, (outputs, width) in matrices(scale.config).items():
        for tokens in few:
            yield _case(scale, name, outputs, width, tokens, invariant=False)
    name, (outputs, width) = "o_proj", matrices(scale.config)["o_proj"]
    for tokens in (*few, scale.tokens):
        yield _case(scale, name, outputs, width, tokens, invariant=True)


def matrices(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the projections of a layer and of the head, by name."""
    heads, hidden = config.num_attention_heads, config.hidden_size
    return {
        "q_a_proj": (config.q_lora_rank, hidden),
        "kv_a_proj_with_mqa": (config.latent_width, hidden),
        "q_b_proj": (heads * config.qk_head_dim, config.q_lora_rank),
        "o_proj": (hidden, heads * config.v_head_dim),
        "gate_proj": (config.intermediate_size, hidden),
        "down_proj": (hidden, config.intermediate_size),
        "wq_b": (config.index_n_heads * config.index_head_dim, config.q_lora_rank),
        "lm_head": (config.vocab_size, hidden),
    }


def _case(scale: Scale, name: str, outputs: int, width: int, tokens: int, invariant: bool) -> Case:
    many = tokens == scale.tokens
    mode = ", batch-invariant" * invariant
    return Case(
        name=f"linear {name}, {tokens} token{'s' * (tokens > 1)}{mode}",
        make=partial(_make, scale, outputs, width, tokens, invariant),
        unit="TFLOP/s" if many else "GB/s",
        flops=2 * tokens * outputs * width,
        nbytes=2 * (outputs * width + tokens * (outputs + width)),
        decode=not many,
    )


def _make(
    scale: Scale, outputs: int, width: int, tokens: int, invariant: bool, device: torch.device
) -> Trial:
    copies = scale.copies(2 * outputs * width)
    weights = [inputs.weight((outputs, width), device) for _ in range(copies)]
    states = [inputs.normal((tokens, width), device) for _ in range(copies)]
    pairs = list(zip(states, weights, strict=True))
    multiply = partial(linear, invariant=invariant)

    def check() -> None:
        some = slice(0, 64)
        for columns in (slice(0, 256), slice(-256, None)):
            expected = states[0][some].float() @ weights[0][columns].float().T
            require_close(multiply(*pairs[0])[some, columns], expected, TOLERANCE)

    calls = [torch.inference_mode()(partial(multiply, *pair)) for pair in pairs]
    return Trial(calls, check, peers.linear(states, weights))
