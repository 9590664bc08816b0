"""What a request asks of the sampler, checked when it is made."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megaspan.errors import UserError

MOST_LOGPROBS = 20
MOST_STOPS = 16
MOST_STOP_CHARACTERS = 1024
MOST_BIASES = 1024
MOST_GRAMMAR_CHARACTERS = 1 << 19
LARGEST_COUNT = 1 << 40
GRAMMAR_KINDS = ("json_schema", "json", "regex", "lark", "choice")

# The least and the greatest value of each number, both allowed.
WHOLE_RANGES = {
    "max_tokens": (1, LARGEST_COUNT),
    "min_tokens": (0, LARGEST_COUNT),
    "top_k": (0, LARGEST_COUNT),
    "seed": (-(1 << 63), (1 << 64) - 1),
    "logprobs": (0, MOST_LOGPROBS),
}
REAL_RANGES = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
}
OPTIONAL = ("max_tokens", "seed", "logprobs")


@dataclass(frozen=True)
class Grammar:
    """What the text must look like.

    kind: `json_schema` (text: the schema), `json` (any JSON object; no text), `regex`, `lark` (a grammar in
    Lark's notation), `choice` (text: a JSON list of strings, one of which comes).
    begins_after: the token id after which it holds, such as `</think>`; None: from the start.

    Raises UserError for an unknown kind, or a text that is no string or too long. Whether the text can be
    compiled is found out by `GrammarCompiler`.
    """

    kind: str
    text: str = ""
    begins_after: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in GRAMMAR_KINDS:
            raise UserError(f"the grammar's kind is {self.kind!r}: give one of {', '.join(GRAMMAR_KINDS)}")
        if not isinstance(self.text, str) or len(self.text) > MOST_GRAMMAR_CHARACTERS:
            raise UserError(f"the grammar must be a text of at most {MOST_GRAMMAR_CHARACTERS} characters")
        if self.begins_after is not None:
            _check_token_id("grammar.begins_after", self.begins_after)

    @classmethod
    def choice(cls, options: list[str], begins_after: int | None = None) -> "Grammar":
        """One of the options, as it stands."""
        return cls("choice", json.dumps(options), begins_after)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are drawn and when they end.

    Each token is drawn after, in this order: `logit_bias`; the repetition penalty (CTRL, Keskar et al. 2019,
    as in Hugging Face: over prompt and reply), presence and frequency penalties (OpenAI's formula: over the
    reply); the grammar; `temperature` (0: the best token); `top_k` (exactly so many, the lowest ids among
    equals; 0: all); `top_p` (Holtzman et al. 2020: the fewest tokens that reach it); `min_p` (Nguyen et al.
    2024: a share of the best token's probability).

    max_tokens: None: until the context is full. min_tokens: no stop id comes before so many tokens.
    seed: the same seed, prompt and parameters give the same tokens. logprobs: how many alternatives to report
    at each token; the chosen one's log-probability always is. logit_bias: a mapping, stored as sorted pairs.

    Raises UserError, one line that names the field.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        for name, (least, most) in WHOLE_RANGES.items():
            if name not in OPTIONAL or getattr(self, name) is not None:
                _check_number(name, getattr(self, name), least, most, whole=True)
        for name, (least, most) in REAL_RANGES.items():
            _check_number(name, getattr(self, name), least, most, whole=False)
        if self.top_p == 0:
            raise UserError("top_p is 0: give a number above 0 and at most 1")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise UserError(
                f"min_tokens is {self.min_tokens}: it must not exceed max_tokens, {self.max_tokens}"
            )
        if not isinstance(self.ignore_eos, bool):
            raise UserError(f"ignore_eos is {self.ignore_eos!r}: give true or false")
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise UserError("grammar must be a Grammar")
        if self.grammar is not None and self.min_tokens:
            raise UserError("min_tokens cannot go with a grammar: let the grammar say how long the text is")
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_ids(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))

    @property
    def greedy(self) -> bool:
        """Whether each token is simply the best one."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def penalized(self) -> bool:
        """Whether the draw depends on which tokens came before."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        return penalties != (0, 0, 1)


def _check_number(name: str, value: Any, least: float, most: float, whole: bool) -> None:
    right_type = isinstance(value, int) if whole else isinstance(value, int | float)
    if not right_type or isinstance(value, bool) or not least <= value <= most:  # NaN is in no range
        kind = "a whole number" if whole else "a number"
        raise UserError(f"{name} is {_short(value)}: give {kind} from {least} to {most}")


def _check_token_id(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < LARGEST_COUNT:
        raise UserError(f"{name} holds {_short(value)}: give token ids, whole numbers from 0 on")


def _stop_strings(stop: Any) -> tuple[str, ...]:
    if not isinstance(stop, list | tuple) or not all(isinstance(text, str) for text in stop):
        raise UserError("stop must be a list of strings")
    if len(stop) > MOST_STOPS:
        raise UserError(f"stop has {len(stop)} strings: give at most {MOST_STOPS}")
    if not all(1 <= len(text) <= MOST_STOP_CHARACTERS for text in stop):
        raise UserError(
            f"stop has a string that is empty or over {MOST_STOP_CHARACTERS} characters: change it"
        )
    return tuple(stop)


def _stop_ids(stop_token_ids: Any) -> tuple[int, ...]:
    if not isinstance(stop_token_ids, list | tuple):
        raise UserError("stop_token_ids must be a list of token ids")
    if len(stop_token_ids) > MOST_BIASES:
        raise UserError(f"stop_token_ids has {len(stop_token_ids)} ids: give at most {MOST_BIASES}")
    for token_id in stop_token_ids:
        _check_token_id("stop_token_ids", token_id)
    return tuple(stop_token_ids)


def _biases(logit_bias: Any) -> tuple[tuple[int, float], ...]:
    try:
        pairs = dict(logit_bias)
    except (TypeError, ValueError):
        raise UserError("logit_bias must map token ids to numbers") from None
    if len(pairs) > MOST_BIASES:
        raise UserError(f"logit_bias has {len(pairs)} entries: give at most {MOST_BIASES}")
    for token_id, bias in pairs.items():
        _check_token_id("logit_bias", token_id)
        _check_number(f"logit_bias of {token_id}", bias, -100.0, 100.0, whole=False)
    return tuple(sorted((token_id, float(bias)) for token_id, bias in pairs.items()))


def _short(value: Any) -> str:
    """The value as it is shown in an error: whole if short."""
    try:
        text = repr(value)
    except ValueError:  # an integer of too many digits to print
        return "a very large number"
    return text if len(text) <= 40 else text[:40] + "…"
