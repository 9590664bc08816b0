"""Bits per byte against the definition, on a small model with a tokenizer of bytes."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

from megaspan.config import ModelConfig
from megaspan.errors import UserError
from megaspan.eval.bits import bits_per_byte
from megaspan.pretrained import PretrainedModel
from megaspan.tokenizer import Tokenizer, byte_alphabet

END = 256


@pytest.fixture(scope="module")
def model() -> PretrainedModel:

    backend = Backend(models.BPE(vocab=byte_alphabet(), merges=[]))
    backend.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    config = ModelConfig.preset("debug").replace(
        num_nextn_predict_layers=0, num_hidden_layers=3, indexer_types=("full", "shared", "full"),
        mlp_layer_types=(), vocab_size=300, initializer_range=0.3,
    )  # fmt: skip
    model = PretrainedModel(config)
    model.initialise(0)
    model.tokenizer = Tokenizer(backend)
    return model.eval()


def write_corpus(folder: Path, documents: list[bytes]) -> None:
    tokens = [token for text in documents for token in (*text, END)]
    starts = np.cumsum([0, *(len(text) + 1 for text in documents)])[:-1]
    np.array(tokens, dtype="<u2").tofile(folder / "heldout.bin")
    split = {"tokens": len(tokens), "documents": [{"start": int(start)} for start in starts]}
    (folder / "documents.json").write_text(json.dumps({"heldout": split}))


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    write_corpus(tmp_path, [b"def f(x):\n    return x\n" * 2, b"a = 1\n", b"import os\nprint(os.name)\n" * 2])
    return str(tmp_path)


def direct(model: PretrainedModel, corpus: str, starts: list[int], context: int) -> dict[str, float]:
    """One forward pass over each document's part of each window, one token's probability at a time."""
    tokens = np.fromfile(Path(corpus) / "heldout.bin", dtype="<u2").tolist()
    bits, predicted, size = 0.0, 0, 0
    for start in starts:
        first = start
        for place in range(start, start + context):
            if tokens[place] == END:  # the next token opens another document
                first = place + 1
                continue
            probabilities = model.logits(tokens[first : place + 1])[-1].double().softmax(-1)
            bits -= math.log2(probabilities[tokens[place + 1]])
            predicted += 1
            size += tokens[place + 1] != END
    return {
        "bits_per_byte": bits / size,
        "nats_per_token": bits * math.log(2) / predicted,
        "tokens": predicted,
        "bytes": size,
        "context": context,
    }


@pytest.mark.parametrize("chunk", [5, 4096])
def test_all_windows_against_the_definition(model: PretrainedModel, corpus: str, chunk: int) -> None:
    seen = []
    result = bits_per_byte(model, corpus, 20, chunk=chunk, on_progress=lambda *done: seen.append(done))
    assert result == pytest.approx(direct(model, corpus, [0, 20, 40, 60, 80], 20), rel=1e-5)
    assert seen == [(number, 5) for number in range(1, 6)]


def test_some_windows_are_spread_evenly(model: PretrainedModel, corpus: str) -> None:
    result = bits_per_byte(model, corpus, 10, windows=3)
    assert result == pytest.approx(direct(model, corpus, [0, 30, 60], 10), rel=1e-5)
    assert bits_per_byte(model, corpus, 10, windows=99) == bits_per_byte(model, corpus, 10)


def test_bytes_are_those_of_the_text(corpus: str, model: PretrainedModel) -> None:
    """A token of two bytes counts twice, at the same loss."""
    tokenizer = model.tokenizer
    assert tokenizer is not None
    whole = bits_per_byte(model, corpus, 20)
    try:
        tokenizer.__dict__["token_bytes"] = [piece * 2 for piece in tokenizer.token_bytes]
        double = bits_per_byte(model, corpus, 20)
    finally:
        del tokenizer.__dict__["token_bytes"]
    assert double["bytes"] == 2 * whole["bytes"]
    assert double["bits_per_byte"] == pytest.approx(whole["bits_per_byte"] / 2)


def test_a_uniform_model_needs_the_logarithm_of_its_vocabulary(model: PretrainedModel, corpus: str) -> None:
    uniform = PretrainedModel(model.config)
    uniform.initialise(0)
    torch.nn.init.zeros_(uniform.lm_head.weight)
    uniform.tokenizer = model.tokenizer
    result = bits_per_byte(uniform.eval(), corpus, 20)
    assert result["nats_per_token"] == pytest.approx(math.log(300), rel=1e-6)


def test_what_is_refused(model: PretrainedModel, corpus: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="too few for a context of 500"):
        bits_per_byte(model, corpus, 500)
    with pytest.raises(UserError, match="more than the model's 4096 positions"):
        bits_per_byte(model, corpus, 5000)
    with pytest.raises(UserError, match="no heldout split"):
        bits_per_byte(model, str(tmp_path / "none"), 10)
    bare = PretrainedModel(model.config)
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        bits_per_byte(bare, corpus, 10)
    write_corpus(tmp_path, [b""] * 9)
    with pytest.raises(UserError, match="no text"):
        bits_per_byte(model, corpus, 4)
    np.full(9, 299, dtype="<u2").tofile(tmp_path / "heldout.bin")
    with pytest.raises(UserError, match="another tokenizer"):
        bits_per_byte(model, corpus, 4)
