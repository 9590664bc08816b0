import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaspan.config import PRESETS, ModelConfig
from megaspan.config_json import schedule_of, scheduled_indexer_types
from megaspan.errors import UserError
from tests.strategies import configs, indexer_types

PUBLISHED_FULL = (0, 1, 2, 6, 10, 14, 18, 22, 26, 30, 34, 38, 42, 46, 50, 54, 58, 62, 66, 70, 74)
# The config.json of the released GLM-5.2.
PUBLISHED = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "eos_token_id": [154820, 154827, 154829],
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "head_dim": 192,
    "hidden_act": "silu",
    "hidden_size": 6144,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_share_for_mtp_iteration": True,
    "index_skip_topk_offset": 3,
    "index_topk": 2048,
    "index_topk_freq": 4,
    "index_topk_pattern": None,
    "indexer_rope_interleave": True,
    "indexer_types": ["full" if layer in PUBLISHED_FULL else "shared" for layer in range(78)],
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "kv_lora_rank": 512,
    "max_position_embeddings": 1048576,
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 75,
    "model_type": "glm_moe_dsa",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "moe_router_dtype": "float32",
    "n_group": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 78,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 154820,
    "pretraining_tp": 1,
    "q_lora_rank": 2048,
    "qk_head_dim": 256,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "transformers_version": "5.12.0",
    "use_cache": True,
    "v_head_dim": 256,
    "vocab_size": 154880,
}


def debug_file(**changes: Any) -> dict[str, Any]:
    return {**ModelConfig.preset("debug").to_dict(), **changes}


def by_schedule(**keys: Any) -> dict[str, Any]:
    """The debug file without any sharing keys but `keys`."""
    file = debug_file()
    for key in ("indexer_types", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset"):
        del file[key]
    return {**file, **keys}


def test_the_published_file_and_the_preset_are_the_same() -> None:
    assert ModelConfig.from_json(PUBLISHED) == ModelConfig.preset("glm-5.2")
    assert json.dumps(ModelConfig.preset("glm-5.2").to_dict(), sort_keys=True) == json.dumps(
        PUBLISHED, sort_keys=True
    )


def test_published_schedule() -> None:
    """P02: 21 full layers, not the 20 of a schedule that is off by one."""
    config = ModelConfig.preset("glm-5.2")
    assert config.full_layers == PUBLISHED_FULL
    assert [layer for layer in range(78) if config.is_full(layer)] == list(PUBLISHED_FULL)
    assert (config.qk_head_dim, config.latent_width) == (256, 576)


def test_preset_schedules() -> None:
    assert ModelConfig.preset("debug").full_layers == (0, 1, 2, 6)
    assert ModelConfig.preset("span-code").full_layers == (0, 1, 2, 6, 10)


@given(configs())
def test_round_trip(config: ModelConfig) -> None:
    assert ModelConfig.from_json(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("keys", "full"),
    [
        ({}, range(9)),
        ({"index_topk_freq": None}, range(9)),
        ({"index_topk_freq": 0}, range(9)),
        ({"index_topk_freq": 1, "index_skip_topk_offset": 0}, range(9)),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, [0, 1, 2, 6]),
        ({"index_topk_freq": 4}, [0, 1, 5]),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 1}, [0, 4, 8]),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 3}, [0, 1, 2, 4, 6, 8]),
        ({"index_topk_pattern": "FSSFSSFSS"}, [0, 3, 6]),
        ({"index_topk_pattern": ["full"] * 2 + ["shared"] * 7}, [0, 1]),
        ({"index_topk_pattern": "FSSFSSFSS", "index_topk_freq": 4}, [0, 3, 6]),
        ({"indexer_types": ["full"] + ["shared"] * 8, "index_topk_pattern": "FFFFFFFFF"}, [0]),
        ({"indexer_types": ["full"] + ["shared"] * 8, "index_topk_freq": 4}, [0]),
        ({"indexer_types": None, "index_topk_freq": 4, "index_skip_topk_offset": 3}, [0, 1, 2, 6]),
    ],
)
def test_sharing_keys(keys: dict[str, Any], full: Any) -> None:
    """P02: the list beats the pattern, which beats the schedule; no frequency means no sharing."""
    assert ModelConfig.from_json(by_schedule(**keys)).full_layers == tuple(full)


@given(st.integers(1, 12).flatmap(indexer_types))
def test_a_written_schedule_is_the_one_it_came_from(types: tuple[str, ...]) -> None:
    schedule = schedule_of(types)
    if schedule is not None:
        assert scheduled_indexer_types(len(types), *schedule) == types


@given(st.integers(1, 12), st.integers(1, 14), st.integers(0, 14))
def test_every_schedule_is_recognised(layers: int, freq: int, offset: int) -> None:
    types = scheduled_indexer_types(layers, freq, offset)
    if types[0] == "full":
        assert schedule_of(types) is not None


def test_head_dim_changes_nothing() -> None:
    for head_dim in (8, 192, None):
        assert ModelConfig.from_json(debug_file(head_dim=head_dim)) == ModelConfig.preset("debug")


