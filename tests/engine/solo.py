"""What a request gives on its own: no engine, no pages, no company."""

from collections.abc import Sequence

import torch

from megaspan.cache.transient import TransientCache
from megaspan.engine.sampler import Sampler
from megaspan.engine.sampling import SamplingParams
from megaspan.model.batch import Batch
from megaspan.model.transformer import Transformer

SLOT = 0  # of a solo run's sampler


@torch.inference_mode()
def solo(
    model: Transformer,
    prompt: Sequence[int],
    params: SamplingParams,
    answer: Sequence[int],
    stop_ids: Sequence[int] = (),
) -> tuple[list[int], list[float]]:
    """As many tokens, with their log-probabilities, as the `answer` has, drawn after the same ones.

    One pass over prompt and answer gives the logits of every step, which in batch-invariant arithmetic are
    those of reading token by token; where the draws from them are the answer again, drawing freely would
    have given it. stop_ids: what must not come before `min_tokens`.
    """
    batch = Batch.of([torch.tensor([*prompt, *answer[:-1]])])
    hidden = model(batch, TransientCache())[len(prompt) - 1 :]
    sampler = Sampler(model.config.vocab_size, 1)
    sampler.admit(SLOT, params, prompt, (), params.seed or 0, stop_ids)
    tokens, logprobs = [], []
    for step in range(len(answer)):
        sampled = sampler.sample(model.unembed(hidden[step : step + 1]), [SLOT], [step])
        tokens.append(int(sampled.token_ids[0]))
        logprobs.append(float(sampled.logprobs[0]))
    return tokens, logprobs
