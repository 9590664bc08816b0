"""Rotary embedding: the compiled version against PyTorch's and exact arithmetic, far positions, gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megaspan.ops.rotation import _frequencies as frequencies
from megaspan.ops.rotation import native, rotate, rotate_reference, turns, turns_reference

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.skipif(native._library() is None, reason="no compiler here"),
]
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
some = settings(max_examples=30)
CPU = torch.device("cpu")


def make_states(tokens: int, heads: int | None, width: int, dtype: torch.dtype) -> Tensor:
    """Cut from a wider projection; without heads where these are None."""
    shape = (tokens, width + 3) if heads is None else (tokens, heads, width + 3)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)[..., 2 : 2 + width]


def positions_of(tokens: int) -> Tensor:
    return torch.randint(1 << 20, (tokens,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("theta", [1e4, 8e6])
@pytest.mark.parametrize("width", [2, 16, 64])
def test_turns_equal_torchs_to_the_last_place(width, theta):
    positions = torch.cat((torch.arange(300), positions_of(300)))
    actual, expected = (
        turns(positions, width, theta),
        turns_reference(positions, frequencies(width, theta, CPU)),
    )
    torch.testing.assert_close(actual, expected, rtol=2**-23, atol=0)


@some
@given(
    st.integers(0, 9),
    st.sampled_from([None, 1, 5]),
    st.sampled_from([2, 4, 16, 18, 64]),
    st.sampled_from([0, 1, 16, 33]),
    dtypes,
)
def test_rotate_equals_torch_and_keeps_the_rest(tokens, heads, rotary, rest, dtype):
    states, turn = make_states(tokens, heads, rotary + rest, dtype), turns(positions_of(tokens), rotary, 1e4)
    actual, expected = native.rotate_native(states, turn), rotate_reference(states, turn)
    tolerance = 1e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=1e-6)
    assert actual[..., rotary:].equal(states[..., rotary:])
    assert actual.dtype == dtype


def test_each_product_and_the_sum_is_rounded_once():
    """The same operations as plain PyTorch, so the same bits."""
    states, turn = make_states(50, None, 16, torch.float32), turns(positions_of(50), 16, 1e4)
    mirrored = states.unflatten(1, (-1, 2)).flip(-1).flatten(1)
    assert native.rotate_native(states, turn).equal(states * turn[:, 0] + mirrored * turn[:, 1])


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "one by one"])
@some
@given(st.integers(1, 40), st.data(), dtypes, st.sampled_from([2, 10, 16]))
def test_a_token_does_not_depend_on_the_others(compiled, tokens, data, dtype, width):
    """Bit for bit."""
    first = data.draw(st.integers(0, tokens - 1))
    few = slice(first, data.draw(st.integers(first + 1, tokens)))
    states, positions = make_states(tokens, 3, width + 1, dtype), positions_of(tokens)
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(native, "available", lambda *_: False)
            patch.setattr(native, "can_take", lambda *_: False)
        together, alone = (
            turns(positions, width, 1e4, invariant=True),
            turns(positions[few], width, 1e4, invariant=True),
        )
        assert alone.equal(together[few])
        assert rotate(states[few], alone, invariant=True).equal(rotate(states, together, invariant=True)[few])


def test_threads_do_not_matter():
    states, turn = make_states(300, 7, 64, torch.float32), turns(positions_of(300), 64, 1e4)
    assert states.numel() > native.WORTH_THREADS
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(native.rotate_native(states, turn))
    finally:
        torch.set_num_threads(before)
    assert results[1].equal(results[0])
    assert results[2].equal(results[0])


def test_gradients_flow():
    """A rotation keeps lengths, so the gradient of half the squared length is the states themselves."""
    states = torch.randn(4, 3, 10).requires_grad_()
    (rotate(states, turns(positions_of(4), 8, 1e4)).square().sum() / 2).backward()
    torch.testing.assert_close(states.grad, states.detach())


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="do not fit"):
        native.rotate_native(torch.zeros(3, 8), turns(torch.arange(2), 8, 1e4))
    with pytest.raises(ValueError, match="do not fit"):
        native.rotate_native(torch.zeros(2, 6), turns(torch.arange(2), 8, 1e4))
