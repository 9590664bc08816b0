"""New cache rows from their projections: norm, rotation, FP8 and store in one launch."""

import os
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from megaspan.bench.kernels import inputs
from megaspan.bench.kernels.registry import Case, NotHere, Scale, Trial, operation, require_close
from megaspan.costs.memory import index_row_bytes, latent_row_bytes
from megaspan.ops.quant import decode_index_rows, decode_latent_rows, hadamard
from megaspan.ops.rotation import rotate_reference, turns

TOLERANCE = 4e-2  # of values rounded to three bits of mantissa
EPS = 1e-5


@operation("write_rows")
def write_rows_cases(scale: Scale) -> Iterator[Case]:
    config = scale.config
    for tokens in (scale.batches[0], scale.tokens):
        few = tokens < scale.tokens
        for name, make, width, row_bytes in (
            ("latent", _make_latent, config.latent_width, latent_row_bytes(config, "fp8")),
            ("index", _make_index, config.index_head_dim, index_row_bytes(config, "fp8")),
        ):
            yield Case(
                name=f"write_rows, {tokens} {name} row{'s' * (tokens > 1)} in FP8",
                make=partial(make, scale, tokens),
                unit="µs" if few else "GB/s",
                nbytes=tokens * (2 * width + 8 * config.qk_rope_head_dim + 8 + row_bytes),
                decode=few,
            )


def _require_kernels(device: torch.device) -> None:
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise NotHere("one launch writes rows on a GPU only")


def _places(scale: Scale, tokens: int, device: torch.device) -> tuple[Tensor, Tensor, int]:
    """Which rows are written, how their positions turn, and how many rows there are."""
    pages = -(-tokens // scale.page_size) + 1
    places = torch.randperm(pages * scale.page_size, device=device)[:tokens]
    positions = torch.arange(scale.contexts[-1] - tokens, scale.contexts[-1], device=device)
    turned = turns(positions, scale.config.qk_rope_head_dim, scale.config.rope_theta)
    return places, turned, pages * scale.page_size


def _make_latent(scale: Scale, tokens: int, device: torch.device) -> Trial:
    _require_kernels(device)
    from megaspan.ops.write_rows.gpu import write_latent_rows_gpu

    config, rank, rope = scale.config, scale.config.kv_lora_rank, scale.config.qk_rope_head_dim
    places, turned, count = _places(scale, tokens, device)
    storage = torch.zeros(count, latent_row_bytes(config, "fp8"), dtype=torch.uint8, device=device)
    projected, weight = inputs.normal((tokens, config.latent_width), device), inputs.normal((rank,), device)
    write = partial(write_latent_rows_gpu, projected, weight, EPS, turned, storage, places)

    def check() -> None:
        write()
        latent = torch.nn.functional.rms_norm(projected[:, :rank].float(), (rank,), eps=EPS) * weight.float()
        expected = torch.cat((latent, rotate_reference(projected[:, rank:].float(), turned)), 1)
        require_close(decode_latent_rows(storage[places], rank, rope), expected, TOLERANCE)

    return Trial([write], check)


def _make_index(scale: Scale, tokens: int, device: torch.device) -> Trial:
    _require_kernels(device)
    from megaspan.ops.write_rows.gpu import write_index_rows_gpu

    width = scale.config.index_head_dim
    places, turned, count = _places(scale, tokens, device)
    storage = torch.zeros(count, width + 4, dtype=torch.uint8, device=device)
    projected = inputs.normal((tokens, width), device)
    weight, bias = (inputs.normal((width,), device) for _ in range(2))
    settings = weight, bias, EPS, turned, storage, places, scale.page_size, True
    write = partial(write_index_rows_gpu, projected, *settings)

    def check() -> None:
        write()
        parameters = weight.float(), bias.float(), EPS
        normed = torch.nn.functional.layer_norm(projected.float(), (width,), *parameters)
        expected = hadamard(rotate_reference(normed, turned))
        require_close(decode_index_rows(storage, places, scale.page_size), expected, TOLERANCE)

    return Trial([write], check)
