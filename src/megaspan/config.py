"""The shape of a model: one checked dataclass, and the presets."""

import math
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

from megaspan.config_json import (
    field_values,
    leading_dense,
    read_object,
    require,
    require_count,
    scheduled_indexer_types,
    written_object,
)
from megaspan.errors import UserError


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and settings of a GLM-5.2 architecture model, under their Hugging Face names.

    Checked on construction: a UserError names the field that is wrong. `indexer_types` says per layer
    whether it selects positions itself ("full") or takes the selection of the layer before ("shared");
    `mlp_layer_types` says "dense" or "sparse" (mixture of experts).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_nextn_predict_layers: int = 0
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int = 1
    first_k_dense_replace: int
    routed_scaling_factor: float = 2.5
    norm_topk_prob: bool = True
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    indexer_types: tuple[str, ...]
    mlp_layer_types: tuple[str, ...] = ()
    rope_theta: float
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    eos_token_id: tuple[int, ...] = ()
    pad_token_id: int | None = None
    dtype: str = "bfloat16"
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        if not self.mlp_layer_types:
            require_count("num_hidden_layers", self.num_hidden_layers, least=1)
            require_count("first_k_dense_replace", self.first_k_dense_replace, least=0)
            dense = min(self.first_k_dense_replace, self.num_hidden_layers)
            types = ("dense",) * dense + ("sparse",) * (self.num_hidden_layers - dense)
            object.__setattr__(self, "mlp_layer_types", types)
        self._check_fields()
        self._check_layers()
        self._check_sizes()

    def _check_fields(self) -> None:
        may_be_zero = ("num_nextn_predict_layers", "first_k_dense_replace")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is int:
                require_count(field.name, value, least=0 if field.name in may_be_zero else 1)
            elif field.type is float:
                number = isinstance(value, int | float) and not isinstance(value, bool)
                require(
                    number and math.isfinite(value) and value > 0,
                    field.name,
                    f"must be a number above 0, not {value!r}",
                )
            elif field.type is bool:
                require(isinstance(value, bool), field.name, f"must be true or false, not {value!r}")
        known = self.dtype in ("bfloat16", "float32")
        require(known, "dtype", f"must be bfloat16 or float32, not {self.dtype!r}")
        _require_tuple("eos_token_id", self.eos_token_id)
        pad = () if self.pad_token_id is None else (self.pad_token_id,)
        for name, ids in (("eos_token_id", self.eos_token_id), ("pad_token_id", pad)):
            for token_id in ids:
                require_count(name, token_id, least=0)
                inside = token_id < self.vocab_size
                require(inside, name, f"holds {token_id}, outside the vocabulary of {self.vocab_size}")

    def _check_layers(self) -> None:
        for name, kinds in (("indexer_types", ("full", "shared")), ("mlp_layer_types", ("dense", "sparse"))):
            types = getattr(self, name)
            _require_tuple(name, types)
            require(
                len(types) == self.num_hidden_layers,
                name,
                f"has {len(types)} entries for {self.num_hidden_layers} layers",
            )
            wrong = [kind for kind in types if kind not in kinds]
            require(not wrong, name, f"must hold only {kinds[0]!r} and {kinds[1]!r}, not {wrong[:1]}")
        require(
            self.indexer_types[0] == "full",
            "indexer_types",
            "makes the first layer shared, but no layer before it has a selection to share",
        )
        dense = leading_dense(self.mlp_layer_types)
        require(
            min(self.first_k_dense_replace, self.num_hidden_layers) == dense,
            "first_k_dense_replace",
            f"is {self.first_k_dense_replace}, but mlp_layer_types begins with {dense} dense layers",
        )

    def _check_sizes(self) -> None:
        require(
            self.qk_rope_head_dim % 2 == 0,
            "qk_rope_head_dim",
            f"must be even, since positions rotate pairs, not {self.qk_rope_head_dim}",
        )
        require(
            self.index_head_dim >= self.qk_rope_head_dim,
            "index_head_dim",
            f"is {self.index_head_dim}, too small to hold the {self.qk_rope_head_dim} rotary dimensions",
        )
        require(
            self.num_experts_per_tok <= self.n_routed_experts,
            "num_experts_per_tok",
            f"is {self.num_experts_per_tok}, more than the {self.n_routed_experts} experts",
        )

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or key head before absorption."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_width(self) -> int:
        """Width of a cached latent row: the compressed keys and values, then the rotated key part."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Indices of the layers that run their own indexer."""
        return tuple(i for i, kind in enumerate(self.indexer_types) if kind == "full")

    def is_full(self, layer: int) -> bool:
        return self.indexer_types[layer] == "full"

    def replace(self, **changes: Any) -> "ModelConfig":
        """A copy with some fields changed, checked again."""
        return replace(self, **changes)

    @classmethod
    def preset(cls, name: str) -> "ModelConfig":
        """One of the configurations that come with the package; a UserError lists them."""
        if name not in PRESETS:
            raise UserError(f"there is no preset {name!r}; there are {', '.join(PRESETS)}")
        return cls(**PRESETS[name])

    @classmethod
    def named(cls, name_or_path: str | Path) -> "ModelConfig":
        """A preset by its name, or else a config.json (or the folder that holds it)."""
        if str(name_or_path) in PRESETS:
            return cls.preset(str(name_or_path))
        if not Path(name_or_path).exists():
            raise UserError(f"{name_or_path} is neither a file nor a preset ({', '.join(PRESETS)})")
        return cls.from_json(name_or_path)

    @classmethod
    def from_json(cls, source: str | Path | dict[str, Any]) -> "ModelConfig":
        """Read a config.json, the folder that holds one, or its parsed content.

        Keys that mean nothing here are ignored; a setting that would need other code is a UserError.
        """
        content = source if isinstance(source, dict) else read_object(Path(source))
        values = field_values(content, {field.name: field.type for field in fields(cls)})
        required = [field.name for field in fields(cls) if field.default is MISSING]
        missing = [name for name in required if name not in values]
        require(not missing, ", ".join(missing), "missing from config.json")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """The config.json of this model, with the keys of the published GLM-5.2 file."""
        return written_object({field.name: getattr(self, field.name) for field in fields(self)})


