"""Write a checkpoint as the GGUF file that llama.cpp reads (architecture glm-dsa), float32, no vocabulary.

Tensor and key names are llama.cpp's. Only what the benchmark needs: no tokenizer, no MTP layer.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from megaspan.config import ModelConfig

SIGMOID_GATE = 2
LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_a_proj.weight": "attn_q_a.weight",
    "self_attn.q_a_layernorm.weight": "attn_q_a_norm.weight",
    "self_attn.q_b_proj.weight": "attn_q_b.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
    "self_attn.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.indexer.wq_b.weight": "indexer.attn_q_b.weight",
    "self_attn.indexer.wk.weight": "indexer.attn_k.weight",
    "self_attn.indexer.weights_proj.weight": "indexer.proj.weight",
    "self_attn.indexer.k_norm.weight": "indexer.k_norm.weight",
    "self_attn.indexer.k_norm.bias": "indexer.k_norm.bias",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.shared_experts.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_experts.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_experts.down_proj.weight": "ffn_down_shexp.weight",
}


def write_gguf(checkpoint: Path, path: Path) -> None:
    """Convert the one-file safetensors checkpoint in the folder `checkpoint`."""
    from gguf import GGUFWriter  # pyright: ignore[reportMissingImports]
    from safetensors.torch import load_file

    config = ModelConfig.from_json(checkpoint)
    writer = GGUFWriter(path, "glm-dsa")
    writer.add_tokenizer_model("no_vocab")
    for key, value in _settings(config).items():
        if isinstance(value, bool):
            writer.add_bool(f"glm-dsa.{key}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"glm-dsa.{key}", value)
        elif isinstance(value, float):
            writer.add_float32(f"glm-dsa.{key}", value)
        else:
            writer.add_array(f"glm-dsa.{key}", value)
    for name, tensor in llama_tensors(config, load_file(checkpoint / "model.safetensors")):
        writer.add_tensor(name, tensor.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _settings(config: ModelConfig) -> dict[str, int | float | bool | list[int]]:
    return {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": 1,  # absorbed MLA: every head reads the one latent row
        "attention.key_length": config.latent_width,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.indexer.head_count": config.index_n_heads,
        "attention.indexer.key_length": config.index_head_dim,
        "attention.indexer.top_k": config.index_topk,
        "attention.indexer.types": [int(kind == "full") for kind in config.indexer_types],
        "rope.dimension_count": config.qk_rope_head_dim,
        "rope.freq_base": float(config.rope_theta),
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_shared_count": config.n_shared_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_weights_norm": config.norm_topk_prob,
        "expert_gating_func": SIGMOID_GATE,
    }


def llama_tensors(config: ModelConfig, weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """llama.cpp's name and value of every tensor."""
    yield "token_embd.weight", weights["model.embed_tokens.weight"]
    yield "output_norm.weight", weights["model.norm.weight"]
    yield "output.weight", weights["lm_head.weight"]
    for layer in range(config.num_hidden_layers):
        prefix, block = f"model.layers.{layer}.", f"blk.{layer}."
        for name, llama_name in LAYER_NAMES.items():
            if prefix + name in weights:
                yield block + llama_name, weights[prefix + name]
        key_value = weights[prefix + "self_attn.kv_b_proj.weight"].view(
            config.num_attention_heads, config.qk_nope_head_dim + config.v_head_dim, config.kv_lora_rank
        )
        key, value = key_value.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
        yield block + "attn_k_b.weight", key.transpose(1, 2)
        yield block + "attn_v_b.weight", value
        if config.mlp_layer_types[layer] == "sparse":
            for part in ("gate", "up", "down"):
                experts = [
                    weights[f"{prefix}mlp.experts.{expert}.{part}_proj.weight"]
                    for expert in range(config.n_routed_experts)
                ]
                yield f"{block}ffn_{part}_exps.weight", torch.stack(experts)
