"""Dense attention over ragged sequences against a loop over the queries in fp64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megaspan.ops.dense_attention import dense_attention

pytestmark = pytest.mark.usefixtures("poisoned_memory")
lengths = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=4)


def operands(new: list[int], total: list[int], heads=2, width=6, value_width=4, seed=0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((sum(new), heads, width), (sum(total), heads, width), (sum(total), heads, value_width))
    return [torch.randn(shape, generator=generator) for shape in shapes]


def by_loops(query: Tensor, key: Tensor, value: Tensor, new: list[int], total: list[int], scale: float):
    """The last query of a sequence sees all of its keys, the one before it all but the last, and so on."""
    query, key, value = query.double(), key.double(), value.double()
    outputs, first_query, first_key = [], 0, 0
    for queries, keys in zip(new, total, strict=True):
        for number in range(queries):
            seen = slice(first_key, first_key + keys - queries + number + 1)
            scores = torch.einsum("hd,khd->hk", query[first_query + number], key[seen]) * scale
            outputs.append(torch.einsum("hk,khv->hv", scores.softmax(-1), value[seen]))
        first_query, first_key = first_query + queries, first_key + keys
    return torch.stack(outputs)


@settings(max_examples=40)
@given(lengths, st.integers(1, 3), st.sampled_from([2, 4, 6]), st.integers(0, 9))
def test_ragged_with_past_equals_loops(lengths, heads, value_width, seed):
    new, total = [n for n, _ in lengths], [n + past for n, past in lengths]
    tensors = operands(new, total, heads, value_width=value_width, seed=seed)
    torch.testing.assert_close(
        dense_attention(*tensors, new, total, 0.4).double(),
        by_loops(*tensors, new, total, 0.4),
        rtol=1e-5,
        atol=1e-5,
    )


def test_bf16_is_close():
    new, total = [5, 1], [5, 9]
    tensors = [tensor.bfloat16() for tensor in operands(new, total)]
    output = dense_attention(*tensors, new, total, 0.4)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.double(), by_loops(*tensors, new, total, 0.4), rtol=2e-2, atol=2e-2)


def test_a_sequence_without_new_tokens_takes_no_part():
    new, total = [3, 0, 2], [3, 4, 6]
    query, key, value = operands(new, total)
    output = dense_attention(query, key, value, new, total, 0.4)
    kept = torch.cat((key[:3], key[7:])), torch.cat((value[:3], value[7:]))
    torch.testing.assert_close(output, dense_attention(query, *kept, [3, 2], [3, 6], 0.4))


def test_gradients_equal_those_of_the_loops():
    new, total = [4, 2], [4, 5]
    tensors = [tensor.requires_grad_() for tensor in operands(new, total)]
    target = operands(new, total, seed=1)[0][..., :4]
    (dense_attention(*tensors, new, total, 0.4) * target).sum().backward()
    gradients = [tensor.grad for tensor in tensors]
    for tensor in tensors:
        tensor.grad = None
    (by_loops(*tensors, new, total, 0.4) * target).sum().backward()
    for tensor, gradient in zip(tensors, gradients, strict=True):
        torch.testing.assert_close(gradient, tensor.grad, rtol=1e-4, atol=1e-5)


def test_what_is_hidden_does_not_matter():
    """A key and a value that come later must not reach the queries before them."""
    query, key, value = operands([5], [5])
    expected = dense_attention(query, key, value, [5], [5], 0.4)
    key[4], value[4] = 1e4, 1e4
    torch.testing.assert_close(dense_attention(query, key, value, [5], [5], 0.4)[:4], expected[:4])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("value_width", [32, 64])
def test_the_flash_kernel_equals_loops(value_width):
    new, total = [70, 1, 40], [70, 33, 129]
    tensors = [
        tensor.bfloat16() for tensor in operands(new, total, heads=4, width=64, value_width=value_width)
    ]
    output = dense_attention(*(tensor.cuda() for tensor in tensors), new, total, 0.1)
    torch.testing.assert_close(
        output.cpu().double(), by_loops(*tensors, new, total, 0.1), rtol=2e-2, atol=2e-2
    )
