"""Random inputs that many tests share."""

from hypothesis import strategies as st

from megaspan.config import ModelConfig


@st.composite
def indexer_types(draw: st.DrawFn, layers: int) -> tuple[str, ...]:
    """Full and shared layers in any order that begins with a full one."""
    kinds = st.sampled_from(["full", "shared"])
    return ("full", *draw(st.lists(kinds, min_size=layers - 1, max_size=layers - 1)))


@st.composite
def configs(draw: st.DrawFn, **fixed: object) -> ModelConfig:
    """Small valid configs of 1 to 6 layers, every width drawn apart from the others; `fixed` sets fields."""
    layers = fixed.get("num_hidden_layers") or draw(st.integers(1, 6))
    assert isinstance(layers, int)
    rope = draw(st.sampled_from([2, 4, 8]))
    experts = draw(st.integers(1, 6))
    values = dict(
        vocab_size=draw(st.integers(11, 67)),
        hidden_size=draw(st.sampled_from([16, 24, 32])),
        intermediate_size=draw(st.sampled_from([16, 40])),
        moe_intermediate_size=draw(st.sampled_from([8, 24])),
        num_hidden_layers=layers,
        num_nextn_predict_layers=draw(st.integers(0, 1)),
        num_attention_heads=draw(st.integers(1, 4)),
        q_lora_rank=draw(st.sampled_from([8, 12])),
        kv_lora_rank=draw(st.sampled_from([8, 15, 16, 20])),
        qk_nope_head_dim=draw(st.sampled_from([4, 7, 12])),
        qk_rope_head_dim=rope,
        v_head_dim=draw(st.sampled_from([4, 10])),
        n_routed_experts=experts,
        num_experts_per_tok=draw(st.integers(1, experts)),
        n_shared_experts=draw(st.integers(1, 2)),
        first_k_dense_replace=draw(st.integers(0, layers)),
        routed_scaling_factor=draw(st.sampled_from([1.0, 2.5])),
        norm_topk_prob=draw(st.booleans()),
        index_n_heads=draw(st.sampled_from([1, 2, 5])),
        index_head_dim=rope + draw(st.sampled_from([0, 2, 8])),
        index_topk=draw(st.integers(1, 9)),
        indexer_types=draw(indexer_types(layers)),
        rope_theta=draw(st.sampled_from([1e4, 8e6])),
        max_position_embeddings=1024,
        initializer_range=0.1,
        dtype="float32",
    )
    return ModelConfig(**{**values, **fixed})
