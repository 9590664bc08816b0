"""The Python face: load a checkpoint, ask it for logits or tokens, save it."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megaspan.cache.transient import TransientCache
from megaspan.config import ModelConfig
from megaspan.engine.generation import check_prompt, generate
from megaspan.errors import UserError
from megaspan.model.batch import Batch
from megaspan.model.checkpoint import load_model_weights, write_checkpoint
from megaspan.model.transformer import Transformer
from megaspan.tokenizer import Tokenizer


class PretrainedModel(Transformer):
    """A Transformer with its tokenizer (None when the checkpoint has none)."""

    tokenizer: Tokenizer | None = None

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int] | Tensor) -> Tensor:
        """token_ids [T] → float32 logits [T, V] of the whole sequence. UserError for ids it cannot read."""
        prompt = check_prompt(self.config, token_ids)
        batch = Batch.of([prompt], device=str(self.lm_head.weight.device))
        return self.unembed(self(batch, TransientCache()))

    def generate(
        self,
        token_ids: Sequence[int] | Tensor,
        max_tokens: int,
        temperature: float = 0.0,
        seed: int | None = None,
    ) -> Iterator[int]:
        """Yield sampled token ids until an end-of-sequence id (yielded too) or `max_tokens` of them."""
        return generate(self, token_ids, max_tokens, temperature, seed)


def load(path: str | Path, dtype: str | torch.dtype = "auto", device: str = "cpu") -> PretrainedModel:
    """Read a Hugging Face `glm_moe_dsa` checkpoint folder.

    dtype: "float32", "bfloat16", or "auto": what the checkpoint says where the device multiplies it
    fast, else float32. Raises UserError when a file is missing, damaged, or of another architecture.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder: give the folder that holds config.json and the weights")
    config = ModelConfig.from_json(folder / "config.json")
    with torch.device("meta"):
        model = PretrainedModel(config)
    load_model_weights(model, folder, config, resolve_dtype(dtype, config, device), device)
    if (folder / "tokenizer.json").exists():
        model.tokenizer = Tokenizer.load(folder)
    return model.eval()


def save(model: Transformer, path: str | Path, fp8: bool = False) -> None:
    """Write a checkpoint folder that transformers loads; fp8: 128×128-block FP8 weights, as the release."""
    write_checkpoint(model.state_dict(), model.config, Path(path), fp8=fp8)
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is not None:
        tokenizer.save(path)


def resolve_dtype(dtype: str | torch.dtype, config: ModelConfig, device: str) -> torch.dtype:
    """Turn "auto", a name or a dtype into one of the two dtypes that the model runs in."""
    if isinstance(dtype, torch.dtype):
        dtype = str(dtype).removeprefix("torch.")
    if dtype == "auto":
        # Builds without oneDNN lack the question, and the fast product.
        fast_cpu = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        fast_bf16 = device != "cpu" or fast_cpu
        dtype = config.dtype if fast_bf16 else "float32"
    if dtype not in ("float32", "bfloat16"):
        raise UserError(f"dtype {dtype!r} is not supported: use auto, float32 or bfloat16")
    return getattr(torch, dtype)
