"""Prefill in chunks and decoding of one sequence, and what is refused before it starts."""

import itertools

import pytest
import torch

from megaspan.config import ModelConfig
from megaspan.engine.generation import Generation, generate, sample
from megaspan.errors import UserError
from tests.model.models import one_shot, random_model, random_tokens, relative_error

DEBUG = ModelConfig.preset("debug").replace(index_n_heads=32)  # ties at a score of 0 are rare
pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture(scope="module")
def model():
    return random_model(DEBUG)


@pytest.fixture
def prompt() -> list[int]:
    return random_tokens(DEBUG, 30).tolist()


def test_greedy_takes_the_best_token_of_the_growing_sequence(model, prompt):
    expected = list(prompt)
    for _ in range(12):
        expected.append(int(one_shot(model, torch.tensor(expected))[0][-1].argmax()))
    assert list(generate(model, prompt, 12)) == expected[30:]


def test_prefill_and_steps_give_the_logits_of_the_whole_sequence(model, prompt):
    expected = one_shot(model, torch.tensor(prompt))[0]
    generation = Generation(model, capacity=4, chunk=7)
    given = [generation.prefill(prompt[:20]), *(generation.step(token) for token in prompt[20:])]
    assert generation.length == 30
    assert given[0].dtype == torch.float32
    assert relative_error(torch.stack(given), expected[19:]) < 1e-5


@pytest.mark.parametrize("chunk", [1, 4, 29, 30, 512])
def test_chunk_sizes_do_not_matter(model, prompt, chunk):
    expected = list(generate(model, prompt, 8))
    assert list(generate(model, torch.tensor(prompt), 8, chunk=chunk)) == expected


def test_a_prompt_may_come_in_parts(model, prompt):
    whole, parts = Generation(model, 64), Generation(model, 64)
    parts.prefill(prompt[:11])
    assert relative_error(parts.prefill(prompt[11:]), whole.prefill(prompt)) < 1e-5


def test_progress_counts_every_token_once(model, prompt):
    calls = []
    Generation(model, 64, chunk=8).prefill(prompt, lambda done, total: calls.append((done, total)))
    assert calls == [(8, 30), (16, 30), (24, 30), (30, 30)]


def test_seeds_reproduce_and_differ(model, prompt):
    def drawn(seed):
        return list(generate(model, prompt, 12, temperature=1.0, seed=seed))

    assert drawn(1) == drawn(1)
    assert len({tuple(drawn(seed)) for seed in range(3)}) == 3
    assert len({tuple(generate(model, prompt, 12, temperature=1.0)) for _ in range(2)}) == 2


def test_generations_do_not_share_anything(model, prompt):
    """Two at once, a token from each in turn, give what they give alone."""
    other = random_tokens(DEBUG, 17, seed=9).tolist()
    alone = [list(generate(model, tokens, 6)) for tokens in (prompt, other)]
    pair = zip(generate(model, prompt, 6), generate(model, other, 6), strict=True)
    assert [list(tokens) for tokens in zip(*pair, strict=True)] == alone


def test_it_stops_after_an_end_of_sequence_id(model, prompt):
    produced = list(generate(model, prompt, 8))
    stop = produced[3]
    stopping = random_model(DEBUG.replace(eos_token_id=(stop,)))
    assert list(generate(stopping, prompt, 8)) == produced[: produced.index(stop) + 1]


def test_it_stops_where_the_positions_are_full(prompt):
    """A `max_tokens` beyond what the model can read reserves no memory for it either."""
    short = random_model(DEBUG.replace(max_position_embeddings=32))
    assert len(list(generate(short, prompt, 10**15))) == 3  # two are read, the third is not
    assert len(list(generate(short, [*prompt, 1, 1], 5))) == 1
    generation = Generation(short, 32)
    generation.prefill([*prompt, 1])
    generation.step(1)
    with pytest.raises(UserError, match="the context is full: the model reads 32 tokens at most"):
        generation.step(1)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"token_ids": []}, "the prompt is empty"),
        ({"token_ids": torch.tensor([], dtype=torch.long)}, "the prompt is empty"),
        ({"token_ids": [1] * 4097}, "the prompt has 4097 tokens, more than the model's 4096"),
        ({"token_ids": [5, 97, 98]}, "token id 97 is outside the model's vocabulary of 97"),
        ({"token_ids": [5, -1]}, "token id -1 is outside"),
        ({"token_ids": "words"}, "list of token ids"),
        ({"token_ids": [1.5, 2.0]}, "list of token ids"),
        ({"token_ids": [2**80]}, "list of token ids"),
        ({"token_ids": torch.tensor([[1, 2]])}, r"list of token ids, not torch.int64 of shape \[1, 2\]"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": -3}, "max_tokens is -3"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"chunk": 0}, "chunk is 0"),
    ],
)
def test_bad_input_is_one_clear_line_at_once(model, changed, words):
    """Before the prompt is read, and before the first token is asked for."""
    with pytest.raises(UserError, match=words) as error:
        generate(model, **{"token_ids": [1, 2], "max_tokens": 4, **changed})
    assert "\n" not in str(error.value)


