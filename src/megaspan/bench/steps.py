"""The engine's own work per step: what it does on the CPU beside the forward pass, at any context length."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from torch import Tensor, nn

from megaspan.config import ModelConfig
from megaspan.engine.config import EngineConfig
from megaspan.engine.engine import Engine
from megaspan.engine.sampling import SamplingParams
from megaspan.model.batch import Batch
from megaspan.model.cache import Cache
from megaspan.ops.logits import logit_summary

VOCABULARY = 128


class StandIn(nn.Module):
    """In place of a model: takes no time and draws what it is told to. Its rows are as narrow as can be."""

    tokenizer = None
    batch_invariant = False

    def __init__(self, context: int):
        super().__init__()
        self.config = ModelConfig(
            vocab_size=VOCABULARY,
            hidden_size=2,
            intermediate_size=2,
            moe_intermediate_size=2,
            num_hidden_layers=1,
            num_attention_heads=1,
            q_lora_rank=2,
            kv_lora_rank=2,
            qk_nope_head_dim=2,
            qk_rope_head_dim=2,
            v_head_dim=2,
            n_routed_experts=1,
            num_experts_per_tok=1,
            first_k_dense_replace=1,
            index_n_heads=1,
            index_head_dim=2,
            index_topk=1,
            indexer_types=("full",),
            rope_theta=1e4,
            max_position_embeddings=context,
        )
        self.lm_head = nn.Linear(2, VOCABULARY, bias=False, dtype=torch.bfloat16)
        self.logits = torch.randn(256, VOCABULARY)

    def forward(self, batch: Batch, cache: Cache) -> Tensor:
        return torch.empty(len(batch.token_ids), 1)

    def unembed(self, hidden: Tensor) -> Tensor:
        return self.logits[: len(hidden)]


@dataclass(frozen=True)
class StepWork:
    """Microseconds per decoding step outside the forward pass, over `steps` of them.

    work: processor time of all threads, on average. median, percentile_99: of the time on the clock, which
    waking the forward thread and being woken by it adds to.
    """

    context: int
    running: int
    work: float
    median: float
    percentile_99: float
    steps: int


def step_work(
    context: int, running: int = 64, steps: int = 600, say: Callable[[str], None] = lambda said: None
) -> StepWork:
    """Decode with `running` requests of about `context` tokens each on a stand-in model and time the engine.

    All of `Engine.step` counts: schedule, pages, batch, hand-over to the forward thread and back, sampling
    (greedy, from a vocabulary of VOCABULARY) and outputs. What a larger vocabulary adds is the one pass over
    the logits, where they are: `summary_seconds`.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # its tensors are small: more threads only wait for each other
    page_size = 64
    pages = running * (-(-context // page_size) + 2)
    engine = Engine(
        StandIn(context + 4096),  # pyright: ignore[reportArgumentType]
        EngineConfig(max_running=running, pages=pages, max_chunk=1 << 20, step_seconds=60.0),
    )
    try:
        random = np.random.default_rng(0)
        for _ in range(running):
            prompt = random.integers(0, VOCABULARY, context - 2 * steps).tolist()
            engine.submit(prompt, SamplingParams(temperature=0, max_tokens=4 * steps, ignore_eos=True))
        say(f"{running} requests read {context:,} tokens each")
        while len(engine.scheduler.slots.decoding) < running:
            engine.step()
        gc.collect()
        seconds, worked = [], time.process_time()
        for _ in range(steps):
            began = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - began)
        worked = time.process_time() - worked
    finally:
        engine.close()
        torch.set_num_threads(threads)
    micro = np.array(seconds) * 1e6
    median, percentile_99 = np.percentile(micro, (50, 99)).tolist()
    return StepWork(context, running, 1e6 * worked / steps, median, percentile_99, steps)


def summary_seconds(rows: int, vocabulary: int, repeats: int = 9) -> float:
    """The median time of the sampler's pass over the logits of `rows` requests, on all of torch's threads."""
    logits = torch.randn(rows, vocabulary)
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        logit_summary(logits, vocabulary)
        seconds.append(time.perf_counter() - began)
    return median(seconds)
