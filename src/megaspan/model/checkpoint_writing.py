"""Writing checkpoints that transformers, SGLang and vLLM load: bf16, fp32, or FP8 blocks."""

import errno
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megaspan.config import ModelConfig
from megaspan.errors import UserError
from megaspan.model.checkpoint_names import (
    INDEX_FILE,
    SINGLE_FILE,
    Piece,
    becomes_fp8,
    disk_pieces,
    has_mtp,
    memory_tensors,
    stays_float32,
)
from megaspan.ops.quant import BLOCK, block_grid, quantize_blocks

STAGING = ".saving"
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@torch.no_grad()
def write_checkpoint(
    state_dict: Mapping[str, Tensor],
    config: ModelConfig,
    folder: str | Path,
    fp8: bool = False,
    max_shard_bytes: int = 5_000_000_000,
    dtype: torch.dtype | None = None,
) -> None:
    """Write config.json and the weights, experts one by one, as Hugging Face lays them out.

    state_dict: the model's parameters and buffers under their in-memory names; multi-token prediction
    layers are written, and named in config.json, when they are among them. fp8: 128×128 blocks for the
    matrices that the release quantises. dtype: of the other weights; None keeps theirs (bfloat16 with
    fp8). The router is written as it is. More than `max_shard_bytes` makes shards with an index.

    Everything is written beside the old files first, then renamed over them: a save that fails leaves
    the old checkpoint as it was. Raises UserError when the folder cannot be written or the disk is full,
    and for NaN or infinity in a weight that is to be quantised.
    """
    mtp = has_mtp(state_dict, config)
    _check_state(state_dict, config, mtp)
    if fp8 and dtype is None:
        dtype = torch.bfloat16
    config = config.replace(
        num_nextn_predict_layers=config.num_nextn_predict_layers if mtp else 0,
        dtype=str(dtype or state_dict["model.embed_tokens.weight"].dtype).removeprefix("torch."),
    )
    files = _Files(state_dict, disk_pieces(config, mtp), fp8, dtype)
    folder, is_new = Path(folder), not Path(folder).exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _stage(folder, files, config, max_shard_bytes)
        _commit(folder)
    except (OSError, SafetensorError) as error:
        raise UserError(_write_failure(folder, error)) from error
    finally:
        shutil.rmtree(folder / STAGING, ignore_errors=True)
        if is_new and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


class _Files:
    """What goes into the files: sizes at once, tensors when they are asked for."""

    def __init__(
        self, state_dict: Mapping[str, Tensor], pieces: dict[str, Piece], fp8: bool, dtype: torch.dtype | None
    ):
        self.state_dict, self.pieces, self.fp8, self.dtype = state_dict, pieces, fp8, dtype

    def quantised(self, name: str) -> bool:
        return self.fp8 and becomes_fp8(name, self.pieces[name].shape)

    def dtype_of(self, name: str) -> torch.dtype:
        own = self.state_dict[self.pieces[name].name].dtype
        return own if self.dtype is None or stays_float32(name) else self.dtype

    def size(self, name: str) -> int:
        """Bytes of a tensor on disk, with its scales."""
        shape = torch.Size(self.pieces[name].shape)
        if self.quantised(name):
            return shape.numel() + 4 * torch.Size(block_grid(*shape)).numel()
        return shape.numel() * self.dtype_of(name).itemsize

    def read(self, name: str) -> dict[str, Tensor]:
        """A tensor by its name on disk, with its scales."""
        piece = self.pieces[name]
        tensor = self.state_dict[piece.name][piece.index].detach()
        if not self.quantised(name):
            return {name: tensor.to("cpu", self.dtype_of(name)).contiguous()}
        try:
            quantized, scales = quantize_blocks(tensor, uniform_uneven=True)
        except ValueError as error:
            raise UserError(f"cannot save {name} in FP8: {error}") from error
        return {name: quantized.cpu(), f"{name}_scale_inv": scales.cpu()}

    def shards(self, max_bytes: int) -> list[list[str]]:
        """The names in order, cut where a file would grow beyond `max_bytes`."""
        shards: list[list[str]] = [[]]
        filled = 0
        for name in self.pieces:
            if shards[-1] and filled + self.size(name) > max_bytes:
                shards.append([])
                filled = 0
            shards[-1].append(name)
            filled += self.size(name)
        return shards

    def config_dict(self, config: ModelConfig) -> dict[str, Any]:
        written = config.to_dict()
        if self.fp8:
            unquantised = {name.rpartition(".")[0] for name in self.pieces if not self.quantised(name)}
            written["quantization_config"] = {
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "modules_to_not_convert": sorted(unquantised),
                "quant_method": "fp8",
                "weight_block_size": [BLOCK, BLOCK],
            }
        return written


def _check_state(state_dict: Mapping[str, Tensor], config: ModelConfig, mtp: bool) -> None:
    expected = memory_tensors(config, mtp)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if different := (state_dict.keys() - tied) ^ expected.keys():
        raise ValueError(f"state dict and config disagree on {sorted(different)[:5]}")
    for name, shape in expected.items():
        given = state_dict[name].shape
        if given != shape:
            raise ValueError(f"{name} has shape {list(given)}, not {list(shape)} as in the config")


def _stage(folder: Path, files: _Files, config: ModelConfig, max_shard_bytes: int) -> None:
    total = sum(files.size(name) for name in files.pieces)
    free = shutil.disk_usage(folder).free
    if free < total:
        raise OSError(errno.ENOSPC, f"{total:,} bytes are needed, {free:,} are free")
    staging = folder / STAGING
    shutil.rmtree(staging, ignore_errors=True)  # left by a save that was killed
    staging.mkdir()
    shards = files.shards(max_shard_bytes)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        shard = SINGLE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {key: tensor for name in names for key, tensor in files.read(name).items()}
        save_file(tensors, staging / shard, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, shard)
    if len(shards) > 1:
        _write_json(staging / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
    _write_json(staging / "config.json", files.config_dict(config))
    permissions = 0o666 & ~_umask()
    for path in staging.iterdir():
        path.chmod(permissions)  # safetensors writes files for their owner only
        _flush_to_disk(path)


def _commit(folder: Path) -> None:
    """Rename the staged files over the old ones.

    Readers take a single file first, then the index. These go first and one comes last, so a crash
    half-way leaves the old checkpoint, the new one, or none, but never a mix, nor a config of the other.
    """
    new = {path.name for path in (folder / STAGING).iterdir()}
    for entry in (SINGLE_FILE, INDEX_FILE):
        (folder / entry).unlink(missing_ok=True)
    for name in sorted(new - {SINGLE_FILE, INDEX_FILE}) + sorted(new & {SINGLE_FILE, INDEX_FILE}):
        (folder / STAGING / name).replace(folder / name)
    for old in folder.glob("model-*-of-*.safetensors"):
        if old.name not in new:
            old.unlink(missing_ok=True)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _flush_to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _write_failure(folder: Path, error: OSError | SafetensorError) -> str:
    # safetensors gives the number of the system's error only in its message.
    numbers = [number for number in FULL_DISK if f"(os error {number})" in str(error)]
    if numbers or (isinstance(error, OSError) and error.errno in FULL_DISK):
        return f"cannot save to {folder}: the disk is full ({error}); free some space and save again"
    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
    return f"cannot save to {folder}: {reason}; choose a folder that can be written"
