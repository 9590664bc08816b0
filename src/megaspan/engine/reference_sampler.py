"""The distribution that the sampler draws from, one row at a time and as plain as it can be said."""

from collections.abc import Collection, Mapping

import numpy as np

from megaspan.engine.sampling import SamplingParams


def reference_distribution(
    logits: np.ndarray,
    params: SamplingParams,
    prompt: Collection[int] = (),
    counts: Mapping[int, int] | None = None,
    allowed: Collection[int] | None = None,
    banned: Collection[int] = (),
) -> np.ndarray:
    """float64 [V]: each token's probability of being drawn.

    logits: [V], the tokenizer's vocabulary only. prompt: its ids. counts: how often each id was drawn so far.
    allowed: the ids that the grammar allows, None for all. banned: the stop ids while `min_tokens` are not
    reached. ValueError when nothing is left.
    """
    logits, counts = logits.astype(np.float64), counts or {}
    for token_id, bias in dict(params.logit_bias).items():
        logits[token_id] += bias
    logits[list(banned)] = -np.inf
    for token_id in set(prompt) | set(counts):
        penalty = params.repetition_penalty
        logits[token_id] *= penalty if logits[token_id] < 0 else 1 / penalty
    for token_id, count in counts.items():
        logits[token_id] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    if allowed is not None:
        logits[[token_id for token_id in range(len(logits)) if token_id not in allowed]] = -np.inf
    if logits.max() == -np.inf:
        raise ValueError("no token is left to draw")
    if params.temperature == 0:
        return np.eye(len(logits))[logits.argmax()]
    probabilities = np.exp((logits - logits.max()) / params.temperature)
    ranked = sorted(range(len(logits)), key=lambda token_id: (-logits[token_id], token_id))
    kept = _nucleus(probabilities, ranked[: params.top_k or None], params.top_p)
    kept = [token_id for token_id in kept if probabilities[token_id] >= params.min_p * probabilities.max()]
    result = np.zeros_like(probabilities)
    result[kept] = probabilities[kept] / probabilities[kept].sum()
    return result


def _nucleus(probabilities: np.ndarray, ranked: list[int], top_p: float) -> list[int]:
    """The fewest of the ranked ids whose share of the ranked ids' probability reaches `top_p`."""
    total, reached = probabilities[ranked].sum(), 0.0
    for place, token_id in enumerate(ranked):
        reached += probabilities[token_id]
        if reached >= top_p * total:
            return ranked[: place + 1]
    return ranked
