"""The config.json of `glm_moe_dsa`: its keys, its defaults, and the settings that are refused."""

import json
from pathlib import Path
from typing import Any

from megaspan.errors import UserError

MODEL_TYPE = "glm_moe_dsa"

# Settings with one supported value: checked on reading and written back.
FIXED = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "indexer_rope_interleave": True,
    "moe_layer_freq": 1,
    "n_group": 1,
    "rope_interleave": True,
    "scoring_func": "sigmoid",
    "topk_group": 1,
    "topk_method": "noaux_tc",
}


def require(condition: bool, name: str, reason: str) -> None:
    if not condition:
        raise UserError(f"config: {name} {reason}")


MOST = {"num_hidden_layers": 10_000}


def require_count(name: str, value: Any, least: int) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    require(whole and value >= least, name, f"must be a whole number of at least {least}, not {value!r}")
    most = MOST.get(name, 2**31 - 1)
    require(value <= most, name, f"must be at most {most:,}")


def scheduled_indexer_types(layers: int, freq: int | None, offset: int = 2) -> tuple[str, ...]:
    """Which layers index: layer i is full when max(i - offset + 1, 0) is a multiple of `freq`.

    No frequency (None or 0) means that nothing is shared. 2 is transformers' offset when none is given.
    """
    freq = max(freq or 1, 1)
    return tuple("shared" if max(i - offset + 1, 0) % freq else "full" for i in range(layers))


def schedule_of(indexer_types: tuple[str, ...]) -> tuple[int, int] | None:
    """The smallest (freq, offset) that gives `indexer_types`, or None when no schedule does."""
    if "shared" not in indexer_types:
        return 1, 2
    # The first shared layer is at index `offset` for every frequency above 1.
    offset = indexer_types.index("shared")
    for freq in range(2, len(indexer_types) + 2):
        if scheduled_indexer_types(len(indexer_types), freq, offset) == indexer_types:
            return freq, offset
    return None


def leading_dense(mlp_layer_types: tuple[str, ...]) -> int:
    """How many layers at the start are dense."""
    return next((i for i, kind in enumerate(mlp_layer_types) if kind != "dense"), len(mlp_layer_types))


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file (or in the config.json of a folder); a UserError when there is none."""
    if path.is_dir():
        path = path / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read the config {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise UserError(f"the config {path} is not valid JSON; fetch or write it again") from None
    if not isinstance(content, dict):
        raise UserError(f"the config {path} must hold a JSON object, not a {type(content).__name__}")
    return content


def field_values(content: dict[str, Any], kinds: dict[str, Any]) -> dict[str, Any]:
    """The fields of a model in a parsed config.json. `kinds` gives the type of each field by name.

    Keys that mean nothing here are ignored, `head_dim` among them: it holds different widths in
    different releases. A setting that would need other code is refused.
    """
    model_type = content.get("model_type")
    if model_type != MODEL_TYPE:
        raise UserError(f"config: model_type is {model_type!r}, and only {MODEL_TYPE!r} models are supported")
    for name, value in FIXED.items():
        given = content.get(name)
        require(given is None or given == value, name, f"is {given!r}, and only {value!r} is supported")
    heads, kv_heads = content.get("num_attention_heads"), content.get("num_key_value_heads")
    require(
        kv_heads in (None, heads),
        "num_key_value_heads",
        f"is {kv_heads!r}, but latent attention has as many as num_attention_heads, {heads!r}",
    )
    # null means "not given", as in transformers.
    values = {name: content[name] for name in kinds if content.get(name) is not None}
    values.setdefault("dtype", content.get("torch_dtype") or "bfloat16")
    values["rope_theta"] = _rope_theta(content)
    require_count("num_hidden_layers", values.get("num_hidden_layers"), least=1)
    values["indexer_types"] = _indexer_types(content, values["num_hidden_layers"])
    if "mlp_layer_types" in values:
        values["mlp_layer_types"] = _as_tuple("mlp_layer_types", values["mlp_layer_types"])
        values["first_k_dense_replace"] = leading_dense(values["mlp_layer_types"])
    if "eos_token_id" in values:
        ids = values["eos_token_id"]
        values["eos_token_id"] = tuple(ids) if isinstance(ids, list) else (ids,)
    return {
        name: float(value) if kinds[name] is float and type(value) is int else value
        for name, value in values.items()
    }


def written_object(values: dict[str, Any]) -> dict[str, Any]:
    """The config.json for the fields of a model, with the keys of the published GLM-5.2 file.

    `indexer_types` decides; the frequency and offset, or the pattern, are for readers that know only those.
    """
    written = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    theta = values["rope_theta"]
    del written["rope_theta"]
    schedule = schedule_of(values["indexer_types"])
    pattern = "".join("F" if kind == "full" else "S" for kind in values["indexer_types"])
    return dict(
        sorted(
            {
                **written,
                **FIXED,
                "architectures": ["GlmMoeDsaForCausalLM"],
                "eos_token_id": written["eos_token_id"] or None,
                "ep_size": 1,
                "head_dim": values["qk_nope_head_dim"],
                "index_share_for_mtp_iteration": True,
                "index_skip_topk_offset": schedule[1] if schedule else None,
                "index_topk_freq": schedule[0] if schedule else None,
                "index_topk_pattern": None if schedule else pattern,
                "model_type": MODEL_TYPE,
                "moe_router_dtype": "float32",
                "num_key_value_heads": values["num_attention_heads"],
                "pretraining_tp": 1,
                "qk_head_dim": values["qk_nope_head_dim"] + values["qk_rope_head_dim"],
                "rope_parameters": {
                    "rope_theta": int(theta) if theta == int(theta) else theta,
                    "rope_type": "default",
                },
                "transformers_version": "5.12.0",
                "use_cache": True,
            }.items()
        )
    )


def _rope_theta(content: dict[str, Any]) -> Any:
    """The rotary base, from today's rope_parameters or the older rope_theta and rope_scaling."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = content.get(name) or {}
        require(isinstance(rope, dict), name, f"must be an object, not {rope!r}")
        kind = rope.get("rope_type", rope.get("type")) or "default"
        require(kind == "default", name, f"asks for rope type {kind!r}, and only 'default' is supported")
    theta = (content.get("rope_parameters") or {}).get("rope_theta", content.get("rope_theta"))
    require(theta is not None, "rope_parameters", "lacks rope_theta")
    return theta


def _indexer_types(content: dict[str, Any], layers: int) -> tuple[str, ...]:
    """indexer_types, or else index_topk_pattern (F and S), or else the frequency and offset."""
    if content.get("indexer_types") is not None:
        return _as_tuple("indexer_types", content["indexer_types"])
    pattern = content.get("index_topk_pattern")
    if isinstance(pattern, str):
        require(set(pattern) <= {"F", "S"}, "index_topk_pattern", f"must hold only F and S, not {pattern!r}")
        return tuple("full" if letter == "F" else "shared" for letter in pattern)
    if pattern is not None:
        return _as_tuple("index_topk_pattern", pattern)
    freq, offset = content.get("index_topk_freq"), content.get("index_skip_topk_offset")
    if freq is not None:
        require_count("index_topk_freq", freq, least=0)
    if offset is not None:
        require_count("index_skip_topk_offset", offset, least=0)
    return scheduled_indexer_types(layers, freq, 2 if offset is None else offset)


def _as_tuple(name: str, value: Any) -> tuple[str, ...]:
    require(isinstance(value, list | tuple), name, f"must be a list, not {value!r}")
    return tuple(value)
