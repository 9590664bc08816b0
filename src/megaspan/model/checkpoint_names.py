"""Names and shapes of a `glm_moe_dsa` checkpoint, on disk and in memory, and where the two meet.

They differ in the experts alone: a file holds each projection of each expert for itself, the model all
experts of a layer stacked, with gate and up projection in one tensor.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megaspan.config import ModelConfig

Shape = tuple[int, ...]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# Modules that the FP8 release leaves unquantised, besides every tensor that is not a matrix.
NEVER_FP8 = ("embed_tokens", "lm_head", "mlp.gate", "indexer.weights_proj", "eh_proj")


@dataclass(frozen=True)
class Piece:
    """One tensor of a file: `memory[name][index]` is its place in the model."""

    shape: Shape
    name: str
    index: tuple[int | slice, ...] = ()


def expected_tensors(config: ModelConfig, mtp: bool = True) -> dict[str, Shape]:
    """Names on disk and shapes of all weights of `config`, in file order, without FP8 scales.

    mtp: include the multi-token prediction layers that the config has, numbered after the others.
    Embedding and head are shared with them, and a tied head is not stored.
    """
    return {name: piece.shape for name, piece in disk_pieces(config, mtp).items()}


def memory_tensors(config: ModelConfig, mtp: bool = True) -> dict[str, Shape]:
    """Names and shapes of the model's parameters and buffers. A tied head is left out."""
    hidden = config.hidden_size
    tensors: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for i, mlp_type in enumerate(config.mlp_layer_types):
        layer = _layer_tensors(config, full=config.is_full(i), sparse=mlp_type == "sparse")
        tensors |= {f"model.layers.{i}.{name}": shape for name, shape in layer}
    for i in range(config.num_nextn_predict_layers if mtp else 0):
        prefix = mtp_prefix(config, i)
        tensors |= {prefix + name: shape for name, shape in _layer_tensors(config, full=True, sparse=True)}
        tensors[f"{prefix}eh_proj.weight"] = (hidden, 2 * hidden)
        tensors |= {f"{prefix}{norm}.weight": (hidden,) for norm in ("enorm", "hnorm", "shared_head.norm")}
    tensors["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = (config.vocab_size, hidden)
    return tensors


def mtp_prefix(config: ModelConfig, index: int = 0) -> str:
    """What the names of multi-token prediction layer `index` begin with."""
    return f"model.layers.{config.num_hidden_layers + index}."


def has_mtp(names: Iterable[str], config: ModelConfig) -> bool:
    """Whether the names hold a multi-token prediction layer, which only eh_proj tells from another layer."""
    return f"{mtp_prefix(config)}eh_proj.weight" in names


def disk_pieces(config: ModelConfig, mtp: bool = True) -> dict[str, Piece]:
    """The tensors of the files by their names on disk, each with its place in memory."""
    return {
        disk_name: piece
        for name, shape in memory_tensors(config, mtp).items()
        for disk_name, piece in _pieces_of(name, shape)
    }


def stays_float32(name: str) -> bool:
    """Whether a tensor is float32 in memory whatever the model's dtype: the router and its bias."""
    return name.endswith((".mlp.gate.weight", ".mlp.gate.e_score_correction_bias"))


def becomes_fp8(name: str, shape: Shape) -> bool:
    """Whether the FP8 release quantises the tensor of this name on disk."""
    return len(shape) == 2 and not name.removesuffix(".weight").endswith(NEVER_FP8)


def _layer_tensors(config: ModelConfig, full: bool, sparse: bool) -> Iterator[tuple[str, Shape]]:
    hidden, heads = config.hidden_size, config.num_attention_heads
    yield "input_layernorm.weight", (hidden,)
    yield "self_attn.q_a_proj.weight", (config.q_lora_rank, hidden)
    yield "self_attn.q_a_layernorm.weight", (config.q_lora_rank,)
    yield "self_attn.q_b_proj.weight", (heads * config.qk_head_dim, config.q_lora_rank)
    yield "self_attn.kv_a_proj_with_mqa.weight", (config.latent_width, hidden)
    yield "self_attn.kv_a_layernorm.weight", (config.kv_lora_rank,)
    keys_and_values = heads * (config.qk_nope_head_dim + config.v_head_dim)
    yield "self_attn.kv_b_proj.weight", (keys_and_values, config.kv_lora_rank)
    yield "self_attn.o_proj.weight", (hidden, heads * config.v_head_dim)
    if full:
        index_queries = config.index_n_heads * config.index_head_dim
        yield "self_attn.indexer.wq_b.weight", (index_queries, config.q_lora_rank)
        yield "self_attn.indexer.wk.weight", (config.index_head_dim, hidden)
        yield "self_attn.indexer.k_norm.weight", (config.index_head_dim,)
        yield "self_attn.indexer.k_norm.bias", (config.index_head_dim,)
        yield "self_attn.indexer.weights_proj.weight", (config.index_n_heads, hidden)
    yield "post_attention_layernorm.weight", (hidden,)
    if not sparse:
        yield from _mlp_tensors("mlp", hidden, config.intermediate_size)
        return
    experts, inner = config.n_routed_experts, config.moe_intermediate_size
    yield "mlp.gate.weight", (experts, hidden)
    yield "mlp.gate.e_score_correction_bias", (experts,)
    yield "mlp.experts.gate_up_proj", (experts, 2 * inner, hidden)
    yield "mlp.experts.down_proj", (experts, hidden, inner)
    yield from _mlp_tensors("mlp.shared_experts", hidden, inner * config.n_shared_experts)


def _mlp_tensors(prefix: str, hidden: int, inner: int) -> Iterator[tuple[str, Shape]]:
    yield f"{prefix}.gate_proj.weight", (inner, hidden)
    yield f"{prefix}.up_proj.weight", (inner, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, inner)


def _pieces_of(name: str, shape: Shape) -> Iterator[tuple[str, Piece]]:
    experts = name.removesuffix("gate_up_proj").removesuffix("down_proj")
    if not experts.endswith(".experts."):
        yield name, Piece(shape, name)
        return
    count, rows, columns = shape
    for expert in range(count):
        if name.endswith("down_proj"):
            yield f"{experts}{expert}.down_proj.weight", Piece((rows, columns), name, (expert,))
            continue
        for start, half in ((0, "gate"), (rows // 2, "up")):
            index = (expert, slice(start, start + rows // 2))
            yield f"{experts}{expert}.{half}_proj.weight", Piece((rows // 2, columns), name, index)
