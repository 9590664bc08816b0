"""A soak of the engine: random requests, aborts and transfer faults in tiny pools; answers equal solo runs.

    python -m tests.engine.soak --requests 2000 --seed 1

The requests, what happens to them and the injected faults follow from the seed, which is printed first.
"""

import argparse
import random
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from megaspan.cache.transient import TransientCache
from megaspan.config import ModelConfig
from megaspan.engine.config import EngineConfig
from megaspan.engine.engine import Engine
from megaspan.engine.request import Output
from megaspan.engine.sampler import Sampler
from megaspan.engine.sampling import SamplingParams
from megaspan.model.batch import Batch
from megaspan.model.folder import set_batch_invariant
from megaspan.model.transformer import Transformer
from tests.model.models import random_model

SOLO = 0  # the slot of a solo run's sampler
PAGE = 4


@dataclass
class Job:
    """One request of the soak. abort_after: engine steps after which it is aborted, or None."""

    prompt: list[int]
    params: SamplingParams
    abort_after: int | None
    outputs: list[Output] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return [token_id for output in self.outputs for token_id in output.token_ids]

    @property
    def logprobs(self) -> list[float]:
        return [logprob for output in self.outputs for logprob in output.logprobs]


def soak_model(longest: int) -> Transformer:
    """The debug model, batch-invariant, that reads contexts up to `longest`."""
    config = ModelConfig.preset("debug").replace(max_position_embeddings=longest, eos_token_id=(3,))
    model: Any = random_model(config)
    set_batch_invariant(model)
    model.tokenizer = None
    return model


def random_jobs(count: int, longest: int, vocabulary: int, chance: random.Random) -> list[Job]:
    """Prompts of 1 to `longest` tokens (log-uniform), most of which begin like earlier ones."""
    jobs: list[Job] = []
    stems: list[list[int]] = []
    for _ in range(count):
        length = max(1, min(int(longest ** chance.random()), longest - 64))
        stem: list[int] = chance.choice(stems) if stems and chance.random() < 0.7 else []
        kept = stem[: chance.randint(0, min(len(stem), length))]
        prompt = kept + [chance.randrange(vocabulary) for _ in range(length - len(kept))]
        stems = [*stems[-40:], prompt]
        params = SamplingParams(
            max_tokens=chance.randint(1, 32),
            temperature=chance.choice([0.0, 0.0, 0.7, 1.0]),
            top_p=chance.choice([1.0, 0.9]),
            top_k=chance.choice([0, 5]),
            presence_penalty=chance.choice([0.0, 0.0, 1.0]),
            seed=chance.randrange(1 << 40),
            ignore_eos=chance.random() < 0.5,
        )
        aborted = chance.random() < 0.15
        jobs.append(Job(prompt, params, chance.randint(0, 12) if aborted else None))
    return jobs


class Faults:
    """Delays and failures of the transfer threads, by a seed of their own."""

    def __init__(self, seed: int, rate: float):
        self.chance, self.rate = random.Random(seed), rate
        self.delays = self.failures = 0

    def __call__(self, job: object, segment: object) -> None:
        drawn = self.chance.random()
        if drawn < self.rate / 10:
            self.failures += 1
            raise OSError("injected")
        if drawn < self.rate:
            self.delays += 1
            time.sleep(self.chance.random() * 0.002)


def run(engine: Engine, jobs: list[Job], chance: random.Random, arrivals: int) -> None:
    """Feed the jobs to the engine, `arrivals` at most at a time, and abort those that are to be."""
    waiting, by_id, steps = list(enumerate(jobs)), {}, 0
    due: list[tuple[int, str]] = []
    while waiting or engine.has_work:
        for number, job in [waiting.pop(0) for _ in range(min(len(waiting), chance.randint(0, arrivals)))]:
            by_id[engine.submit(job.prompt, job.params, str(number))] = job
            if job.abort_after is not None:
                due.append((steps + job.abort_after, str(number)))
        for when, request_id in [entry for entry in due if entry[0] <= steps]:
            engine.abort(request_id)
            due.remove((when, request_id))
        for output in engine.step():
            by_id[output.request_id].outputs.append(output)
        steps += 1


