"""A model and its tokenizer in a checkpoint folder."""

from pathlib import Path
from typing import TypeVar

import torch

from megaspan.config import ModelConfig
from megaspan.errors import UserError
from megaspan.model.batch_invariance import set_batch_invariant
from megaspan.model.checkpoint import load_model_weights, write_checkpoint
from megaspan.model.transformer import Transformer
from megaspan.tokenizer import Tokenizer


class LanguageModel(Transformer):
    """A Transformer with its tokenizer (None when the checkpoint has none)."""

    tokenizer: Tokenizer | None = None


Kind = TypeVar("Kind", bound=LanguageModel)


def load_folder(
    path: str | Path, dtype: str | torch.dtype, device: str, kind: type[Kind], batch_invariant: bool = False
) -> Kind:
    """Read a Hugging Face `glm_moe_dsa` checkpoint folder into a model of the given kind.

    dtype: "float32", "bfloat16", or "auto": what the checkpoint says where the device multiplies it
    fast, else float32. device: "auto" is a GPU where there is one. batch_invariant: `set_batch_invariant`.
    Raises UserError when a file is missing, damaged, or of another architecture.
    """
    device = resolve_device(device)
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder: give the folder that holds config.json and the weights")
    config = ModelConfig.from_json(folder / "config.json")
    with torch.device("meta"):
        model = kind(config)
    load_model_weights(model, folder, config, resolve_dtype(dtype, config, device), device)
    if (folder / "tokenizer.json").exists():
        model.tokenizer = Tokenizer.load(folder)
    set_batch_invariant(model, batch_invariant)
    return model.eval()


def save_folder(model: Transformer, path: str | Path, fp8: bool = False) -> None:
    """Write a checkpoint folder that transformers loads; fp8: 128×128-block FP8 weights, as the release."""
    write_checkpoint(model.state_dict(), model.config, Path(path), fp8=fp8)
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is not None:
        tokenizer.save(path)


def resolve_device(device: str) -> str:
    """The device itself, or for "auto" a GPU where there is one. UserError for one that is not here."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = "not one of PyTorch's" if "Expected one of" in str(error) else str(error).splitlines()[0]
        raise UserError(f"no device {device!r} here: use cpu ({reason})") from None
    return device


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