def _require_tuple(name: str, value: Any) -> None:
    require(isinstance(value, tuple), name, f"must be a tuple, not {value!r}")


PRESETS: dict[str, dict[str, Any]] = {
    "glm-5.2": dict(
        vocab_size=154880,
        hidden_size=6144,
        intermediate_size=12288,
        moe_intermediate_size=2048,
        num_hidden_layers=78,
        num_nextn_predict_layers=1,
        num_attention_heads=64,
        q_lora_rank=2048,
        kv_lora_rank=512,
        qk_nope_head_dim=192,
        qk_rope_head_dim=64,
        v_head_dim=256,
        n_routed_experts=256,
        num_experts_per_tok=8,
        first_k_dense_replace=3,
        index_n_heads=32,
        index_head_dim=128,
        index_topk=2048,
        indexer_types=scheduled_indexer_types(78, freq=4, offset=3),
        rope_theta=8e6,
        max_position_embeddings=1048576,
        eos_token_id=(154820, 154827, 154829),
        pad_token_id=154820,
    ),
    "debug": dict(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=9,
        num_nextn_predict_layers=1,
        num_attention_heads=4,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        n_routed_experts=8,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        index_n_heads=2,
        index_head_dim=16,
        index_topk=8,
        indexer_types=scheduled_indexer_types(9, freq=4, offset=3),
        rope_theta=1e4,
        max_position_embeddings=4096,
        dtype="float32",
    ),
    "span-code": dict(
        vocab_size=12288,
        hidden_size=256,
        intermediate_size=768,
        moe_intermediate_size=128,
        num_hidden_layers=12,
        num_attention_heads=8,
        q_lora_rank=128,
        kv_lora_rank=128,
        qk_nope_head_dim=48,
        qk_rope_head_dim=16,
        v_head_dim=64,
        n_routed_experts=16,
        num_experts_per_tok=4,
        first_k_dense_replace=2,
        index_n_heads=16,
        index_head_dim=32,
        index_topk=512,
        indexer_types=scheduled_indexer_types(12, freq=4, offset=3),
        rope_theta=8e6,
        max_position_embeddings=1048576,
        eos_token_id=(12262, 12269, 12271),
        pad_token_id=12262,
    ),
}
