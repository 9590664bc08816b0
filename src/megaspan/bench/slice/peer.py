"""transformers' GlmMoeDsaForCausalLM at the same widths, decoding from a cache that is filled with noise."""

import gc
import inspect
from collections.abc import Callable
from importlib.metadata import version
from statistics import median

import torch

from megaspan.bench.device_time import Stopwatch
from megaspan.config import ModelConfig

STEPS = 8
FIRST_TOKENS = 16  # read to see what the cache keeps


def transformers_decode(
    config: ModelConfig, length: int, implementation: str, stopwatch: Stopwatch
) -> tuple[str, float]:
    """Its name with its version, and the seconds of a decoding step after `length` tokens."""
    from transformers import DynamicCache, GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    device = stopwatch.device
    theirs = GlmMoeDsaConfig(**config.to_dict())
    theirs._attn_implementation = implementation
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = GlmMoeDsaForCausalLM(theirs).eval()
    finally:
        torch.set_default_dtype(before)
    cache = DynamicCache(config=theirs)
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    @torch.inference_mode()
    def read(count: int) -> None:
        token_ids = torch.ones(1, count, dtype=torch.long, device=device)
        model(token_ids, use_cache=True, logits_to_keep=1, **{name: cache})

    read(FIRST_TOKENS)
    for layer in cache.layers:
        for kept in ("keys", "values", "indexer_keys"):
            some = getattr(layer, kept, None)
            if some is not None:
                shape = *some.shape[:-2], length, some.shape[-1]
                setattr(layer, kept, torch.randn(shape, dtype=some.dtype, device=device))
    return f"transformers {version('transformers')} {implementation}", _step_seconds(
        lambda: read(1), stopwatch
    )


def transformers_cache_bytes(config: ModelConfig, length: int) -> int:
    """Of `length` tokens in bf16: it keeps each head's keys and values, not the latents they are made of."""
    widths = config.qk_head_dim + config.v_head_dim
    return 2 * length * config.num_hidden_layers * config.num_attention_heads * widths


def _step_seconds(step: Callable[[], None], stopwatch: Stopwatch) -> float:
    gc.collect()
    step()
    return median(stopwatch.once(step) for _ in range(STEPS))
