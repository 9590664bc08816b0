"""What the bodies of several endpoints share: sampling, structure, and how unknown fields are met."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from megaspan.engine.sampling import MOST_BIASES, Grammar, SamplingParams
from megaspan.server.errors import ApiError

MOST_OBJECTS = 1 << 16  # messages, say
MOST_TOKENS = 1 << 31  # more than any context; a client that asks for more has made a mistake

# A list stops at its first wrong element: a report on each of a million would take a minute and gigabytes.
STRICT = Field(fail_fast=True)
TokenIds = Annotated[list[int], STRICT]
Texts = Annotated[list[str], STRICT]
Objects = Annotated[list[dict[str, Any]], STRICT, Field(max_length=MOST_OBJECTS)]
MaxTokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]

SEEDS = 1 << 63
FORBIDDING_BIAS = -100.0


class RequestModel(BaseModel):
    """A body whose unknown fields are errors, as they could change what the client means.

    Passed over are those in `ignored`, which change nothing about the answer; those in `fixed` with the value
    that holds here anyway; and null or empty ones. A number is a number, not a text that spells one.
    """

    model_config = ConfigDict(extra="allow", strict=True)
    ignored: ClassVar[frozenset[str]] = frozenset()
    fixed: ClassVar[dict[str, Any]] = {}

    @model_validator(mode="after")
    def _refuse_unknown(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            empty = value is None or value in ("", [], {})
            if (
                not empty
                and name not in self.ignored
                and not (name in self.fixed and value == self.fixed[name])
            ):
                message = "the field {field} is not supported here; leave it out"
                raise PydanticCustomError("unsupported_field", message, {"field": name})
        return self


class StructuredOutputs(RequestModel):
    """What the text must look like; one field at most."""

    json_: dict[str, Any] | str | bool | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: Texts | None = None
    json_object: bool | None = None

    model_config = ConfigDict(extra="allow", alias_generator=lambda name: name.rstrip("_"))

    def grammars(self) -> list[Grammar]:
        """One for each field that is set."""
        found = []
        if self.json_ is not None:
            schema = self.json_ if isinstance(self.json_, str) else json.dumps(self.json_)
            found.append(Grammar("json_schema", schema))
        if self.regex is not None:
            found.append(Grammar("regex", self.regex))
        if self.grammar is not None:
            found.append(Grammar("lark", self.grammar))
        if self.choice is not None:
            found.append(Grammar.choice(self.choice))
        if self.json_object:
            found.append(Grammar("json"))
        return found


class SamplingFields(RequestModel):
    """Sampling as OpenAI, vLLM and SGLang name it. Ranges are checked by SamplingParams.

    top_k: 0 and -1 both mean all tokens.
    """

    fixed = {
        "add_special_tokens": False,
        "best_of": 1,
        "early_stopping": False,
        "include_reasoning": True,
        "include_stop_str_in_output": False,
        "length_penalty": 1.0,
        "no_stop_trim": False,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "use_beam_search": False,
    }

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop: str | Texts | None = None
    stop_token_ids: TokenIds | None = None
    logit_bias: dict[str, Any] | None = None  # of token ids
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: Texts | None = None

    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def biases(self) -> dict[int, Any]:
        """By token id. Raises ApiError for keys that are none, and for too many of them."""
        given = self.logit_bias or {}
        if len(given) > MOST_BIASES or not all(key.isdecimal() and len(key) < 10 for key in given):
            message = f"logit_bias must map token ids to numbers, at most {MOST_BIASES} of them"
            raise ApiError(400, message, param="logit_bias")
        return {int(key): value for key, value in given.items()}

    def sampling(
        self,
        max_tokens: int | None,
        logprobs: int | None,
        grammar: Grammar | None,
        forbidden: Sequence[int] = (),
    ) -> SamplingParams:
        """Raises UserError for values out of range. forbidden: token ids that must not come."""
        given = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": 0 if self.top_k == -1 else self.top_k,
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "seed": self.seed,
            "min_tokens": self.min_tokens,
            "ignore_eos": self.ignore_eos,
            "stop": self.stops() or None,
            "stop_token_ids": tuple(self.stop_token_ids) if self.stop_token_ids else None,
            "logit_bias": {**self.biases(), **dict.fromkeys(forbidden, FORBIDDING_BIAS)},
            "max_tokens": max_tokens,
            "logprobs": logprobs,
            "grammar": grammar,
        }
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})

    def structure(self) -> Grammar | None:
        """The grammar that the structured-output fields ask for. Raises ApiError when they ask for two."""
        guided = StructuredOutputs.model_validate(
            {
                "json": self.guided_json,
                "regex": self.guided_regex,
                "grammar": self.guided_grammar,
                "choice": self.guided_choice,
            }
        )
        found = guided.grammars() + (self.structured_outputs.grammars() if self.structured_outputs else [])
        if len(found) > 1:
            raise ApiError(400, "more than one structure is asked for; give one", param="structured_outputs")
        return found[0] if found else None


class StreamOptions(RequestModel):
    include_usage: bool = False

    ignored = frozenset({"include_obfuscation", "continuous_usage_stats"})


def derived_seed(seed: int | None, choice: int) -> int | None:
    """The seed of one of several choices; the first choice's is the request's own."""
    return seed if seed is None or choice == 0 else (seed + choice) % SEEDS
