"""Rotary embedding on a GPU: the bits of the compiled version, far positions, results in place of views."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megaspan.ops.rotation import _frequencies as frequencies
from megaspan.ops.rotation import rotate, rotate_reference, turns, turns_reference

gpu = pytest.importorskip("megaspan.ops.rotation.gpu", reason="no Triton here")
pytestmark = pytest.mark.usefixtures("poisoned_memory")
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
CPU = torch.device("cpu")


def make_states(
    tokens: int, heads: int | None, width: int, dtype: torch.dtype, device: str = "cpu"
) -> Tensor:
    """Cut from a wider projection that holds NaN beside them; without heads where these are None."""
    shape = (tokens, width + 3) if heads is None else (tokens, heads, width + 3)
    wide = torch.full(shape, torch.nan)
    wide[..., 2 : 2 + width] = torch.randn(*shape[:-1], width, generator=torch.Generator().manual_seed(0))
    return wide.to(device, dtype)[..., 2 : 2 + width]


def positions_of(tokens: int) -> Tensor:
    return torch.randint(1 << 20, (tokens,), generator=torch.Generator().manual_seed(1))


def rotated_in_words(states: Tensor, turn: Tensor) -> Tensor:
    """Each product and the sum rounded once, on the CPU."""
    rotary, wide = turn.shape[-1], states.float()
    turn = turn if states.dim() == 2 else turn[:, :, None]
    pairs = wide[..., :rotary]
    mirrored = pairs.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    turned = pairs * turn[:, 0] + mirrored * turn[:, 1]
    return torch.cat((turned, wide[..., rotary:]), -1).to(states.dtype)


@pytest.mark.parametrize("width", [2, 18, 64])
def test_turns_equal_torchs_at_far_positions(kernel_device, width):
    """A float32 angle would be wrong by 0.01 rad at the last."""
    positions = torch.cat((torch.arange(5), positions_of(20), torch.tensor([1048575])))
    expected = turns_reference(positions, frequencies(width, 8e6, CPU))
    at_hand = frequencies(width, 8e6, torch.device(kernel_device))
    actual = gpu.turns_gpu(positions.to(kernel_device), at_hand)
    torch.testing.assert_close(actual.cpu(), expected, rtol=2**-23, atol=0)
    assert gpu.turns_gpu(positions[:0].to(kernel_device), at_hand).shape == (0, 2, width)


@settings(max_examples=25)
@given(
    st.integers(0, 4),
    st.sampled_from([None, 1, 3]),
    st.sampled_from([2, 4, 16, 18]),
    st.sampled_from([0, 1, 16, 33]),
    dtypes,
)
def test_rotate_has_the_bits_of_the_cpu_and_keeps_the_rest(kernel_device, tokens, heads, rotary, rest, dtype):
    states = make_states(tokens, heads, rotary + rest, dtype)
    turn = turns(positions_of(tokens), rotary, 1e4)
    expected = rotated_in_words(states, turn)
    if states.numel():
        torch.testing.assert_close(expected, rotate_reference(states, turn), rtol=2**-7, atol=1e-6)
    there = make_states(tokens, heads, rotary + rest, dtype, kernel_device)
    actual = gpu.rotate_gpu(there, turn.to(kernel_device))
    assert actual.dtype == dtype
    assert actual.cpu().equal(expected)


def test_what_is_not_rotated_need_not_be_finite(kernel_device):
    states = torch.ones(1, 8)
    states[0, 5], states[0, 6] = torch.inf, torch.nan
    actual = gpu.rotate_gpu(states.to(kernel_device), turns(positions_of(1), 4, 1e4).to(kernel_device)).cpu()
    assert actual[0, :5].isfinite().all()
    assert actual[0, 5].isinf()
    assert actual[0, 6].isnan()
    assert actual[0, 7] == 1


def test_the_result_can_go_to_the_end_of_wider_rows(kernel_device):
    states = make_states(2, 3, 8, torch.bfloat16).to(kernel_device)
    turn = turns(positions_of(2), 8, 1e4).to(kernel_device)
    query = torch.full((2, 3, 20), torch.nan, dtype=torch.bfloat16, device=kernel_device)
    assert gpu.rotate_gpu(states, turn, out=query[..., 12:]).data_ptr() == query[..., 12:].data_ptr()
    assert query[..., 12:].equal(gpu.rotate_gpu(states, turn))
    assert query[..., :12].isnan().all()
    with pytest.raises(ValueError, match="out"):
        gpu.rotate_gpu(states, turn, out=query)


def test_shapes_that_do_not_fit_are_refused(kernel_device):
    turn = torch.zeros(2, 2, 8, device=kernel_device)
    for states in (torch.zeros(3, 8, device=kernel_device), torch.zeros(2, 6, device=kernel_device)):
        with pytest.raises(ValueError, match="do not fit"):
            gpu.rotate_gpu(states, turn)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
class TestAtRealWidths:
    @pytest.mark.parametrize(("heads", "width"), [(64, 64), (32, 128), (None, 64)])
    def test_bits_of_the_cpu_whatever_the_other_tokens(self, heads, width):
        states = make_states(300, heads, width, torch.bfloat16)
        turn = turns(positions_of(300).cuda(), 64, 8e6)
        together = rotate(states.cuda(), turn)
        assert together.cpu().equal(rotated_in_words(states, turn.cpu()))
        for few in (slice(0, 1), slice(7, 24)):
            assert turns(positions_of(300)[few].cuda(), 64, 8e6).equal(turn[few])
            assert rotate(states.cuda()[few], turn[few]).equal(together[few])

    def test_gradients_take_pytorchs_way(self):
        states = torch.randn(4, 3, 10, device="cuda").requires_grad_()
        (rotate(states, turns(positions_of(4).cuda(), 8, 1e4)).square().sum() / 2).backward()
        torch.testing.assert_close(states.grad, states.detach())

    def test_past_2_to_the_31_numbers(self):
        tokens = (1 << 31) // 4096 + 2
        states = torch.empty(tokens, 64, 64, dtype=torch.bfloat16, device="cuda").fill_(torch.nan)
        states[-1] = torch.randn(64, 64)
        turn = turns(torch.arange(tokens, device="cuda"), 64, 8e6)
        last = rotate(states, turn)[-1:].cpu()
        assert last.equal(rotated_in_words(states[-1:].cpu(), turn[-1:].cpu()))
