"""Fixtures of the training tests: a workplace with a tiny model and corpus, and recipes for it."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

from megaspan.config import ModelConfig
from megaspan.tokenizer import byte_alphabet
from tests.train.small_run import RATES, STAGES, TEXT, WriteRecipe


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the config of a tiny model, a tokenizer of bytes and a corpus of repeated text."""
    folder = tmp_path_factory.mktemp("workplace")
    backend = Backend(models.BPE(vocab=byte_alphabet(), merges=[]))
    backend.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    backend.save(str(folder / "tokenizer.json"))
    config = ModelConfig.preset("debug").replace(
        num_nextn_predict_layers=0, num_hidden_layers=4, hidden_size=32, indexer_types=("full", "shared") * 2,
        mlp_layer_types=(), vocab_size=backend.get_vocab_size(), index_topk=6,
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    document = [*(TEXT * 20), 256]
    np.array(document * 3, dtype="<u2").tofile(folder / "train.bin")
    starts = [{"start": number * len(document)} for number in range(3)]
    (folder / "documents.json").write_text(
        json.dumps({"train": {"tokens": 3 * len(document), "documents": starts}})
    )
    return folder


@pytest.fixture
def recipe(workplace: Path, tmp_path: Path) -> WriteRecipe:
    def write(*stages: dict, dtype: str = "float32", **settings: object) -> Path:
        places = {name: str(workplace) for name in ("tokenizer", "corpus")}
        top = places | {"config": str(workplace / "config.json"), "dtype": dtype, "seed": 3} | settings
        lines = [f"{name} = {value!r}" for name, value in top.items()]
        for number, stage in enumerate(stages or STAGES.values()):
            values = dict(name=f"stage {number}", context=32, tokens_per_step=64) | RATES | stage
            lines += ["[[stage]]", *(f"{name} = {value!r}" for name, value in values.items())]
        path = tmp_path / "recipe.toml"
        path.write_text("\n".join(lines))
        return path

    return write
