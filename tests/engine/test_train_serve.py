"""The property `train = serve` of the design page: both give a token the same log-probability."""

from pathlib import Path

import pytest

from megaspan.engine.sampling import SamplingParams
from megaspan.model.batch_invariance import set_batch_invariant
from megaspan.model.folder import LanguageModel, load_folder
from tests.engine.engines import answer, fix_costs, make_engine, prompt
from tests.engine.selections import Flips, recording, seated
from tests.engine.solo import solo

SPAN_CODE = Path(__file__).parents[2] / "models" / "span-code"
SAMPLED = SamplingParams(temperature=1.0, seed=7, max_tokens=24, ignore_eos=True)
both_models = pytest.mark.parametrize("name", ["debug", "span-code"])


@pytest.fixture(scope="module")
def models(model):
    """With a prompt longer than what a token attends to."""
    shipped = load_folder(SPAN_CODE, "float32", "cpu", LanguageModel)
    assert shipped.tokenizer is not None
    code = shipped.tokenizer.encode(Path(__file__).read_text() * 2)
    return {"debug": (model, prompt(90)), "span-code": (shipped, code[: shipped.config.index_topk + 40])}


def serve(model, ids, invariant):
    """A sampled completion (tokens, log-probabilities), and the selections that it was drawn under."""
    set_batch_invariant(model, invariant)
    engine = make_engine(model, pages=200, prefix_cache=False, step_seconds=0.2)
    fix_costs(engine, 1e-3)  # the prompt is cut in pieces of 200 tokens, or of less beside a company
    with recording(model, seated(engine)) as served:
        for name, tokens in (("company", ids[:50]), ("one", ids)):
            engine.submit(tokens, SAMPLED, name)
        outputs = []
        while engine.has_work:
            outputs += [output for output in engine.step() if output.request_id == "one"]
    engine.close()
    return answer(outputs), {key: chosen for key, chosen in served.items() if key[0] == "one"}


@both_models
@pytest.mark.parametrize("mode", ["invariant", "default"])
def test_the_trainer_finds_the_log_probabilities_that_the_engine_told(models, name, mode, record_property):
    """With gradients, the whole sequence at once: within 1e-4 where no selection flipped."""
    model, ids = models[name]
    completion, served = serve(model, ids, mode == "invariant")
    set_batch_invariant(model, False)
    flips = Flips(served)
    flips.compare(model, "one", ids, completion)
    record_property("measured", f"trainer against engine in {mode} mode, {name}: {flips}")
    assert flips.tokens >= 12
    assert flips.largest < 1e-4
    assert flips.flipped <= flips.selections / 100


@both_models
def test_one_pass_makes_the_selections_of_the_engine_in_invariant_mode(models, name):
    """Bit for bit: every token attends to the same rows, and has the same log-probability."""
    model, ids = models[name]
    completion, served = serve(model, ids, True)
    with recording(model, lambda _: "one") as alone:
        assert solo(model, ids, SAMPLED, completion[0]) == completion
    assert max(len(set(chosen) - {-1}) for chosen in alone.values()) == model.config.index_topk
    assert alone == served
