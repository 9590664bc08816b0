"""The engine on a GPU against the engine on a CPU: pages, host tier, formats, sampling."""

import pytest
import torch

from megaspan.engine.sampling import SamplingParams
from tests.engine.engines import GREEDY, answer, debug_model, make_engine, prompt, settle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


@pytest.mark.parametrize(("latent_rows", "tolerance"), [("float32", 1e-3), ("fp8", 1e-2)])
def test_engine_answers_as_on_a_cpu(latent_rows: str, tolerance: float) -> None:
    """With FP8 rows a rounding difference can move a value to the next of e4m3's few."""
    prompts = [prompt(length, seed) for seed, length in enumerate((1, 9, 40, 77, 120))]
    answers = {}
    for device in ("cpu", "cuda"):
        engine = make_engine(
            debug_model(invariant=False).to(device), pages=256, latent_rows=latent_rows, index_rows="float32"
        )
        answers[device] = [answer(outputs) for outputs in engine.generate(prompts, GREEDY)]
        settle(engine)
        engine.close()
    for (tokens_cpu, logprobs_cpu), (tokens_gpu, logprobs_gpu) in zip(*answers.values(), strict=True):
        assert tokens_cpu == tokens_gpu
        assert torch.allclose(torch.tensor(logprobs_cpu), torch.tensor(logprobs_gpu), atol=tolerance)


def test_p40_host_round_trip_on_a_gpu_changes_nothing() -> None:
    engine = make_engine(debug_model(invariant=False).cuda(), pages=64, host_pages=256)
    first = prompt(160)
    expected = answer(engine.generate([first], GREEDY)[0])
    engine.generate([prompt(200, seed=5)], GREEDY)  # it evicts the first one's pages
    settle(engine)
    free = [page for page in range(64) if not engine.memory.pools._taken[page]]
    for segment in engine.memory.pools.segments:
        segment.pages[free] = 255  # NaN in every format
    outputs = engine.generate([first], GREEDY)[0]
    assert engine.stats().host_hits_total > 0
    assert answer(outputs)[0] == expected[0]
    settle(engine)
    engine.close()


def test_sampling_on_a_gpu_draws_what_it_draws_on_a_cpu() -> None:
    params = SamplingParams(temperature=0.8, top_p=0.9, top_k=20, max_tokens=12, seed=7, ignore_eos=True)
    drawn = []
    for device in ("cpu", "cuda"):
        engine = make_engine(debug_model(invariant=False).to(device))
        drawn.append(answer(engine.generate([prompt(30)], params)[0])[0])
        engine.close()
    assert drawn[0] == drawn[1]
