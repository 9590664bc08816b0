"""Which pages hold a request's rows changes nothing, and nobody else's rows are touched."""

from dataclasses import replace

import pytest
import torch

from megaspan.ops.quant import load_index_rows
from tests.engine.engines import DEBUG, GREEDY, answer, assert_idle, drain, prompt

pytestmark = pytest.mark.usefixtures("poisoned_memory")
LENGTHS = (30, 41, 9, 17)


def rows_after(engine, names, tokens) -> dict[str, list[torch.Tensor]]:
    """The rows of each request, of every layer of both pools, once all have drawn so many tokens."""
    while any(engine.requests[name].generated < tokens for name in names):
        engine.step()
    rows = {}
    for name in names:
        request = engine.requests[name]
        count = request.prompt_tokens + tokens - 1
        pages = torch.tensor(request.lease.pages)
        numbers = (pages[:, None] * 4 + torch.arange(4)).flatten()[:count]
        storage = engine.memory.pools.storage
        rows[name] = [part for pool in storage for layer in storage[pool] for part in parts(layer, numbers)]
    return rows


def parts(storage: torch.Tensor, numbers: torch.Tensor) -> list[torch.Tensor]:
    """Copies of what some rows of a pool are kept as."""
    if storage.dtype == torch.uint8 and storage.shape[1] == DEBUG.index_head_dim + 4:  # FP8 index rows
        values, scales = load_index_rows(storage, numbers, 4)
        return [values.view(torch.uint8), scales]
    return [storage[numbers]]


@pytest.mark.parametrize("rows", ["float32", "fp8"])
def test_a_batch_writes_the_same_bytes_as_each_request_alone(make, rows):
    """P32: no row of a request goes to another's pages, however many share the batch."""
    options = {"latent_rows": rows, "index_rows": rows, "prefix_cache": False, "pages": 96}
    params = replace(GREEDY, max_tokens=20)
    engine = make(**options)
    names = [engine.submit(prompt(length, length), params) for length in LENGTHS]
    together = rows_after(engine, names, 8)
    drain(engine)
    assert_idle(engine)
    for name, length in zip(names, LENGTHS, strict=True):
        engine.submit(prompt(length, length), params, name)
        alone = rows_after(engine, [name], 8)[name]
        assert all(map(torch.equal, together[name], alone))
        drain(engine)


def test_the_rotation_of_index_rows_is_the_engines_setting(make):
    """Other bytes, and the cache that the queries ask says so."""
    keys = []
    for rotate in (True, False):
        engine = make(index_rows="fp8", rotate_index_rows=rotate)
        assert engine.memory.paged.rotates_index is rotate
        name = engine.submit(prompt(9), GREEDY)
        keys.append(rows_after(engine, [name], 1)[name][-2])
        drain(engine)
    assert not torch.equal(*keys)


def test_the_order_of_pages_changes_nothing(make):
    """P20: pages in any permutation, of both pools alike, give the same tokens and log-probabilities."""
    answers = []
    for seed in range(4):
        engine = make(pages=96)
        order = torch.randperm(96, generator=torch.Generator().manual_seed(seed)).tolist()
        engine.memory.pools._free = order if seed else sorted(order)
        outputs = engine.generate([prompt(length, length) for length in LENGTHS], GREEDY)
        answers.append([answer(each) for each in outputs])
    assert answers[1:] == answers[:1] * 3
