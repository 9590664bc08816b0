"""Reading checkpoints: Hugging Face safetensors, one tensor at a time, strict both ways.

A file's headers are checked against the config before the first weight is read, so a bad checkpoint
never leaves a half-filled model. Writing is in `checkpoint_writing`.
"""

import json
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from megaspan.config import ModelConfig
from megaspan.errors import UserError
from megaspan.model.checkpoint_names import (
    INDEX_FILE,
    SINGLE_FILE,
    Piece,
    Shape,
    disk_pieces,
    expected_tensors,
    has_mtp,
    memory_tensors,
    mtp_prefix,
    stays_float32,
)
from megaspan.model.checkpoint_writing import write_checkpoint
from megaspan.ops.quant import BLOCK, block_grid, dequantize_blocks

__all__ = ["expected_tensors", "load_model_weights", "read_checkpoint", "write_checkpoint"]

FP8 = "F8_E4M3"
READABLE = ("BF16", "F16", "F32", FP8)


@dataclass(frozen=True)
class Stored:
    """A tensor in a file, as its header describes it. dtype: safetensors' name of it."""

    shard: Path
    shape: Shape
    dtype: str


def read_checkpoint(
    folder: str | Path,
    config: ModelConfig,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
    mtp: bool = False,
) -> dict[str, Tensor]:
    """Read a checkpoint folder into tensors under their in-memory names, experts stacked.

    Weights come out in `dtype`, FP8 blocks dequantised; the router and its bias in float32. mtp: read
    the multi-token prediction layers too; without it a file may have them or not.

    Raises UserError for a file that is missing or damaged, and for tensors that are missing, left over,
    or of another shape than `config` says.
    """
    stored, pieces = _open_checkpoint(Path(folder), config, mtp)
    tensors = {
        name: torch.empty(shape, dtype=torch.float32 if stays_float32(name) else dtype, device=device)
        for name, shape in memory_tensors(config, mtp).items()
    }
    _fill(tensors, stored, pieces)
    if config.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    return tensors


@torch.no_grad()
def load_model_weights(
    model: nn.Module,
    folder: str | Path,
    config: ModelConfig,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
) -> None:
    """Fill a model's parameters and buffers from a checkpoint folder, in place.

    What lies on the meta device is created on `device`, in `dtype` (float32 for the router); what is
    real keeps its place and dtype. Peak memory is the model and one tensor. Errors as `read_checkpoint`,
    and ValueError when the model has other parameters than `config` says.
    """
    names = set(model.state_dict())
    mtp = has_mtp(names, config)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if different := (names - tied) ^ memory_tensors(config, mtp).keys():
        raise ValueError(f"model and config disagree on {_some(sorted(different))}")
    stored, pieces = _open_checkpoint(Path(folder), config, mtp)
    _leave_meta(model, dtype, device)
    _fill(model.state_dict(), stored, pieces)


def _leave_meta(model: nn.Module, dtype: torch.dtype, device: str | torch.device) -> None:
    created: dict[int, Tensor] = {}  # a tied parameter has two places and stays one
    for prefix, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or not tensor.is_meta:
                continue
            if id(tensor) not in created:
                real_dtype = torch.float32 if stays_float32(f"{prefix}.{name}") else dtype
                real = torch.empty(tensor.shape, dtype=real_dtype, device=device)
                is_parameter = isinstance(tensor, nn.Parameter)
                created[id(tensor)] = nn.Parameter(real, tensor.requires_grad) if is_parameter else real
            setattr(module, name, created[id(tensor)])


def _open_checkpoint(
    folder: Path, config: ModelConfig, mtp: bool
) -> tuple[dict[str, Stored], dict[str, Piece]]:
    """Read all headers and check them; return what is stored and where each tensor goes."""
    _check_folder(folder)
    stored = _read_headers(folder)
    pieces = disk_pieces(config, mtp)
    scales = {scale_name(name): piece for name, piece in pieces.items() if _is_fp8(stored.get(name))}
    _check_names(folder, stored, pieces.keys() | scales.keys(), config, mtp)
    for name, piece in pieces.items():
        _check_tensor(name, stored[name], piece.shape)
    for name, piece in scales.items():
        _check_tensor(name, stored[name], block_grid(*piece.shape))
    return stored, pieces


def scale_name(name: str) -> str:
    """The name of the FP8 scales of a weight."""
    return f"{name}_scale_inv"


def _is_fp8(tensor: Stored | None) -> bool:
    return tensor is not None and tensor.dtype == FP8


def _fill(tensors: dict[str, Tensor], stored: dict[str, Stored], pieces: dict[str, Piece]) -> None:
    names_of: dict[Path, list[str]] = {}
    for name in pieces:
        names_of.setdefault(stored[name].shard, []).append(name)
    for shard, names in names_of.items():
        with safe_open(shard, "pt") as file:
            for name in names:
                place = tensors[pieces[name].name][pieces[name].index]
                tensor = file.get_tensor(name)
                if _is_fp8(stored[name]):
                    scales = _read_scales(scale_name(name), shard, file, stored)
                    tensor = dequantize_blocks(tensor.to(place.device), scales.to(place.device), place.dtype)
                place.copy_(tensor)


def _read_scales(name: str, shard: Path, file: safe_open, stored: dict[str, Stored]) -> Tensor:
    if stored[name].shard == shard:
        return file.get_tensor(name)
    with safe_open(stored[name].shard, "pt") as other:
        return other.get_tensor(name)


