"""FLOPs of any config at any position. Arithmetic only.

Counted are the matrix products of our forward pass, a multiply-add as 2 FLOPs; norms, rotations,
softmax, top-k and the embedding lookup are not. Attention is in its absorbed form, so a query meets
min(index_topk, visible) latent rows. A token at position p sees p + 1 positions, itself included.
"""

from dataclasses import dataclass

from megaspan.config import ModelConfig

PARTS = ("projections", "attention", "indexer", "moe", "dense_mlp", "head")


@dataclass(frozen=True)
class Schedule:
    """How many layers index. `full_layers` may be a fraction; dense: none does, and attention sees all."""

    full_layers: float
    dense: bool = False

    @classmethod
    def published(cls, config: ModelConfig) -> "Schedule":
        return cls(len(config.full_layers))

    @classmethod
    def all_full(cls, config: ModelConfig) -> "Schedule":
        return cls(config.num_hidden_layers)

    @classmethod
    def quarter(cls, config: ModelConfig) -> "Schedule":
        """Exactly one layer of four, whatever the config says."""
        quarter = config.num_hidden_layers / 4
        return cls(int(quarter) if quarter.is_integer() else quarter)


DENSE = Schedule(0, dense=True)


def index_flops(config: ModelConfig, visible: int) -> int:
    """Products of one full layer's index queries with `visible` index keys.

    The weighted sum over the index heads, `index_head_dim` times less, is counted by `prefill_flops`.
    """
    return 2 * config.index_n_heads * config.index_head_dim * visible


def flops_per_token(config: ModelConfig, position: int, schedule: Schedule | None = None) -> dict[str, float]:
    """FLOPs by part for the token at `position` (from 0), its logits included."""
    return prefill_flops(config, position, position + 1, schedule)


def prefill_flops(
    config: ModelConfig, start: int, stop: int, schedule: Schedule | None = None, logits: int = 1
) -> dict[str, float]:
    """FLOPs by part for the tokens at positions start..stop-1, summed exactly.

    logits: how many of the tokens go through the head. schedule: the config's own unless given.
    Dense attention is counted in the cheaper of its absorbed and expanded forms.
    """
    schedule = schedule or Schedule.published(config)
    tokens, layers = stop - start, config.num_hidden_layers
    heads, hidden = config.num_attention_heads, config.hidden_size
    visible = _visible(stop) - _visible(start)
    absorbed = config.latent_width + config.kv_lora_rank
    attended = _visible(stop, config.index_topk) - _visible(start, config.index_topk)
    if schedule.dense:
        absorbed = min(absorbed, config.qk_head_dim + config.v_head_dim)
        attended = visible
    sparse = config.mlp_layer_types.count("sparse")
    return {
        "projections": 2 * tokens * layers * _projections(config),
        "attention": 2 * heads * absorbed * attended * layers,
        "indexer": schedule.full_layers * _indexer(config, tokens, visible),
        "moe": 2 * tokens * sparse * _moe(config),
        "dense_mlp": 2 * tokens * (layers - sparse) * 3 * hidden * config.intermediate_size,
        "head": 2 * logits * hidden * config.vocab_size,
    }


def _visible(stop: int, most: int | None = None) -> int:
    """Σ min(most, p + 1) for p < stop."""
    if most is None or stop <= most:
        return stop * (stop + 1) // 2
    return most * (most + 1) // 2 + (stop - most) * most


def _projections(config: ModelConfig) -> int:
    """Multiply-adds of one token in one layer. kv_b_proj absorbs queries and expands values."""
    heads, hidden = config.num_attention_heads, config.hidden_size
    return (
        hidden * config.q_lora_rank
        + config.q_lora_rank * heads * config.qk_head_dim
        + hidden * config.latent_width
        + config.kv_lora_rank * heads * (config.qk_nope_head_dim + config.v_head_dim)
        + heads * config.v_head_dim * hidden
    )


def _indexer(config: ModelConfig, tokens: int, visible: int) -> int:
    """FLOPs of one full layer: its projections, the products with the keys, the weighted sum over heads."""
    heads, width = config.index_n_heads, config.index_head_dim
    projections = config.q_lora_rank * heads * width + config.hidden_size * (width + heads)
    return 2 * tokens * projections + index_flops(config, visible) + 2 * heads * visible


def _moe(config: ModelConfig) -> int:
    """Multiply-adds of one token in one sparse layer: router, chosen experts, shared expert."""
    expert = 3 * config.hidden_size * config.moe_intermediate_size
    experts = config.num_experts_per_tok + config.n_shared_experts
    return config.hidden_size * config.n_routed_experts + experts * expert