def test_bad_input_after_others_leaves_the_generation_usable(model, prompt):
    """P27: a prompt larger than the model's room is refused at once, and the next one is served."""
    generation = Generation(model, 64)
    generation.prefill(prompt[:20])
    for refused in (
        lambda: generation.step(97),
        lambda: generation.step(-1),
        lambda: generation.prefill([97]),
    ):
        with pytest.raises(UserError, match="outside the model's vocabulary"):
            refused()
    with pytest.raises(UserError, match="the prompt has 4090 tokens after 20 others"):
        generation.prefill([1] * 4090)
    assert relative_error(generation.prefill(prompt[20:]), Generation(model, 64).prefill(prompt)) < 1e-5


def test_temperature_0_takes_the_lowest_id_among_equals():
    logits = torch.zeros(5000)
    logits[[7, 8, 4999]] = 1.0
    assert [sample(logits, 0.0) for _ in range(5)] == [7] * 5


def test_samples_follow_the_distribution():
    logits, temperature, draws = torch.tensor([2.0, 0.0, 1.0, -torch.inf]), 0.7, 4000
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(4)
    for _ in range(draws):
        counts[sample(logits, temperature, generator)] += 1
    expected = (logits / temperature).softmax(-1)
    assert counts[3] == 0
    assert (counts / draws - expected).abs().max() < 0.03  # about four standard deviations


@pytest.mark.parametrize("temperature", [1e-3, 1e-300, 5e-324])
def test_a_temperature_near_0_takes_the_best(temperature):
    """Logits over a temperature this small overflow, which must not turn into NaN."""
    generator = torch.Generator().manual_seed(0)
    assert sample(torch.tensor([10.0, 30.0, 29.0]), temperature, generator) == 1


def test_an_infinite_temperature_draws_all_alike():
    generator = torch.Generator().manual_seed(0)
    assert {sample(torch.tensor([0.0, 50.0, 9.0]), torch.inf, generator) for _ in range(50)} == {0, 1, 2}


def test_index_keys_of_another_dtype(model, prompt):
    """bf16 keys choose almost the same rows; the default is the model's own dtype."""
    exact, halved = Generation(model, 64), Generation(model, 64, index_dtype=torch.bfloat16)
    logits, rounded = exact.prefill(prompt), halved.prefill(prompt)
    assert {keys.dtype for keys in exact.cache.index.values()} == {torch.float32}
    assert {keys.dtype for keys in halved.cache.index.values()} == {torch.bfloat16}
    assert halved.cache.memory()["index"] * 2 == exact.cache.memory()["index"]
    assert halved.cache.memory()["latent"] == exact.cache.memory()["latent"]
    everything = one_shot(model, torch.tensor(prompt), dense=True)[0][-1]
    assert relative_error(rounded, logits) < relative_error(everything, logits) / 2


def test_memory_counts_the_tokens_read(model, prompt):
    generation = Generation(model, 4096)
    generation.prefill(prompt)
    per_token = {"latent": 9 * 40 * 4, "index": 4 * 16 * 4}
    assert generation.cache.memory() == {kind: 30 * size for kind, size in per_token.items()}


def test_an_iterator_that_is_dropped_early_reads_no_further(model, prompt, monkeypatch):
    steps = []
    original = Generation.step
    monkeypatch.setattr(Generation, "step", lambda self, token: steps.append(token) or original(self, token))
    taken = list(itertools.islice(generate(model, prompt, 100), 3))
    assert steps == taken[:2]


def test_ids_that_only_pad_the_vocabulary_are_never_drawn(model, prompt):
    drawn = list(generate(model, prompt, 40, temperature=50.0, seed=1, vocabulary=10))
    assert max(drawn) < 10
    assert max(generate(model, prompt, 40, temperature=50.0, seed=1)) >= 10


def test_a_pass_that_fails_leaves_the_sequence_as_it_was(model, prompt, monkeypatch):
    generation = Generation(model, capacity=64)
    generation.prefill(prompt[:20])
    last = model.model.layers[-1]
    with monkeypatch.context() as patch:
        patch.setattr(last, "forward", lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            generation.step(prompt[20])
    assert generation.length == 20
    expected = one_shot(model, torch.tensor(prompt[:21]))[0][-1]
    assert relative_error(generation.step(prompt[20]), expected) < 1e-5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_are_said(temperature):
    with pytest.raises(UserError, match="weights are damaged"):
        sample(torch.tensor([0.0, torch.nan]), temperature)
