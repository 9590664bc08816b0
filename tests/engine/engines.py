"""Small engines that the engine's tests run, and what must hold of them."""

from collections.abc import Sequence
from typing import Any

import torch

from megaspan.config import ModelConfig
from megaspan.engine.config import EngineConfig
from megaspan.engine.engine import Engine
from megaspan.engine.request import Output
from megaspan.engine.sampling import SamplingParams
from megaspan.model.folder import set_batch_invariant
from megaspan.model.transformer import Transformer
from tests.engine.solo import solo
from tests.model.models import random_model, random_tokens

DEBUG = ModelConfig.preset("debug").replace(max_position_embeddings=1024, eos_token_id=(3,))
PAGE = 4
BOUND = 10.0  # seconds that nothing here comes near unless it hangs
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def debug_model(invariant: bool = True, seed: int = 0, config: ModelConfig = DEBUG) -> Any:
    model: Any = random_model(config, seed)
    set_batch_invariant(model, invariant)
    model.tokenizer = None
    return model


class Always:
    """A restore policy that restores whatever is there."""

    def worth(self, nbytes: int, recompute_seconds: float) -> bool:
        return True

    def measured(self, nbytes: int, seconds: float) -> None:
        pass


def make_engine(model: Transformer, tokenizer: Any = None, **options: Any) -> Engine:
    """An engine of pages of 4 tokens; with a host tier it restores whatever is there."""
    settings: dict[str, Any] = {"page_size": PAGE, "pages": 64, "max_running": 8, "load_timeout": 5.0}
    engine = Engine(model, EngineConfig(**{**settings, **options}), tokenizer)  # pyright: ignore[reportArgumentType]
    if engine.memory.tiers is not None:
        engine.memory.tiers.policy = Always()  # pyright: ignore[reportAttributeAccessIssue]
    return engine


def fix_costs(engine: Engine, token_seconds: float, pair_seconds: float = 0.0) -> None:
    """A prompt's tokens cost the same, and as much again for each cached one, whatever the machine does."""
    cost: Any = engine.cost
    cost.measured_chunks = cost.measured_decode = lambda *arguments: None
    cost._weights[:] = 0.0, token_seconds * 1e2, pair_seconds * 1e6


def prompt(length: int, seed: int = 0) -> list[int]:
    return random_tokens(DEBUG, length, seed).tolist()


def drain(engine: Engine, most: int = 2000) -> dict[str, list[Output]]:
    """Step until nobody is left; every request's outputs. AssertionError where that takes too many steps."""
    outputs: dict[str, list[Output]] = {}
    for _ in range(most):
        if not engine.has_work:
            return outputs
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    raise AssertionError(f"requests are left after {most} steps")


def tokens_of(outputs: Sequence[Output]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def logprobs_of(outputs: Sequence[Output]) -> list[float]:
    return [logprob for output in outputs for logprob in output.logprobs]


def answer(outputs: Sequence[Output]) -> tuple[list[int], list[float]]:
    """Tokens and log-probabilities; AssertionError for a request that failed."""
    assert outputs[-1].finish_reason in ("stop", "length"), outputs[-1]
    return tokens_of(outputs), logprobs_of(outputs)


def assert_solo(
    model: Transformer, ids: list[int], params: SamplingParams, outputs: Sequence[Output]
) -> None:
    """The outputs are, bit for bit, what the model gives without engine, pages or company."""
    assert solo(model, ids, params, tokens_of(outputs)) == answer(outputs)


def settle(engine: Engine) -> None:
    """Let transfers end and be taken note of, then count every page, slot and lease."""
    for _ in range(3):
        engine.memory.prefixes.poll()
        if engine.memory.tiers is not None:
            assert engine.memory.tiers.transfers.flush(BOUND)
    engine.memory.prefixes.poll()
    engine.check()


def assert_idle(engine: Engine) -> None:
    """The ledger is closed: nothing runs, nothing is locked."""
    settle(engine)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.loading, stats.pages_locked) == (0, 0, 0, 0)
    assert stats.pages_free + stats.pages_cached == stats.pages_total


def poison_freed_pages(engine: Engine) -> None:
    """Free pages hold NaN in every format (bytes of ones), now and whenever they come free."""
    pools: Any = engine.memory.pools
    give = pools.give

    def fill(pages: Sequence[int]) -> None:
        with torch.inference_mode():
            for segment in pools.segments:
                segment.pages[list(pages)] = 255

    def giving(pages: Sequence[int]) -> None:
        fill(pages)
        give(pages)

    fill(range(pools.total_pages))
    pools.give = giving


def evict_device(engine: Engine) -> None:
    """Take every page of an idle engine and give them back: what was cached is in the host tier or gone."""
    settle(engine)
    prefixes, total = engine.memory.prefixes, engine.memory.pools.total_pages
    pages = prefixes.take(total)
    for _ in range(3):
        if pages is None:  # write-back: they come free once they are saved
            settle(engine)
            pages = prefixes.take(total)
    assert pages is not None
    engine.memory.pools.give(pages)
