"""Bytes of any config: weights, cache rows, and the context that fits on some GPUs. Arithmetic only."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from math import ceil
from typing import Literal

from megaspan.config import ModelConfig

GIB = 2**30
BLOCK = 128  # FP8 weights have a float32 scale per 128 × 128 block, latent rows one per 128 values
Format = Literal["fp8", "bfloat16", "float32"]
FORMATS: tuple[Format, ...] = ("bfloat16", "fp8")  # of the published releases
WIDTHS = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Weight:
    """`copies` equal matrices [rows, columns] of one part of the model; a vector has one row.

    fp8: the FP8 release stores it in scaled blocks. float32: every release keeps it in float32.
    """

    part: str
    rows: int
    columns: int
    copies: int = 1
    fp8: bool = True
    float32: bool = False

    @property
    def parameters(self) -> int:
        return self.rows * self.columns * self.copies

    def nbytes(self, dtype: Format) -> int:
        if self.float32:
            return 4 * self.parameters
        if dtype == "fp8" and self.fp8:
            blocks = ceil(self.rows / BLOCK) * ceil(self.columns / BLOCK)
            return self.parameters + 4 * blocks * self.copies
        return WIDTHS.get(dtype, 2) * self.parameters


def activation_bytes(config: ModelConfig, tokens: int) -> int:
    """Bytes that the states of one forward pass over so many tokens take at most, in float32."""
    heads = config.num_attention_heads * (config.latent_width + config.kv_lora_rank + config.qk_head_dim)
    experts = config.num_experts_per_tok * 3 * config.moe_intermediate_size
    row = heads + 8 * config.hidden_size + max(3 * config.intermediate_size, experts) + config.index_topk
    return 4 * tokens * row


def vector(part: str, width: int) -> Weight:
    return Weight(part, 1, width, fp8=False)


def indexer_weights(config: ModelConfig) -> list[Weight]:
    """The lightning indexer of one full layer."""
    heads, width = config.index_n_heads, config.index_head_dim
    return [
        Weight("indexer", heads * width, config.q_lora_rank),
        Weight("indexer", width, config.hidden_size),
        Weight("indexer", heads, config.hidden_size, fp8=False),
        vector("indexer", width),
        vector("indexer", width),
    ]


def attention_weights(config: ModelConfig) -> list[Weight]:
    """Multi-head latent attention of one layer, without the indexer."""
    heads, hidden = config.num_attention_heads, config.hidden_size
    return [
        Weight("projections", config.q_lora_rank, hidden),
        Weight("projections", heads * config.qk_head_dim, config.q_lora_rank),
        Weight("projections", config.latent_width, hidden),
        Weight("projections", heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank),
        Weight("projections", hidden, heads * config.v_head_dim),
        vector("norms", config.q_lora_rank),
        vector("norms", config.kv_lora_rank),
    ]


def mlp_weights(config: ModelConfig, sparse: bool, active: bool = False) -> list[Weight]:
    """The feed-forward part of one layer; `active` counts only the experts that one token passes through."""
    hidden = config.hidden_size
    if not sparse:
        return _swiglu("dense_mlp", hidden, config.intermediate_size)
    experts = config.num_experts_per_tok if active else config.n_routed_experts
    shared = config.moe_intermediate_size * config.n_shared_experts
    return [
        Weight("moe", config.n_routed_experts, hidden, fp8=False),
        Weight("moe", 1, config.n_routed_experts, fp8=False, float32=True),
        *_swiglu("moe", hidden, config.moe_intermediate_size, experts),
        *_swiglu("moe", hidden, shared),
    ]


def layer_weights(config: ModelConfig, layer: int, active: bool = False) -> list[Weight]:
    sparse = config.mlp_layer_types[layer] == "sparse"
    return [
        vector("norms", config.hidden_size),
        vector("norms", config.hidden_size),
        *attention_weights(config),
        *(indexer_weights(config) if config.is_full(layer) else []),
        *mlp_weights(config, sparse, active),
    ]


def mtp_weights(config: ModelConfig) -> list[Weight]:
    """One multi-token prediction layer: a full sparse layer, and what joins it to the model."""
    hidden = config.hidden_size
    return [
        *(vector("norms", hidden) for _ in range(5)),
        Weight("projections", hidden, 2 * hidden, fp8=False),
        *attention_weights(config),
        *indexer_weights(config),
        *mlp_weights(config, sparse=True),
    ]


def model_weights(config: ModelConfig) -> Iterator[Weight]:
    """Every weight of a checkpoint, multi-token prediction layers included."""
    vocabulary = Weight("head", config.vocab_size, config.hidden_size, fp8=False)
    yield from [vocabulary] if config.tie_word_embeddings else [vocabulary, vocabulary]
    yield vector("norms", config.hidden_size)
    for layer in range(config.num_hidden_layers):
        yield from layer_weights(config, layer)
    for _ in range(config.num_nextn_predict_layers):
        yield from mtp_weights(config)


def parameters(config: ModelConfig) -> int:
    """Parameters of the checkpoint, multi-token prediction layers and router biases included."""
    return sum(weight.parameters for weight in model_weights(config))


def active_parameters(config: ModelConfig) -> int:
    """Parameters that one decoded token passes through: no draft layers, no embedding table, but the head."""
    layers = (layer_weights(config, layer, active=True) for layer in range(config.num_hidden_layers))
    outside = config.vocab_size * config.hidden_size + config.hidden_size
    return outside + sum(weight.parameters for layer in layers for weight in layer)


def weight_bytes(config: ModelConfig, dtype: Format) -> int:
    """Bytes of the checkpoint; "fp8" as in the FP8 release, which leaves some weights in bf16."""
    return sum(weight.nbytes(dtype) for weight in model_weights(config))


def latent_row_bytes(config: ModelConfig, dtype: Format) -> int:
    """One token's latent in one layer. FP8: values, their block scales, and the rotary part in bf16."""
    if dtype == "fp8":
        return config.kv_lora_rank + 4 * ceil(config.kv_lora_rank / BLOCK) + 2 * config.qk_rope_head_dim
    return WIDTHS[dtype] * config.latent_width


