"""Packs: windows of the corpus, cut where documents meet, the same for the same seed and step."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megaspan.cache.transient import TransientCache
from megaspan.config import ModelConfig
from megaspan.errors import UserError
from megaspan.train.data import TokenFile, training_pack
from megaspan.train.losses import IGNORED
from tests.model.models import one_shot, random_model


def token_file(lengths: list[int], vocabulary: int = 1 << 16) -> TokenFile:
    """Documents of these lengths; the token at place p is p, so that a token says where it came from."""
    starts = np.cumsum([0, *lengths[:-1]])
    return TokenFile((np.arange(sum(lengths)) % vocabulary).astype(np.uint16), starts)


def write_split(folder: Path, tokens: list[int], starts: list[int], count: int | None = None) -> None:
    np.array(tokens, dtype="<u2").tofile(folder / "train.bin")
    documents = [{"start": start} for start in starts]
    split = {"tokens": len(tokens) if count is None else count, "documents": documents}
    (folder / "documents.json").write_text(json.dumps({"train": split}))


@settings(max_examples=60)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.data())
def test_windows_stop_at_the_borders_of_documents(lengths: list[int], data: st.DataObject) -> None:
    lengths[-1] += 1  # so that there is a window of one token
    file = token_file(lengths)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    start = data.draw(st.integers(0, len(owner) - 2))
    length = data.draw(st.integers(1, len(owner) - 1 - start))
    inputs, targets, stretches = file.window(start, length)
    places = range(start, start + length)
    assert inputs.tolist() == list(places)
    assert targets.tolist() == [p + 1 if owner[p] == owner[p + 1] else IGNORED for p in places]
    expected = np.unique(owner[start : start + length], return_counts=True)[1]
    assert stretches == expected.tolist()


def test_an_epoch_covers_every_window_once() -> None:
    file, context = token_file([40, 3, 70, 90]), 8
    windows = (203 - 1) // context - 1
    places = []
    for step in range(windows):  # two windows a step: two epochs
        batch, _ = training_pack(file, 7, step, 2 * context, context, "cpu")
        places += batch.token_ids.view(2, context)[:, 0].tolist()
    epochs = places[:windows], places[windows:]
    for epoch in epochs:
        first = min(epoch)
        assert 0 <= first < context
        assert sorted(epoch) == [first + context * number for number in range(windows)]
    assert [p - min(epochs[0]) for p in epochs[0]] != [p - min(epochs[1]) for p in epochs[1]]


def test_a_pack_depends_on_the_seed_and_the_step_alone() -> None:
    file = token_file([50] * 20)

    def pack(seed: int, step: int) -> tuple[list[int], list[int], tuple[int, ...]]:
        batch, targets = training_pack(file, seed, step, 64, 16, "cpu")
        assert sum(batch.query_lengths) == len(targets) == 64
        return batch.token_ids.tolist(), targets.tolist(), batch.query_lengths

    first = pack(3, 5)
    others = [pack(3, 6), pack(4, 5), pack(3, 500)]
    assert pack(3, 5) == first
    assert all(other[0] != first[0] for other in others)


def test_documents_do_not_see_each_other() -> None:
    config = ModelConfig.preset("debug").replace(num_nextn_predict_layers=0, num_hidden_layers=3,
        indexer_types=("full", "shared", "full"), mlp_layer_types=())  # fmt: skip
    model = random_model(config)
    batch, _ = training_pack(token_file([13, 5, 30, 21, 9, 11, 40], config.vocab_size), 1, 0, 64, 32, "cpu")
    assert len(batch.query_lengths) > 2
    with torch.no_grad():
        together = model.unembed(model(batch, TransientCache()))
    alone = [one_shot(model, piece)[0] for piece in batch.token_ids.split(list(batch.query_lengths))]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-4)


def test_a_split_is_read_from_its_folder(tmp_path: Path) -> None:
    write_split(tmp_path, [5, 6, 65535, 8], [0, 3])
    file = TokenFile.open(tmp_path, "train")
    assert file.tokens.tolist() == [5, 6, 65535, 8]
    assert file.window(0, 3)[1].tolist() == [6, 65535, IGNORED]
    file.require_vocabulary(65536)
    with pytest.raises(UserError, match="65535"):
        file.require_vocabulary(65535)


def test_folders_that_are_refused(tmp_path: Path) -> None:
    def refused(message: str, split: str = "train") -> None:
        with pytest.raises(UserError, match=message):
            TokenFile.open(tmp_path, split)

    refused("holds no train split")
    write_split(tmp_path, [1, 2], [0])
    refused("holds no heldout split", "heldout")
    (tmp_path / "heldout.bin").write_bytes(b"\1\0")
    refused("does not describe the heldout split", "heldout")
    write_split(tmp_path, [1, 2], [0], count=3)
    refused("has 2 tokens, but .* says 3")
    with (tmp_path / "train.bin").open("ab") as file:
        file.write(b"\1")
    refused("has 2.5 tokens")
    write_split(tmp_path, [], [])
    refused("is empty")
    (tmp_path / "documents.json").write_text("{")
    refused("does not describe")
    with pytest.raises(UserError, match="too few for a context of 8"):
        training_pack(token_file([16]), 0, 0, 8, 8, "cpu")
