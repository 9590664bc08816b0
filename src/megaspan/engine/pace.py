"""How long a step takes, learned from the steps so far, so that chunks of a prompt keep to a time."""

import numpy as np

FORGET = 0.95  # weight of the past at each new measurement
TOKENS, PAIRS = 1e2, 1e6  # units that bring the features near 1


class StepCost:
    """seconds = base + tokens · a + Σ tokens · context · c, fitted to what was measured.

    A token of a chunk at context p costs a + c · p: projections and experts do not depend on the context,
    index scores grow with it. Steps of decoding alone are averaged apart: a chunk costs what it adds to them.
    """

    def __init__(self, token_seconds: float = 1e-3):
        prior = np.array([1e-3, token_seconds * TOKENS, 0.0])
        self._moments = np.diag([1.0, 1.0, 1.0]) * 1e-3
        self._products = self._moments @ prior
        self._weights = prior
        self.decode_seconds = 0.0

    def measured_decode(self, seconds: float) -> None:
        self.decode_seconds += (seconds - self.decode_seconds) * (0.2 if self.decode_seconds else 1.0)

    def measured_chunks(self, tokens: int, pairs: float, seconds: float, decoding: bool) -> None:
        """A step read `tokens` prompt tokens that met `pairs` cached ones."""
        added = max(seconds - (self.decode_seconds if decoding else 0.0), 1e-6)
        features = np.array([1.0, tokens / TOKENS, pairs / PAIRS]) / added  # relative errors count
        self._moments = FORGET * self._moments + np.outer(features, features)
        self._products = FORGET * self._products + features
        steadied = self._moments + np.eye(3) * 1e-6 * np.trace(self._moments)
        self._weights = np.maximum(np.linalg.solve(steadied, self._products), (0.0, 1e-6 * TOKENS, 0.0))

    def seconds(self, tokens: int, context: float) -> float:
        """Of reading `tokens` more after `context` cached ones, apart from the step's base."""
        _, per_token, per_pair = self._weights
        return tokens * per_token / TOKENS + tokens * (context + tokens / 2) * per_pair / PAIRS

    @property
    def base_seconds(self) -> float:
        return float(self._weights[0])

    def tokens_within(self, seconds: float, context: int) -> int:
        """How many tokens after `context` cached ones take that long."""
        if seconds <= 0:
            return 0
        linear = self._weights[1] / TOKENS + context * self._weights[2] / PAIRS
        square = self._weights[2] / PAIRS / 2
        return int(2 * seconds / (linear + (linear * linear + 4 * square * seconds) ** 0.5))
