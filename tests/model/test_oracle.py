"""The oracle: logits equal those of transformers' GlmMoeDsaForCausalLM on the same weights, in fp32.

transformers norms the latents with an epsilon of 1e-6 whatever the config says, so ours says that too;
32 index heads make ties at a score of 0, which it breaks at random, rare.
"""

import warnings

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

import megaspan
from megaspan.config import ModelConfig
from megaspan.model.transformer import Transformer
from tests.model.models import in_chunks, one_shot, random_model, random_tokens, relative_error
from tests.strategies import configs

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated"),
]
COMPARABLE = dict(rms_norm_eps=1e-6, index_n_heads=32, num_nextn_predict_layers=0)
DEBUG = ModelConfig.preset("debug").replace(**COMPARABLE)
LENGTH = 41  # five times debug's top-k


def oracle_of(model: Transformer):
    """transformers' model with the same weights; the two have exactly the same parameters."""
    config = transformers.GlmMoeDsaConfig(**model.config.to_dict(), experts_implementation="eager")
    config._attn_implementation = "eager"
    oracle = transformers.GlmMoeDsaForCausalLM(config).eval()
    oracle.load_state_dict(model.state_dict(), strict=True)
    return oracle


def biased(config: ModelConfig, seed: int = 0) -> Transformer:
    """A random model whose experts are chosen by another order than they are weighed."""
    model = random_model(config, seed)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(seed))
    return model


@torch.no_grad()
def logits_of(oracle, tokens: torch.Tensor, chunks: list[int] | None = None) -> torch.Tensor:
    """[T, V], in one call, or in chunks through transformers' own cache."""
    if chunks is None:
        return oracle(tokens[None]).logits[0].float()
    pieces, cache = [], None
    for piece in tokens.split(chunks):
        output = oracle(piece[None], past_key_values=cache, use_cache=True)
        pieces.append(output.logits[0])
        cache = output.past_key_values
    return torch.cat(pieces)


@pytest.fixture(scope="module")
def pair():
    model = biased(DEBUG)
    return model, oracle_of(model)


def test_one_shot(pair):
    model, oracle = pair
    tokens = random_tokens(DEBUG, 150)
    expected = logits_of(oracle, tokens)
    assert relative_error(one_shot(model, tokens)[0], expected) < 1e-4
    # The comparison sees selections: dense attention is far away.
    assert relative_error(one_shot(model, tokens, dense=True)[0], expected) > 1e-2


@pytest.mark.parametrize(
    "chunks", [[1] * 12, [LENGTH - 3] + [1] * 3, [9, 1, 16, 15]], ids=["steps", "decode", "chunks"]
)
def test_step_by_step_and_in_chunks_through_both_caches(pair, chunks):
    model, oracle = pair
    tokens = random_tokens(DEBUG, sum(chunks), seed=1)
    ours, theirs = in_chunks(model, tokens, chunks), logits_of(oracle, tokens, chunks)
    assert relative_error(ours, theirs) < 1e-4
    assert relative_error(ours, logits_of(oracle, tokens)) < 1e-4


def test_a_batch_of_prompts_equals_each_alone(pair):
    model, oracle = pair
    sequences = [random_tokens(DEBUG, length, length) for length in (30, 1, 8, 57)]
    for ours, sequence in zip(one_shot(model, *sequences), sequences, strict=True):
        assert relative_error(ours, logits_of(oracle, sequence)) < 1e-4


@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
@given(configs(**COMPARABLE, n_routed_experts=6), st.integers(0, 3), st.integers(1, 20))
def test_random_configs(config, seed, chunk):
    model = biased(config, seed)
    oracle = oracle_of(model)
    tokens = random_tokens(config, LENGTH, seed)
    expected = logits_of(oracle, tokens)
    chunks = [min(chunk, LENGTH - start) for start in range(0, LENGTH, chunk)]
    assert relative_error(one_shot(model, tokens)[0], expected) < 1e-4
    assert relative_error(in_chunks(model, tokens, chunks), expected) < 1e-4


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_transformers_reads_what_we_save(tmp_path, tied):
    config = DEBUG.replace(tie_word_embeddings=tied)
    model, tokens = biased(config), random_tokens(config, LENGTH)
    megaspan.save(model, tmp_path)
    read = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    )
    assert type(read) is transformers.GlmMoeDsaForCausalLM
    assert relative_error(logits_of(read, tokens), one_shot(model, tokens)[0]) < 1e-4


def test_we_read_what_transformers_saves(tmp_path, pair):
    model, oracle = pair
    tokens = random_tokens(DEBUG, LENGTH)
    oracle.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is left over or ignored
        read = megaspan.load(tmp_path, dtype="float32")
    assert read.config.indexer_types == DEBUG.indexer_types
    assert torch.equal(read.logits(tokens), one_shot(model, tokens)[0])
