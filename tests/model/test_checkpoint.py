"""Reading checkpoints: round trips, models, IndexShare, and strictness both ways."""

import json
import tempfile
import warnings
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from megaspan.config import ModelConfig
from megaspan.errors import UserError
from megaspan.model import checkpoint
from megaspan.model.checkpoint import expected_tensors, load_model_weights, read_checkpoint, write_checkpoint
from megaspan.model.checkpoint_names import becomes_fp8, disk_pieces, stays_float32
from megaspan.model.transformer import Transformer
from megaspan.ops.quant import dequantize_blocks
from tests.model.checkpoints import DEBUG, State, assert_equal, random_state, rewrite, saved_tensors
from tests.strategies import configs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_checkpoint(random_state(DEBUG), DEBUG, tmp_path / "single")
    return tmp_path / "single"


@settings(max_examples=20)
@given(
    config=configs(), mtp=st.booleans(), tied=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    max_shard_bytes=st.sampled_from([5_000, 30_000, 10**9]),
)  # fmt: skip
def test_round_trip(
    config: ModelConfig, mtp: bool, tied: bool, dtype: torch.dtype, max_shard_bytes: int
) -> None:
    config = config.replace(tie_word_embeddings=tied, dtype=str(dtype).removeprefix("torch."))
    mtp = mtp and config.num_nextn_predict_layers > 0
    state = random_state(config, mtp, dtype)
    if tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(state, config, folder, max_shard_bytes=max_shard_bytes)
        assert saved_tensors(Path(folder)).keys() == expected_tensors(config, mtp).keys()
        assert_equal(read_checkpoint(folder, config, dtype, mtp=mtp), state)
        written = config if mtp else config.replace(num_nextn_predict_layers=0)
        assert ModelConfig.from_json(folder) == written


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fp8_round_trip(tmp_path: Path, dtype: torch.dtype) -> None:
    config = DEBUG.replace(hidden_size=144, kv_lora_rank=132)
    state = random_state(config, mtp=True, dtype=torch.bfloat16)
    write_checkpoint(state, config, tmp_path / "first", fp8=True)
    saved = saved_tensors(tmp_path / "first")
    read = read_checkpoint(tmp_path / "first", config, dtype, mtp=True)
    for name, piece in disk_pieces(config).items():
        if becomes_fp8(name, piece.shape):
            assert saved[name].dtype == torch.float8_e4m3fn
            assert saved[f"{name}_scale_inv"].dtype == torch.float32
            expected = dequantize_blocks(saved[name], saved[f"{name}_scale_inv"], dtype)
            original = state[piece.name][piece.index].float()
            assert (expected.float() - original).abs().max() <= original.abs().max() / 16
        else:
            expected = state[piece.name].to(read[piece.name].dtype)
            assert f"{name}_scale_inv" not in saved
        assert torch.equal(read[piece.name][piece.index], expected), name
    write_checkpoint(read, config, tmp_path / "second", fp8=True)
    again = saved_tensors(tmp_path / "second")
    assert again.keys() == saved.keys()
    weights = [name for name in saved if name.endswith(".weight")]
    assert all(torch.equal(again[name].float(), saved[name].float()) for name in weights)


def test_fp8_config_names_what_is_not_quantised(tmp_path: Path) -> None:
    write_checkpoint(random_state(DEBUG, mtp=True), DEBUG, tmp_path, fp8=True)
    config = json.loads((tmp_path / "config.json").read_text())
    quantization = config["quantization_config"]
    skipped = quantization.pop("modules_to_not_convert")
    assert quantization == {
        "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"
    }  # fmt: skip
    assert {"lm_head", "model.norm", "model.layers.1.mlp.gate", "model.layers.9.eh_proj"} < set(skipped)
    for name, tensor in saved_tensors(tmp_path).items():
        if not name.endswith("_scale_inv"):
            assert (tensor.dtype == torch.float8_e4m3fn) == (name.rpartition(".")[0] not in skipped), name
    assert config["dtype"] == "bfloat16"