def _check_folder(folder: Path) -> None:
    if not folder.exists():
        raise UserError(f"{folder} does not exist: give a checkpoint folder")
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder: give the folder that holds config.json and the weights")
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} has no config.json: is it a checkpoint folder?")
    quantization = _read_json(folder / "config.json").get("quantization_config")
    if quantization is None:
        return
    if not isinstance(quantization, dict):
        raise UserError(f"quantization_config in {folder / 'config.json'} must be an object: fetch it again")
    method, block = quantization.get("quant_method"), quantization.get("weight_block_size")
    if method != "fp8" or block != [BLOCK, BLOCK]:
        raise UserError(
            f"{folder} is quantised with {method!r} in blocks of {block}: "
            f"only unquantised weights and fp8 in blocks of [{BLOCK}, {BLOCK}] can be read"
        )


def _read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error}): fetch it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold a JSON object: fetch it again")
    return content


def _read_headers(folder: Path) -> dict[str, Stored]:
    """The tensors of all shards. As in transformers, a single file goes before an index."""
    if (folder / SINGLE_FILE).is_file():
        return _read_header(folder / SINGLE_FILE)
    if not (folder / INDEX_FILE).is_file():
        raise UserError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}: its weights are missing")
    weight_map = _read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{folder / INDEX_FILE} has no weight_map: fetch it again")
    names = list(weight_map.values())
    if outside := [
        name for name in names if not isinstance(name, str) or Path(name).name != name or not name
    ]:
        raise UserError(f"{folder / INDEX_FILE} names {outside[0]!r}, no file of the folder: fetch it again")
    shards = sorted(set(names))
    if missing := [shard for shard in shards if not (folder / shard).is_file()]:
        raise UserError(f"{folder} lacks {len(missing)} of {len(shards)} shards; fetch {_some(missing)}")
    stored: dict[str, Stored] = {}
    for shard in shards:
        header = _read_header(folder / shard)
        if twice := sorted(stored.keys() & header.keys()):
            raise UserError(f"{folder} holds tensors twice, in {shard} and another shard: {_some(twice)}")
        stored |= header
    for name, shard in weight_map.items():
        if name not in stored or stored[name].shard != folder / shard:
            raise UserError(f"{folder / INDEX_FILE} puts {name} in {shard}, where it is not; fetch both")
    return stored


def _read_header(shard: Path) -> dict[str, Stored]:
    try:
        with safe_open(shard, "pt") as file:
            slices = [(name, file.get_slice(name)) for name in file.keys()]  # noqa: SIM118
            return {name: Stored(shard, tuple(part.get_shape()), part.get_dtype()) for name, part in slices}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{shard} is truncated or damaged ({error}): fetch it again") from error


def _check_names(
    folder: Path, stored: dict[str, Stored], expected: set[str], config: ModelConfig, mtp: bool
) -> None:
    missing = sorted(expected - stored.keys())
    unexpected = _unexpected(folder, stored, expected, config, mtp)
    if not missing and not unexpected:
        return
    full = tuple(f"model.layers.{layer}.self_attn.indexer." for layer in config.full_layers)
    indexers = [name for name in missing if name.startswith(full)]
    faults = [f"lacks {len(missing)} tensors: {_some(indexers or missing)}"] if missing else []
    if indexers:
        layers = sorted({int(name.split(".")[2]) for name in indexers})
        faults.append(f"has no whole indexer on full layers {_some(layers)}")
    if unexpected:
        faults.append(f"has {len(unexpected)} unexpected tensors: {_some(unexpected)}")
    raise UserError(f"{folder} does not fit its config: it {'; it '.join(faults)}")


def _unexpected(
    folder: Path, stored: dict[str, Stored], expected: set[str], config: ModelConfig, mtp: bool
) -> list[str]:
    """Names that nothing asks for, less those that may be there: unread layers, a tied head, old indexers."""
    unexpected = sorted(stored.keys() - expected)
    if not mtp and has_mtp(stored, config):
        prefixes = tuple(mtp_prefix(config, i) for i in range(max(config.num_nextn_predict_layers, 1)))
        unexpected = [name for name in unexpected if not name.startswith(prefixes)]
    if config.tie_word_embeddings:
        unexpected = [name for name in unexpected if name != "lm_head.weight"]
    shared_layers = set(range(config.num_hidden_layers)) - set(config.full_layers)
    shared = tuple(f"model.layers.{layer}.self_attn.indexer." for layer in shared_layers)
    ignored = [name for name in unexpected if name.startswith(shared)]
    if ignored:
        unexpected = sorted(set(unexpected) - set(ignored))
        warnings.warn(
            f"{folder}: ignored {len(ignored)} indexer tensors on shared layers, which use the selection "
            f"of a full layer: {_some(ignored)}",
            stacklevel=5,
        )
    return unexpected


def _check_tensor(name: str, tensor: Stored, shape: Shape) -> None:
    where = f"{name} in {tensor.shard}"
    if tensor.shape != shape:
        raise UserError(f"{where} has shape {list(tensor.shape)}, but the config asks for {list(shape)}")
    if tensor.dtype not in READABLE:
        raise UserError(f"{where} has dtype {tensor.dtype}, but only {', '.join(READABLE)} can be read")


def _some(items: Iterable[object]) -> str:
    """Up to five of the items, for a message."""
    listed = [str(item) for item in items]
    return ", ".join(listed[:5]) + (", ..." if len(listed) > 5 else "")