@torch.inference_mode()
def solo(model: Transformer, job: Job) -> tuple[list[int], list[float]]:
    """Tokens and log-probabilities of a job on its own, without engine or paged cache.

    One pass over prompt and answer gives the logits of every step, which in batch-invariant arithmetic are
    those of reading token by token; the draws from them must give the answer again.
    """
    answer = job.token_ids
    batch = Batch.of([torch.tensor(job.prompt + answer[:-1])])
    hidden = model(batch, TransientCache())[len(job.prompt) - 1 :]
    sampler = Sampler(model.config.vocab_size, 1)
    sampler.admit(SOLO, job.params, job.prompt, (), job.params.seed or 0)
    tokens, logprobs = [], []
    for step in range(len(answer)):
        sampled = sampler.sample(model.unembed(hidden[step : step + 1]), [SOLO], [step])
        tokens.append(int(sampled.token_ids[0]))
        logprobs.append(float(sampled.logprobs[0]))
    return tokens, logprobs


def check(model: Transformer, jobs: list[Job]) -> dict[str, int]:
    """AssertionError unless every job ended once, for a good reason, with the numbers of its solo run."""
    reasons: dict[str, int] = {}
    for number, job in enumerate(jobs):
        reason = job.outputs[-1].finish_reason
        assert reason is not None, f"request {number} did not end"
        assert [output.finish_reason for output in job.outputs[:-1]] == [None] * (len(job.outputs) - 1)
        assert reason != "abort" or job.abort_after is not None, f"request {number} was aborted by nobody"
        assert reason != "error", f"request {number}: {job.outputs[-1].error}"
        reasons[reason] = reasons.get(reason, 0) + 1
        if job.token_ids:
            tokens, logprobs = solo(model, job)
            assert tokens == job.token_ids, f"request {number}: tokens differ from the solo run's"
            assert logprobs == job.logprobs, f"request {number}: log-probabilities differ from the solo run's"
    return reasons


def soak(
    requests: int,
    seed: int,
    longest: int,
    pages: int,
    host_pages: int,
    write_policy: str = "write_through",
    fault_rate: float = 0.05,
    max_running: int = 8,
) -> dict[str, object]:
    """Run and check; returns what happened, so that a caller can see that it was worth running."""
    print(f"soak: seed {seed}, {requests} requests of up to {longest} tokens, {write_policy}", flush=True)
    chance, model = random.Random(seed), soak_model(longest)
    jobs = random_jobs(requests, longest, model.config.vocab_size, chance)
    config = EngineConfig(
        page_size=PAGE,
        pages=pages,
        host_pages=host_pages,
        write_policy=write_policy,  # pyright: ignore[reportArgumentType]
        max_running=max_running,
        max_waiting=requests,
        step_seconds=0.05,
        load_timeout=5.0,
    )
    engine, faults = Engine(model, config), Faults(seed, fault_rate)  # pyright: ignore[reportArgumentType]
    assert engine.memory.tiers is not None
    engine.memory.tiers.transfers.before_segment = faults
    engine.memory.tiers.policy = Always()  # pyright: ignore[reportAttributeAccessIssue]
    try:
        run(engine, jobs, chance, arrivals=3)
        assert engine.memory.tiers.transfers.flush(20), "transfers hang"
        engine.memory.prefixes.poll()
        engine.memory.tiers.transfers.flush(20)
        engine.memory.prefixes.poll()
        engine.check()
        stats = engine.stats()
    finally:
        engine.close()
    return {
        **check(model, jobs),
        "preempted": stats.preempted_total,
        "restored": stats.host_hits_total,
        "failed restores": stats.failed_restores_total,
        "prefix hits": stats.prefix_hits_total,
        "delays": faults.delays,
        "failures": faults.failures,
        "steps": stats.steps_total,
    }


class Always:
    """A restore policy that restores whatever is there, so that the host tier is used."""

    def worth(self, nbytes: int, recompute_seconds: float) -> bool:
        return True

    def measured(self, nbytes: int, seconds: float) -> None:
        pass


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--longest", type=int, default=20_000)
    parser.add_argument("--pages", type=int, default=8_000)
    parser.add_argument("--host-pages", type=int, default=12_000)
    parser.add_argument("--write-policy", default="write_through")
    began = time.monotonic()
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    print(soak(**vars(arguments)))
    print(f"{time.monotonic() - began:.0f} s")
