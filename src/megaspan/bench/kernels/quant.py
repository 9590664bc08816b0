"""Index queries and weights in FP8."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from megaspan.bench.kernels import inputs
from megaspan.bench.kernels.registry import Case, Scale, Trial, operation, require_close
from megaspan.ops.quant import dequantize_blocks, hadamard, quantize_blocks, quantize_index_queries

E4M3_ERROR = 4e-2  # of values rounded to three bits of mantissa


@operation("quant")
def quant_cases(scale: Scale) -> Iterator[Case]:
    config = scale.config
    heads, width = config.index_n_heads, config.index_head_dim
    for tokens in (scale.batches[0], scale.tokens):
        few = tokens < scale.tokens
        yield Case(
            name=f"quantize_index_queries, {tokens} token{'s' * (tokens > 1)}",
            make=partial(_make_queries, scale, tokens),
            unit="µs" if few else "GB/s",
            nbytes=tokens * heads * (4 * width + 8),
            decode=few,
        )
    weight = config.intermediate_size * config.hidden_size
    for name, make in (("quantize_blocks", _make_quantize), ("dequantize_blocks", _make_dequantize)):
        yield Case(
            name=f"{name}, {config.intermediate_size} x {config.hidden_size}",
            make=partial(make, scale),
            unit="GB/s",
            nbytes=3 * weight,
        )


def _make_queries(scale: Scale, tokens: int, device: torch.device) -> Trial:
    config = scale.config
    shape = tokens, config.index_n_heads, config.index_head_dim
    copies = scale.copies(2 * tokens * shape[1] * shape[2]) if tokens < scale.tokens else 1
    made = [
        (inputs.normal(shape, device), inputs.normal(shape[:2], device, torch.float32))
        for _ in range(min(copies, 200))
    ]

    def check() -> None:
        query, weights = made[0]
        rounded, folded = quantize_index_queries(query, weights)
        restored = hadamard(rounded.float()) * (folded / weights)[..., None]
        require_close(restored, query.float(), E4M3_ERROR)

    return Trial([partial(quantize_index_queries, *operands) for operands in made], check)


def _make_quantize(scale: Scale, device: torch.device) -> Trial:
    weight = _weight(scale, device)

    def check() -> None:
        require_close(dequantize_blocks(*quantize_blocks(weight)), weight.float(), E4M3_ERROR)

    return Trial([partial(quantize_blocks, weight)], check)


def _make_dequantize(scale: Scale, device: torch.device) -> Trial:
    weight = _weight(scale, device)
    packed = quantize_blocks(weight)
    restore = partial(dequantize_blocks, *packed, dtype=torch.bfloat16)
    return Trial([restore], lambda: require_close(restore(), weight.float(), E4M3_ERROR))


def _weight(scale: Scale, device: torch.device) -> Tensor:
    return inputs.weight((scale.config.intermediate_size, scale.config.hidden_size), device)
