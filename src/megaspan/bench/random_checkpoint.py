"""The small model of `megaspan bench cpu`: GLM-5.2's architecture with random weights that matter.

Every weight counts in the output: unit-variance activations keep attention and the index scores far
from uniform, so a system that selects, rotates or routes differently gives visibly other logits.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from megaspan.config import ModelConfig
from megaspan.config_json import scheduled_indexer_types
from megaspan.model.checkpoint import expected_tensors

CONFIG = ModelConfig(
    vocab_size=1024, hidden_size=128, intermediate_size=256, moe_intermediate_size=64,
    num_hidden_layers=8, num_attention_heads=4,
    q_lora_rank=64, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32,
    n_routed_experts=8, num_experts_per_tok=2, first_k_dense_replace=1,
    index_n_heads=32, index_head_dim=64, index_topk=64,
    indexer_types=scheduled_indexer_types(8, freq=4, offset=3),
    rope_theta=8e6, max_position_embeddings=1048576, dtype="float32",
    rms_norm_eps=1e-6,  # what transformers uses for the latent norms whatever the config says
)  # fmt: skip


def write_random_checkpoint(folder: Path, config: ModelConfig = CONFIG, seed: int = 0) -> None:
    """Write config.json and one model.safetensors file of `config` with seeded weights."""
    generator = torch.Generator().manual_seed(seed)
    shapes = expected_tensors(config, mtp=False)
    tensors = {name: _draw(name, shape, generator) for name, shape in shapes.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config.to_dict(), indent=2))


def _draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Norm weights near 1, biases small, embeddings of variance 1, matrices that keep the variance."""
    drawn = torch.randn(shape, generator=generator)
    if len(shape) == 1:
        return 0.1 * drawn + ("norm" in name and not name.endswith("bias"))
    return drawn if name == "model.embed_tokens.weight" else drawn * shape[-1] ** -0.5
