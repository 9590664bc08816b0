"""Random companies of requests, in both modes: what a request gives does not depend on them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megaspan.engine.sampling import SamplingParams
from megaspan.model.batch_invariance import set_batch_invariant
from tests.engine.engines import answer, assert_solo, fix_costs, make_engine, poison_freed_pages, prompt
from tests.engine.selections import Flips, recording, seated

pytestmark = pytest.mark.usefixtures("poisoned_memory")
COMPANIES = st.lists(
    st.tuples(
        st.integers(1, 60),  # tokens of its prompt
        st.integers(1, 12),  # of its answer
        st.sampled_from([0.0, 0.7, 1.0]),  # temperature
        st.sampled_from([1.0, 0.8]),  # top_p
        st.integers(0, 9),  # steps before it arrives
    ),
    min_size=1,
    max_size=5,
)
CHUNKS = st.sampled_from([5, 24, 1000])  # tokens that a step reads of prompts
some_companies = settings(max_examples=10)


@pytest.fixture(scope="module", params=[True, False], ids=["invariant", "default"])
def either(request, model):
    set_batch_invariant(model, request.param)
    yield model
    set_batch_invariant(model)


def serve(model, company, chunk):
    """Each request's prompt, parameters and outputs, and all selections that were made."""
    engine = make_engine(model, pages=200, prefix_cache=False, step_seconds=chunk * 1e-3, max_chunk=chunk)
    fix_costs(engine, 1e-3)
    poison_freed_pages(engine)
    requests = {}
    with recording(model, seated(engine)) as served:
        for step in range(1000):
            for seed, (length, count, temperature, top_p, arrival) in enumerate(company):
                if step == arrival:
                    ids = prompt(length, seed)
                    params = SamplingParams(
                        max_tokens=count,
                        temperature=temperature,
                        top_p=top_p,
                        seed=100 + seed,
                        ignore_eos=True,
                    )
                    requests[engine.submit(ids, params, str(seed))] = (ids, params, [])
            for output in engine.step():
                requests[output.request_id][2].append(output)
            if step > 9 and not engine.has_work:
                break
    engine.close()
    return requests, served


@some_companies
@given(COMPANIES, CHUNKS)
def test_log_probabilities_agree_where_the_selections_do(either, company, chunk):
    """Within 1e-4; in invariant mode no selection flips and every bit is that of the solo run."""
    requests, served = serve(either, company, chunk)
    flips = Flips(served)
    for name, (ids, params, outputs) in requests.items():
        assert len(outputs) == params.max_tokens
        with torch.inference_mode():
            flips.compare(either, name, ids, answer(outputs))
        if either.batch_invariant:
            assert_solo(either, ids, params, outputs)
    assert flips.largest < 1e-4
    if either.batch_invariant:
        assert flips.flipped == 0


def test_few_selections_flip_in_the_default_mode(model, record_property):
    """The share is reported: a flipped row is another model, which the invariant mode is for."""
    set_batch_invariant(model, False)
    company = [(length, 16, 0.0, 1.0, 0) for length in (60, 45, 500, 77, 120, 600)]
    requests, served = serve(model, company, 24)
    flips = Flips(served)
    with torch.inference_mode():
        for name, (ids, _, outputs) in requests.items():
            flips.compare(model, name, ids, answer(outputs))
    set_batch_invariant(model)
    record_property("measured", f"selections of the default mode, debug, in company and alone: {flips}")
    assert flips.tokens > 20
    assert flips.largest < 1e-4
    assert flips.flipped <= flips.selections / 100
