"""Saving checkpoints: all or nothing, and what transformers makes of them."""

import json
import math
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megaspan.config import ModelConfig
from megaspan.errors import UserError
from megaspan.model import checkpoint_writing
from megaspan.model.checkpoint import expected_tensors, read_checkpoint, write_checkpoint
from tests.model.checkpoints import DEBUG, State, assert_equal, contents, random_state, saved_tensors


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_checkpoint(random_state(DEBUG), DEBUG, tmp_path / "single")
    return tmp_path / "single"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    write_checkpoint(random_state(DEBUG), DEBUG, tmp_path / "sharded", max_shard_bytes=400_000)
    return tmp_path / "sharded"


def test_a_full_disk_leaves_the_old_checkpoint(folder: Path) -> None:
    before = contents(folder)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(UserError, match="the disk is full"):
            write_checkpoint(random_state(DEBUG, seed=1), DEBUG, folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert contents(folder) == before


def test_a_failure_in_the_last_shard_leaves_the_old_checkpoint(
    sharded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(sharded)
    last = max(path.name for path in sharded.glob("model-*.safetensors"))

    def save_all_but_the_last(tensors: State, path: Path, metadata: dict[str, str]) -> None:
        if path.name == last:
            raise PermissionError(13, "Permission denied")
        save_file(tensors, path, metadata)

    monkeypatch.setattr(checkpoint_writing, "save_file", save_all_but_the_last)
    with pytest.raises(UserError, match="Permission denied; choose a folder that can be written"):
        write_checkpoint(random_state(DEBUG, seed=1), DEBUG, sharded, max_shard_bytes=400_000)
    assert contents(sharded) == before


def test_too_little_room_is_said_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UserError, match=r"the disk is full .*[\d,]+ bytes are needed, 1,000 are free"):
        write_checkpoint(random_state(DEBUG), DEBUG, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_path_that_cannot_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match=r"cannot save to .*choose a folder"):
            write_checkpoint(random_state(DEBUG), DEBUG, path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder(folder: Path) -> None:
    before = contents(folder)
    folder.chmod(0o555)
    try:
        with pytest.raises(UserError, match="Permission denied; choose a folder"):
            write_checkpoint(random_state(DEBUG, seed=1), DEBUG, folder)
    finally:
        folder.chmod(0o755)
    assert contents(folder) == before


def test_what_cannot_be_quantised_is_named_and_leaves_the_old_checkpoint(folder: Path) -> None:
    before = contents(folder)
    state = random_state(DEBUG, seed=1)
    state["model.layers.5.mlp.experts.down_proj"][3, 0, 0] = torch.nan
    with pytest.raises(UserError, match=r"layers\.5\.mlp\.experts\.3\.down_proj\.weight in FP8: .*NaN"):
        write_checkpoint(state, DEBUG, folder, fp8=True)
    assert contents(folder) == before


@pytest.mark.parametrize("shards", [(1, 3), (3, 1), (3, 2), (2, 3)], ids=str)
def test_a_save_replaces_the_old_files_and_no_others(tmp_path: Path, shards: tuple[int, int]) -> None:
    (tmp_path / "tokenizer.json").write_text("kept")
    total = sum(math.prod(shape) * 4 for shape in expected_tensors(DEBUG, mtp=False).values())
    for seed, count in enumerate(shards):
        state = random_state(DEBUG, seed=seed)
        write_checkpoint(state, DEBUG, tmp_path, max_shard_bytes=total // count + 30_000)
        assert_equal(read_checkpoint(tmp_path, DEBUG, torch.float32), state)
        weights = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        files = ["model.safetensors"] if count == 1 else ["model.safetensors.index.json", *weights]
        assert contents(tmp_path).keys() == {"config.json", "tokenizer.json", *files}
    assert (tmp_path / "tokenizer.json").read_text() == "kept"
    if shards[1] > 1:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == total


@pytest.mark.parametrize("sharded_before", [False, True], ids=["from-single", "from-shards"])
@pytest.mark.parametrize("sharded_after", [False, True], ids=["to-single", "to-shards"])
def test_a_crash_between_renames_never_mixes_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sharded_before: bool, sharded_after: bool
) -> None:
    config = DEBUG.replace(
        num_hidden_layers=2, n_routed_experts=2,
        indexer_types=("full", "shared"), mlp_layer_types=("dense", "sparse"),
    )  # fmt: skip
    configs = [config.replace(rope_theta=theta) for theta in (1.0, 2.0)]
    limits = {False: 10**9, True: 50_000}
    states = [{name: torch.full_like(tensor, value) for name, tensor in random_state(config).items()}
              for value in (1.0, 2.0)]  # fmt: skip

    def steps(crash_at: int | None) -> Iterator[None]:
        step = 0
        while step != crash_at:
            yield
            step += 1
        raise KeyboardInterrupt

    outcomes = set()
    for crash_at in range(100):
        folder = tmp_path / str(crash_at)
        write_checkpoint(states[0], configs[0], folder, max_shard_bytes=limits[sharded_before])
        with monkeypatch.context() as patch:
            left = steps(crash_at)
            for change in ("replace", "unlink"):
                original = getattr(Path, change)

                def counted(*arguments, original=original, left=left, **options):
                    next(left)
                    return original(*arguments, **options)

                patch.setattr(Path, change, counted)
            try:
                write_checkpoint(states[1], configs[1], folder, max_shard_bytes=limits[sharded_after])
                finished = True
            except KeyboardInterrupt:
                finished = False
        try:
            read = read_checkpoint(folder, config, torch.float32)
            values = {value for tensor in read.values() for value in tensor.unique().tolist()}
            values.add(ModelConfig.from_json(folder).rope_theta)
        except UserError:
            values = {0.0}
        assert len(values) == 1, f"a mix after {crash_at} steps"
        outcomes |= values
        if finished:
            assert values == {2.0}
            break
    assert outcomes == {0.0, 1.0, 2.0}
    assert crash_at >= 2


def test_files_are_readable_as_the_umask_says(folder: Path) -> None:
    mask = os.umask(0)
    os.umask(mask)
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o666 & ~mask}


def test_a_state_that_is_not_the_configs_is_refused(tmp_path: Path) -> None:
    state = random_state(DEBUG)
    with pytest.raises(ValueError, match="disagree on"):
        write_checkpoint(state | {"extra": torch.ones(1)}, DEBUG, tmp_path)
    with pytest.raises(ValueError, match=r"lm_head\.weight has shape \[1, 1\], not \[97, 64\]"):
        write_checkpoint(state | {"lm_head.weight": torch.ones(1, 1)}, DEBUG, tmp_path)
    assert contents(tmp_path) == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("max_shard_bytes", [10**9, 400_000], ids=["single", "sharded"])
def test_transformers_loads_what_we_save(tmp_path: Path, dtype: torch.dtype, max_shard_bytes: int) -> None:
    from transformers import GlmMoeDsaForCausalLM

    state = random_state(DEBUG, dtype=dtype)
    write_checkpoint(state, DEBUG, tmp_path, max_shard_bytes=max_shard_bytes)
    model, report = GlmMoeDsaForCausalLM.from_pretrained(tmp_path, dtype="auto", output_loading_info=True)
    assert not any(report.values()), report
    loaded = model.state_dict()
    assert loaded.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(loaded[name].float(), tensor.float()), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_we_load_what_transformers_saves(tmp_path: Path, dtype: torch.dtype) -> None:
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    model = GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**DEBUG.to_dict())).to(dtype)
    state = model.state_dict()
    for tensor in state.values():
        tensor.normal_()
    model.save_pretrained(tmp_path)
    config = ModelConfig.from_json(tmp_path)
    assert saved_tensors(tmp_path).keys() == expected_tensors(config, mtp=False).keys()
    read = read_checkpoint(tmp_path, config, dtype)
    assert read.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(read[name].float(), tensor.float()), name


def test_transformers_dequantises_our_fp8(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from transformers import GlmMoeDsaForCausalLM

    # 144 rows and columns: transformers takes their two blocks to be 72 wide.
    config = DEBUG.replace(hidden_size=144, qk_nope_head_dim=24, qk_rope_head_dim=12, index_head_dim=16)
    write_checkpoint(random_state(config), config, tmp_path, fp8=True)
    model, report = GlmMoeDsaForCausalLM.from_pretrained(tmp_path, dtype="auto", output_loading_info=True)
    assert not any(report.values()), report
    expected = read_checkpoint(tmp_path, config)
    loaded = model.state_dict()
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(loaded[name].float(), tensor.float()), name