def index_row_bytes(config: ModelConfig, dtype: Format) -> int:
    """One token's index key in one full layer. FP8: values and one float32 scale."""
    return config.index_head_dim + 4 if dtype == "fp8" else WIDTHS[dtype] * config.index_head_dim


def cache_bytes_per_token(
    config: ModelConfig, latent_dtype: Format = "fp8", index_dtype: Format | None = None, mtp: bool = True
) -> int:
    """Cached bytes per token over all layers; shared layers have no index keys.

    index_dtype: as latent_dtype unless given. mtp: count the multi-token prediction layers, which have
    both kinds of row.
    """
    extra = config.num_nextn_predict_layers if mtp else 0
    latents = (config.num_hidden_layers + extra) * latent_row_bytes(config, latent_dtype)
    indexes = (len(config.full_layers) + extra) * index_row_bytes(config, index_dtype or latent_dtype)
    return latents + indexes


def owned_layers(layers: int, ranks: int) -> list[range]:
    """LayerSplit's ownership: contiguous blocks, the first `layers % ranks` ranks have one layer more."""
    size, larger = divmod(layers, ranks)
    starts = [rank * size + min(rank, larger) for rank in range(ranks + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def split_bytes_per_token(config: ModelConfig, ranks: int, dtype: Format) -> int:
    """Cached bytes per token on the fullest of `ranks` GPUs under LayerSplit.

    A rank holds the rows of its own layers, one scratch layer for latents and one for index keys that
    receive what others broadcast, and all rows of the multi-token prediction layers.
    """
    latent, index = latent_row_bytes(config, dtype), index_row_bytes(config, dtype)
    owned = [
        len(block) * latent + sum(config.is_full(layer) for layer in block) * index
        for block in owned_layers(config.num_hidden_layers, ranks)
    ]
    return max(owned) + (1 + config.num_nextn_predict_layers) * (latent + index)


@dataclass(frozen=True)
class Fit:
    """What one choice of formats leaves for context on each GPU."""

    weights: Format
    cache: Format
    layer_split: bool
    free_bytes: int
    bytes_per_token: int
    context: int
    max_position_embeddings: int

    @property
    def tokens(self) -> int:
        """Tokens of all sequences together that fit."""
        return max(self.free_bytes, 0) // self.bytes_per_token

    @property
    def largest_context(self) -> int:
        return min(self.tokens, self.max_position_embeddings)

    @property
    def sequences(self) -> int:
        """Sequences of the asked context that fit at once."""
        return self.tokens // self.context


def fits(config: ModelConfig, context: int, gpus: int, gpu_gib: float, reserve: float) -> list[Fit]:
    """What fits on `gpus` GPUs: weights sharded evenly, cache rows on every GPU or split by layer.

    reserve: the share of a GPU's memory that is kept for activations and the rest.
    """
    usable = int(gpu_gib * (1 - reserve) * GIB)
    found = []
    for weights, cache, layer_split in product(FORMATS, FORMATS, (False, True)):
        free = usable - ceil(weight_bytes(config, weights) / gpus)
        split = split_bytes_per_token(config, gpus, cache)
        per_token = split if layer_split else cache_bytes_per_token(config, cache)
        longest = config.max_position_embeddings
        found.append(Fit(weights, cache, layer_split, free, per_token, context, longest))
    return found


def _swiglu(part: str, hidden: int, inner: int, copies: int = 1) -> list[Weight]:
    return [Weight(part, inner, hidden, 2 * copies), Weight(part, hidden, inner, copies)]