def test_older_keys() -> None:
    file = debug_file(rope_theta=5000, torch_dtype="float32")
    for key in ("rope_parameters", "dtype", "mlp_layer_types"):
        del file[key]
    config = ModelConfig.from_json(file)
    assert config == ModelConfig.preset("debug").replace(rope_theta=5000.0)
    assert isinstance(config.rope_theta, float)


def test_dense_layers_anywhere() -> None:
    types = ["dense", "sparse", "dense"] + ["sparse"] * 6
    config = ModelConfig.from_json(debug_file(mlp_layer_types=types, first_k_dense_replace=3))
    assert (config.mlp_layer_types, config.first_k_dense_replace) == (tuple(types), 1)


@pytest.mark.parametrize("eos", [5, [5], (5,)])
def test_eos(eos: Any) -> None:
    file = debug_file(eos_token_id=list(eos) if isinstance(eos, tuple) else eos)
    assert ModelConfig.from_json(file).eos_token_id == (5,)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "llama"}, "llama"),
        ({"model_type": None}, "model_type"),
        ({"indexer_types": ["shared"] + ["full"] * 8}, "first layer"),
        ({"indexer_types": ["full"] * 8}, "indexer_types has 8"),
        ({"indexer_types": ["full"] * 8 + ["half"]}, "half"),
        ({"indexer_types": "full"}, "indexer_types"),
        ({"indexer_types": None, "index_topk_pattern": "FSX"}, "index_topk_pattern"),
        ({"indexer_types": None, "index_topk_freq": "4"}, "index_topk_freq"),
        ({"indexer_types": None, "index_topk_freq": 4, "index_skip_topk_offset": 0}, "first layer"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn"}}, "yarn"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "linear"),
        ({"rope_parameters": None}, "rope_theta"),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_theta"),
        ({"rope_interleave": False}, "rope_interleave"),
        ({"indexer_rope_interleave": False}, "indexer_rope_interleave"),
        ({"n_group": 2}, "n_group"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"num_key_value_heads": 1}, "num_key_value_heads"),
        ({"index_head_dim": 4}, "index_head_dim"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": 6.5}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"norm_topk_prob": 1}, "norm_topk_prob"),
        ({"dtype": "float16"}, "dtype"),
        ({"eos_token_id": [97]}, "eos_token_id"),
        ({"pad_token_id": -1}, "pad_token_id"),
        ({"eos_token_id": "end"}, "eos_token_id"),
    ],
)
def test_bad_settings_are_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named) as raised:
        ModelConfig.from_json(debug_file(**changes))
    assert "\n" not in str(raised.value)


def test_bad_construction_is_named() -> None:
    debug = ModelConfig.preset("debug")
    with pytest.raises(UserError, match="first_k_dense_replace"):
        debug.replace(first_k_dense_replace=2)
    with pytest.raises(UserError, match="indexer_types"):
        debug.replace(num_hidden_layers=8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        debug.hidden_size = 1  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(UserError, match=r"glm-5\.2, debug, span-code"):
        ModelConfig.preset("glm-4")


@pytest.mark.parametrize("content", ["{", "[]", "", '"debug"', "\ud800"])
def test_bad_files(tmp_path: Any, content: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(UserError, match=r"config\.json"):
        ModelConfig.from_json(path)


def test_names_and_paths(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(debug_file()))
    debug = ModelConfig.preset("debug")
    for source in ("debug", str(tmp_path), tmp_path / "config.json"):
        assert ModelConfig.named(source) == debug
    with pytest.raises(UserError, match="glm-9"):
        ModelConfig.named("glm-9")
    with pytest.raises(UserError, match="cannot read"):
        ModelConfig.from_json(tmp_path / "missing.json")


@pytest.mark.parametrize("name", PRESETS)
def test_transformers_reads_what_we_write(name: str) -> None:
    check_against_transformers(ModelConfig.preset(name))


@settings(max_examples=20)
@given(configs())
def test_transformers_reads_random_configs(config: ModelConfig) -> None:
    check_against_transformers(config)


def check_against_transformers(config: ModelConfig) -> None:
    """transformers' view equals ours, with our list of layers and with the schedule alone; and comes back."""
    transformers = pytest.importorskip("transformers")
    file = config.to_dict()
    theirs = transformers.GlmMoeDsaConfig(**file)
    renamed = {"rope_theta", "eos_token_id", "dtype"}
    for field in dataclasses.fields(config):
        if field.name not in renamed:
            ours, their = getattr(config, field.name), getattr(theirs, field.name)
            assert their == (list(ours) if isinstance(ours, tuple) else ours), field.name
    assert theirs.rope_parameters["rope_theta"] == config.rope_theta
    assert ModelConfig.from_json(theirs.to_dict()) == config
    del file["indexer_types"]
    if file["index_topk_freq"] is None:
        del file["index_topk_freq"], file["index_skip_topk_offset"]
    assert tuple(transformers.GlmMoeDsaConfig(**file).indexer_types) == config.indexer_types
