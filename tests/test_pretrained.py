"""The Python face: load, save, logits, generate."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import megaspan
from megaspan.config import ModelConfig
from megaspan.errors import UserError
from megaspan.model.folder import resolve_dtype
from megaspan.model.transformer import Transformer
from megaspan.pretrained import PretrainedModel
from tests.model.models import one_shot, random_model, random_tokens, relative_error

DEBUG = ModelConfig.preset("debug").replace(index_n_heads=32, num_nextn_predict_layers=0)
SPAN_CODE = Path(__file__).parents[1] / "models" / "span-code"
TOKENS = random_tokens(DEBUG, 41)
pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture(scope="module")
def original():
    return random_model(DEBUG)


@pytest.fixture(scope="module")
def folder(original, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "model"
    megaspan.save(original, path)
    return path


@pytest.fixture(scope="module")
def model(folder) -> PretrainedModel:
    return megaspan.load(folder, dtype="float32")


def test_what_is_saved_is_loaded(model, original):
    assert model.config == DEBUG
    assert not model.training
    loaded, saved = model.state_dict(), original.state_dict()
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in saved.items())


@pytest.mark.parametrize("as_tensor", [False, True])
def test_logits_of_the_whole_sequence(model, original, as_tensor):
    logits = model.logits(TOKENS if as_tensor else TOKENS.tolist())
    assert logits.shape == (41, DEBUG.vocab_size)
    assert logits.dtype == torch.float32
    assert not logits.requires_grad
    assert torch.equal(logits, one_shot(original, TOKENS)[0])


def test_a_tokens_logits_do_not_depend_on_what_follows(model):
    whole = model.logits(TOKENS)
    assert relative_error(model.logits(TOKENS[:20]), whole[:20]) < 1e-5
    assert relative_error(model.logits(TOKENS[:1]), whole[:1]) < 1e-5


def test_generate_yields_ids_one_by_one(model):
    tokens = TOKENS.tolist()
    for token_id in model.generate(tokens, 5):
        assert type(token_id) is int
        assert token_id == int(model.logits(tokens)[-1].argmax())
        tokens.append(token_id)
    assert len(tokens) == 46
    first, again, other = (list(model.generate(TOKENS, 8, temperature=1.5, seed=seed)) for seed in (3, 3, 4))
    assert first == again != other


def test_random_numbers_of_the_caller_are_left_alone(model):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    list(model.generate(TOKENS, 3, temperature=1.0, seed=1))
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize(
    ("token_ids", "words"),
    [
        ([], "the prompt is empty"),
        ([1, 97], "token id 97 is outside the model's vocabulary of 97"),
        ([-1], "token id -1"),
        ([0] * 4097, "4097 tokens, more than the model's 4096"),
        (TOKENS[None], "shape"),
        ("text", "list of token ids"),
    ],
)
def test_what_the_model_cannot_read_is_refused_at_once(model, token_ids, words):
    with pytest.raises(UserError, match=words):
        model.logits(token_ids)
    with pytest.raises(UserError, match=words):
        model.generate(token_ids, 3)


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16, "float32", torch.float32], ids=str)
def test_dtypes_by_name_and_by_value(folder, dtype):
    model, expected = megaspan.load(folder, dtype=dtype), getattr(torch, str(dtype).removeprefix("torch."))
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if name.endswith("mlp.gate.weight") else expected), name
    assert all(buffer.dtype == torch.float32 for buffer in model.buffers())
    assert model.logits(TOKENS).dtype == torch.float32


@pytest.mark.parametrize("fast", [False, True])
def test_auto_is_the_files_dtype_where_it_is_fast(monkeypatch, fast):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: fast)
    files = {"bfloat16": DEBUG.replace(dtype="bfloat16"), "float32": DEBUG}
    assert resolve_dtype("auto", files["bfloat16"], "cpu") == (torch.bfloat16 if fast else torch.float32)
    assert resolve_dtype("auto", files["bfloat16"], "cuda") == torch.bfloat16
    assert resolve_dtype("auto", files["float32"], "cpu") == torch.float32


def test_auto_on_a_build_without_fast_bf16(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert resolve_dtype("auto", DEBUG.replace(dtype="bfloat16"), "cpu") == torch.float32


@pytest.mark.parametrize("dtype", ["float16", torch.float16, "fp32", "", torch.int64, None], ids=str)
def test_another_dtype_is_refused(folder, dtype):
    with pytest.raises(UserError, match="is not supported: use auto, float32 or bfloat16"):
        megaspan.load(folder, dtype=dtype)


@pytest.fixture
def calm() -> Transformer:
    """Every position and expert is chosen: where a rounded score chooses others, logits jump."""
    model = Transformer(DEBUG.replace(index_topk=64, num_experts_per_tok=DEBUG.n_routed_experts))
    model.initialise(0)
    return model.eval()


def distance(logits: torch.Tensor, exact: torch.Tensor) -> float:
    return float((logits - exact).norm() / exact.norm())


def test_bf16_logits_are_close(tmp_path, calm):
    megaspan.save(calm, tmp_path)
    rounded = megaspan.load(tmp_path, dtype="bfloat16").logits(TOKENS)
    assert 1e-4 < distance(rounded, one_shot(calm, TOKENS)[0]) < 0.02


def test_fp8_weights_are_close(tmp_path, calm):
    megaspan.save(calm, tmp_path, fp8=True)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["quant_method"] == "fp8"
    read = megaspan.load(tmp_path, dtype="float32")
    loaded = read.state_dict()
    for name, tensor in calm.state_dict().items():
        assert distance(loaded[name], tensor) < 0.04 if tensor.any() else not loaded[name].any(), name
    assert 1e-3 < distance(read.logits(TOKENS), one_shot(calm, TOKENS)[0]) < 0.1


def test_a_folder_without_a_tokenizer(model):
    assert model.tokenizer is None


def test_the_tokenizer_goes_along(tmp_path, original, model):
    """With every file of it, byte for byte, to transformers too."""
    from megaspan.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(SPAN_CODE)
    config = DEBUG.replace(vocab_size=tokenizer.vocab_size)
    with_tokenizer = PretrainedModel(config)
    with_tokenizer.initialise(0)
    with_tokenizer.tokenizer = tokenizer
    megaspan.save(with_tokenizer, tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / name).read_bytes() == (SPAN_CODE / name).read_bytes()
    loaded = megaspan.load(tmp_path)
    assert loaded.tokenizer is not None
    text = "def add(a, b):\n    return a + b  # ¬é\n"
    ids = loaded.tokenizer.encode(text)
    assert loaded.tokenizer.decode(ids) == text
    assert len(list(loaded.generate(ids, 2))) == 2
    transformers = pytest.importorskip("transformers")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"] == ids


def copied(folder: Path, target: Path, **changes: object) -> Path:
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **changes}))
    return target


def test_what_is_not_there_is_one_clear_line(tmp_path, folder):
    with pytest.raises(UserError, match="nowhere is not a folder: give the folder that holds config"):
        megaspan.load(tmp_path / "nowhere")
    with pytest.raises(UserError, match="is not a folder"):
        megaspan.load(folder / "config.json")
    with pytest.raises(UserError, match=r"config\.json"):
        megaspan.load(tmp_path)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(UserError, match="its weights are missing"):
        megaspan.load(tmp_path)


@pytest.mark.parametrize("model_type", ["llama", "deepseek_v32"])
def test_another_architecture_is_refused(tmp_path, folder, model_type):
    other = copied(folder, tmp_path / "other", model_type=model_type)
    with pytest.raises(UserError, match=model_type) as error:
        megaspan.load(other)
    assert "\n" not in str(error.value)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path, original):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot save to"):
        megaspan.save(original, tmp_path / "file" / "model")


def test_importing_the_package_does_not_import_torch():
    code = "import sys, megaspan; assert megaspan.__all__ == ['load', 'save']; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_the_package_has_nothing_but_what_it_names():
    assert megaspan.load is not None
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        megaspan.lode  # noqa: B018


@pytest.mark.parametrize("device", ["nowhere", "meta:x", "cuda:99"])
def test_a_device_that_is_not_there_is_refused(folder, device):
    with pytest.raises(UserError, match="no device"):
        megaspan.load(folder, device=device)