def test_scales_may_lie_in_another_shard(tmp_path: Path) -> None:
    state = random_state(DEBUG)
    write_checkpoint(state, DEBUG, tmp_path, fp8=True)
    expected = read_checkpoint(tmp_path, DEBUG)
    tensors = saved_tensors(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    shards = {"a.safetensors": {}, "b.safetensors": {}}
    for name, tensor in tensors.items():
        shards["a.safetensors" if name.endswith("_scale_inv") else "b.safetensors"][name] = tensor
    for shard, held in shards.items():
        save_file(held, tmp_path / shard)
    weight_map = {name: shard for shard, held in shards.items() for name in held}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_equal(read_checkpoint(tmp_path, DEBUG), expected)


def test_the_router_stays_float32_in_a_bf16_model(folder: Path) -> None:
    state = random_state(DEBUG)
    read = read_checkpoint(folder, DEBUG, torch.bfloat16)
    for name, tensor in read.items():
        router = name.endswith(("mlp.gate.weight", "e_score_correction_bias"))
        assert tensor.dtype == (torch.float32 if router else torch.bfloat16), name
        assert torch.equal(tensor, state[name].to(tensor.dtype)), name


@pytest.mark.parametrize("tied", [False, True], ids=["own-head", "tied-head"])
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_fills_a_model(tmp_path: Path, device: str, tied: bool) -> None:
    config = DEBUG.replace(tie_word_embeddings=tied)
    state = random_state(config)
    write_checkpoint(state, config, tmp_path)
    with torch.device(device):
        model = Transformer(config)
    dtype = torch.bfloat16 if device == "meta" else torch.float32
    load_model_weights(model, tmp_path, config, dtype)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    expected = {name: tensor if stays_float32(name) else tensor.to(dtype) for name, tensor in state.items()}
    if tied:
        expected["lm_head.weight"] = expected["model.embed_tokens.weight"]
    assert_equal(model.state_dict(), expected)


def test_a_model_with_an_indexer_too_many_is_refused(folder: Path) -> None:
    model = Transformer(DEBUG.replace(indexer_types=("full",) * 9))
    with pytest.raises(ValueError, match=r"layers\.3\.self_attn\.indexer"):
        load_model_weights(model, folder, DEBUG)


def test_a_bad_checkpoint_leaves_the_model_alone(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop("lm_head.weight"))
    model = Transformer(DEBUG)
    model.initialise(seed=0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(UserError, match=r"lacks 1 tensors: lm_head\.weight"):
        load_model_weights(model, folder, DEBUG)
    assert_equal(dict(model.state_dict()), before)


@pytest.mark.parametrize("fp8", [False, True], ids=["float", "fp8"])
def test_reads_one_tensor_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fp8: bool) -> None:
    write_checkpoint(random_state(DEBUG), DEBUG, tmp_path, fp8=fp8, max_shard_bytes=300_000)
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = reads = 0

    class Counting:
        def __init__(self, *arguments: object) -> None:
            self.opened = safe_open(*arguments)

        def __enter__(self) -> "Counting":
            self.file = self.opened.__enter__()
            return self

        def __exit__(self, *arguments: object) -> None:
            self.opened.__exit__(*arguments)

        def keys(self) -> list[str]:
            return self.file.keys()

        def get_slice(self, name: str) -> object:
            return self.file.get_slice(name)

        def get_tensor(self, name: str) -> torch.Tensor:
            nonlocal most, reads
            tensor = self.file.get_tensor(name)
            alive.add(tensor)
            most, reads = max(most, len(alive)), reads + 1
            return tensor

    monkeypatch.setattr(checkpoint, "safe_open", Counting)
    read_checkpoint(tmp_path, DEBUG)
    assert reads == len(saved_tensors(tmp_path))
    # The tensor before is released only when the next one replaces it.
    assert most <= (3 if fp8 else 2)


# Shared layers have no indexer (P01)


def foreign_indexers(config: ModelConfig) -> State:
    """An indexer on every shared layer, as files made before IndexShare have."""
    every = config.replace(indexer_types=("full",) * config.num_hidden_layers)
    names = expected_tensors(every).keys() - expected_tensors(config).keys()
    return {name: torch.full(expected_tensors(every)[name], torch.nan) for name in sorted(names)}


@settings(max_examples=20)
@given(config=configs(), foreign=st.booleans())
def test_indexers_of_shared_layers_are_ignored_with_one_warning(config: ModelConfig, foreign: bool) -> None:
    state = random_state(config)
    extra = foreign_indexers(config) if foreign else {}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        write_checkpoint(state, config, folder)
        rewrite(Path(folder), lambda tensors: tensors.update(extra))
        assert_equal(read_checkpoint(folder, config, torch.float32), state)
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == bool(extra)
    assert all(f"ignored {len(extra)} indexer tensors on shared layers" in message for message in messages)


def test_missing_indexers_of_full_layers_are_named(folder: Path) -> None:
    def drop(tensors: State) -> None:
        for name in [name for name in tensors if ".layers.2.self_attn.indexer." in name]:
            del tensors[name]
        del tensors["model.layers.6.self_attn.indexer.wk.weight"], tensors["model.norm.weight"]

    rewrite(folder, drop)
    with pytest.raises(UserError) as caught:
        read_checkpoint(folder, DEBUG)
    assert "lacks 7 tensors" in str(caught.value)
    assert "no whole indexer on full layers 2, 6" in str(caught.value)
    for part in ("wq_b.weight", "wk.weight", "weights_proj.weight", "k_norm.weight", "k_norm.bias"):
        assert f"model.layers.2.self_attn.indexer.{part}" in str(caught.value)


def test_multi_token_prediction_may_be_left_unread(tmp_path: Path) -> None:
    state = random_state(DEBUG, mtp=True)
    write_checkpoint(state, DEBUG, tmp_path, fp8=False)
    without = {name: tensor for name, tensor in state.items() if ".layers.9." not in name}
    assert_equal(read_checkpoint(tmp_path, DEBUG, torch.float32), without)
    assert_equal(read_checkpoint(tmp_path, DEBUG, torch.float32, mtp=True), state)


def test_a_missing_prediction_layer_is_an_error_when_it_is_wanted(folder: Path) -> None:
    with pytest.raises(UserError, match=r"lacks 47 tensors: .*model\.layers\.9\."):
        read_checkpoint(folder, DEBUG, mtp=True)


def test_a_layer_too_many_is_no_prediction_layer(folder: Path) -> None:
    shorter = DEBUG.replace(
        num_hidden_layers=8, indexer_types=DEBUG.indexer_types[:8], mlp_layer_types=DEBUG.mlp_layer_types[:8]
    )
    with pytest.raises(UserError, match=r"unexpected tensors: model\.layers\.8\."):
        read_checkpoint(folder, shorter)


def test_names_up_to_five_tensors_and_their_number(folder: Path) -> None:
    def rename(tensors: State) -> None:
        for name in [name for name in tensors if ".experts.0." in name]:
            tensors[name.replace("experts.0", "experts.expert_0")] = tensors.pop(name)

    rewrite(folder, rename)
    with pytest.raises(UserError) as caught:
        read_checkpoint(folder, DEBUG)
    message = str(caught.value)
    assert "lacks 24 tensors" in message
    assert "24 unexpected tensors" in message
    assert message.count("experts.0.") == message.count("experts.expert_0.") == 5
    assert "\n" not in message
