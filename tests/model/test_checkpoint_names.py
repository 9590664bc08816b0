"""Checkpoint names: the published counts, and no element of memory left out or filled twice."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megaspan.config import ModelConfig
from megaspan.model.checkpoint_names import becomes_fp8, disk_pieces, expected_tensors, memory_tensors
from tests.strategies import configs

DEBUG = ModelConfig.preset("debug")


def test_glm_5_2_has_the_published_parameter_counts() -> None:
    config = ModelConfig.preset("glm-5.2")
    sizes = {name: math.prod(shape) for name, shape in expected_tensors(config).items()}
    assert sum(sizes.values()) == 753_329_940_480
    assert sum(size for name, size in sizes.items() if name.startswith("model.layers.78.")) == 9_952_920_576
    assert sum(size for name, size in sizes.items() if name.endswith("e_score_correction_bias")) == 19_456
    assert sum(name.endswith("indexer.wk.weight") for name in sizes) == 22
    assert "model.layers.3.self_attn.indexer.wk.weight" not in sizes
    backbone = expected_tensors(config, mtp=False)
    assert sum(math.prod(shape) for shape in backbone.values()) == 743_377_019_904


@settings(max_examples=20)
@given(config=configs(), mtp=st.booleans())
def test_pieces_tile_the_memory(config: ModelConfig, mtp: bool) -> None:
    covered = {name: torch.zeros(shape) for name, shape in memory_tensors(config, mtp).items()}
    for name, piece in disk_pieces(config, mtp).items():
        place = covered[piece.name][piece.index]
        assert place.shape == piece.shape, name
        place += 1
    assert all((tensor == 1).all() for tensor in covered.values())


def test_what_the_release_keeps_out_of_fp8() -> None:
    kept = {name for name, shape in expected_tensors(DEBUG).items() if not becomes_fp8(name, shape)}
    layer = {name.removeprefix("model.layers.9.") for name in kept if name.startswith("model.layers.9.")}
    assert layer == {
        "input_layernorm.weight", "post_attention_layernorm.weight",
        "self_attn.q_a_layernorm.weight", "self_attn.kv_a_layernorm.weight",
        "self_attn.indexer.weights_proj.weight",
        "self_attn.indexer.k_norm.weight", "self_attn.indexer.k_norm.bias",
        "mlp.gate.weight", "mlp.gate.e_score_correction_bias",
        "eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight",
    }  # fmt: skip
    outside = {name for name in kept if ".layers." not in name}
    assert outside == {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
