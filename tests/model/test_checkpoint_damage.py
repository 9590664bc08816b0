"""Damaged checkpoints: each fault is one clear line."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megaspan.errors import UserError
from megaspan.model.checkpoint import read_checkpoint, write_checkpoint
from tests.model.checkpoints import DEBUG, random_state, rewrite


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_checkpoint(random_state(DEBUG), DEBUG, tmp_path / "single")
    return tmp_path / "single"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    write_checkpoint(random_state(DEBUG), DEBUG, tmp_path / "sharded", max_shard_bytes=400_000)
    return tmp_path / "sharded"


def edit_json(path: Path, change: Callable[[dict], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def config_of(folder: Path) -> Path:
    return folder / "config.json"


def index_of(folder: Path) -> Path:
    return folder / "model.safetensors.index.json"


def shard_of(folder: Path) -> Path:
    """The first of the shards, which holds the embedding and not the head."""
    return min(folder.glob("model-*.safetensors"))


def quantise_otherwise(folder: Path) -> None:
    edit_json(config_of(folder), lambda content: content.update(quantization_config={"quant_method": "awq"}))


def quantise_by_name(folder: Path) -> None:
    edit_json(config_of(folder), lambda content: content.update(quantization_config="fp8"))


def point_elsewhere(folder: Path) -> None:
    shard = shard_of(folder).name
    edit_json(index_of(folder), lambda content: content["weight_map"].update({"lm_head.weight": shard}))


def copy_embedding(folder: Path) -> None:
    other = max(folder.glob("model-*.safetensors"))
    embedding = load_file(shard_of(folder))["model.embed_tokens.weight"]
    save_file({**load_file(other), "model.embed_tokens.weight": embedding}, other)


def add_stray(folder: Path) -> None:
    save_file({**load_file(shard_of(folder)), "stray": torch.ones(1)}, shard_of(folder))


NO_JSON = "cannot be read as JSON"
DAMAGED = r"model-00001-of-\S+ is truncated or damaged"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "does not exist"),
    "no config": (lambda folder: config_of(folder).unlink(), r"has no config\.json"),
    "bad config": (lambda folder: config_of(folder).write_text("{"), NO_JSON),
    "config is a list": (lambda folder: config_of(folder).write_text("[]"), "must hold a JSON object"),
    "other quantisation": (quantise_otherwise, "quantised with 'awq'"),
    "quantisation is no object": (quantise_by_name, "quantization_config in .* must be an object"),
    "no weights": (lambda folder: index_of(folder).unlink(), "its weights are missing"),
    "bad index": (lambda folder: index_of(folder).write_bytes(b"\xff"), NO_JSON),
    "empty index": (lambda folder: index_of(folder).write_text("{}"), "has no weight_map"),
    "missing shard": (lambda folder: shard_of(folder).unlink(), r"lacks 1 of \d+ shards; fetch model-00001"),
    "truncated": (lambda folder: os.truncate(shard_of(folder), shard_of(folder).stat().st_size - 1), DAMAGED),
    "truncated in the header": (lambda folder: os.truncate(shard_of(folder), 50), DAMAGED),
    "empty shard": (lambda folder: os.truncate(shard_of(folder), 0), DAMAGED),
    "bad header": (lambda folder: shard_of(folder).write_bytes(b"\x10" + bytes(7) + b"x" * 100), DAMAGED),
    "index points nowhere": (point_elsewhere, r"puts lm_head\.weight in model-00001\S+, where it is not"),
    "tensor in two shards": (copy_embedding, r"holds tensors twice, .*model\.embed_tokens\.weight"),
    "tensor not in the index": (add_stray, "has 1 unexpected tensors: stray"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_one_clear_line(sharded: Path, damage: str) -> None:
    inflict, message = DAMAGE[damage]
    inflict(sharded)
    with pytest.raises(UserError, match=message) as caught:
        read_checkpoint(sharded, DEBUG)
    assert "\n" not in str(caught.value)


def test_a_file_is_no_folder(folder: Path) -> None:
    with pytest.raises(UserError, match="is not a folder"):
        read_checkpoint(folder / "config.json", DEBUG)


def test_a_wrong_shape_is_named_with_both_shapes(folder: Path) -> None:
    name = "model.layers.4.mlp.experts.3.up_proj.weight"
    rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(33, 64)}))
    message = rf"{name} .* has shape \[33, 64\], but the config asks for \[32, 64\]"
    with pytest.raises(UserError, match=message):
        read_checkpoint(folder, DEBUG)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64], ids=str)
def test_a_dtype_that_is_no_weight_is_named(folder: Path, dtype: torch.dtype) -> None:
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(97, 64, dtype=dtype)}))
    with pytest.raises(UserError, match=r"lm_head\.weight .* has dtype [IF]\d+"):
        read_checkpoint(folder, DEBUG)


def test_scales_are_held_to_the_same_strictness(tmp_path: Path) -> None:
    write_checkpoint(random_state(DEBUG), DEBUG, tmp_path, fp8=True)
    good = (tmp_path / "model.safetensors").read_bytes()
    scales = "model.layers.0.self_attn.o_proj.weight_scale_inv"
    rewrite(tmp_path, lambda tensors: tensors.pop(scales))
    with pytest.raises(UserError, match=f"lacks 1 tensors: {scales}"):
        read_checkpoint(tmp_path, DEBUG)
    (tmp_path / "model.safetensors").write_bytes(good)
    rewrite(tmp_path, lambda tensors: tensors.update({scales: torch.ones(2, 1)}))
    with pytest.raises(UserError, match=rf"{scales} .* has shape \[2, 1\], but the config asks for \[1, 1\]"):
        read_checkpoint(tmp_path, DEBUG)
    (tmp_path / "model.safetensors").write_bytes(good)
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight_scale_inv": torch.ones(1, 1)}))
    with pytest.raises(UserError, match=r"unexpected tensors: lm_head\.weight_scale_inv"):
        read_checkpoint(tmp_path, DEBUG)


@pytest.mark.parametrize("shard", ["../elsewhere.safetensors", "/elsewhere.safetensors", "", 7, None])
def test_an_index_may_only_name_files_of_its_folder(tmp_path: Path, shard: object) -> None:
    content = {"weight_map": {"model.norm.weight": shard}}
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="no file of the folder"):
        read_checkpoint(tmp_path, DEBUG, torch.float32)
