"""What would make the host wait for a device is found, and nothing else is."""

import pytest
import torch

from megaspan.engine.waits import Waits
from megaspan.ops.rows import RowTable

STATES = torch.arange(6.0)


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        (lambda: STATES[2].item(), "aten._local_scalar_dense.default"),
        (lambda: bool(STATES.sum() > 0), "aten._local_scalar_dense.default"),
        (lambda: STATES.to("meta"), "aten._to_copy.default"),
        (lambda: torch.empty(6, device="meta").copy_(STATES), "aten.copy_.default"),
        (lambda: STATES[STATES > 2], "aten.index.Tensor"),
        (lambda: STATES.clone().index_put_((STATES > 2,), STATES[0]), "aten.index_put_.default"),
        (lambda: STATES.nonzero(), "aten.nonzero.default"),
        (lambda: torch.equal(STATES, STATES), "aten.equal.default"),
    ],
)
@torch.inference_mode()
def test_what_waits_is_found(operation, name):
    with Waits("cpu") as waits:
        operation()
    assert waits.found == [name]
    with Waits("cuda") as others:
        operation()
    assert others.found == []


@torch.inference_mode()
def test_what_only_launches_is_not():
    with Waits("cpu") as waits:
        table = RowTable(torch.tensor([[0, 8, 4]]), page_size=4)
        places = table.rows(torch.zeros(2, dtype=torch.int64), torch.tensor([[0, 9], [5, -1]]))
        STATES.double().to(torch.bfloat16)[places.clamp(0, 5)].masked_fill_(places < 0, 1.0)
        torch.empty(6).copy_(STATES)
        STATES.topk(3)
    assert waits.found == []
