"""Rejection sampling in one launch: the same tokens as the reference, bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megaspan.ops.verify import match_samples_reference, verify_reference
from tests.ops.test_verify import batches, nothing_left, starts_of

gpu = pytest.importorskip("megaspan.ops.verify.gpu", reason="no Triton here")

VOCABULARY = 154_880


def assert_is_reference(batch: tuple, device: str, **configuration: int) -> None:
    there = [None if part is None else part.to(device) for part in batch]
    expected = verify_reference(*batch)
    for _ in range(2):  # whichever program arrives last
        for actual, wanted in zip(gpu.verify_gpu(*there, **configuration), expected, strict=True):
            assert torch.equal(actual.cpu(), wanted)


@settings(max_examples=15)
@given(batch=batches(), block=st.sampled_from([16, 64]), blocks=st.integers(1, 2))
def test_it_is_the_reference(kernel_device, batch, block, blocks):
    """Parts of one block and of two; vocabularies below, at and above multiples of them."""
    assert_is_reference(batch, kernel_device, block=block, blocks=blocks)


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_draws_from_every_block(kernel_device, blocks):
    """The first and the last number of ids at the blocks' edges, and 1, to which a number may be rounded."""
    ids = torch.tensor([0, 15, 16, 32, 47, 63])
    ends = torch.cat([ids.double() / 64, (ids.double() + 1) / 64 - 2**-53])
    ends[-1] = 1
    batch = torch.full((12, 64), 1 / 64), None, ids[:0], starts_of([0] * 12), ends[:0], ends
    assert torch.equal(verify_reference(*batch)[1], ids.repeat(2))
    assert_is_reference(batch, kernel_device, block=16, blocks=blocks)


def test_a_rejection_where_nothing_is_left(kernel_device):
    assert_is_reference(nothing_left(), kernel_device, block=16, blocks=1)


@pytest.mark.parametrize("rejected", [15, 16, 17, 40])
def test_more_drafts_than_are_looked_at_together(kernel_device, rejected):
    p = torch.full((41, 5), 0.2)
    tokens = torch.arange(40) % 5
    accept = torch.zeros(40).double()
    accept[rejected:] = 0.99
    batch = p, None, tokens, starts_of([40]), accept, torch.linspace(0, 0.99, 41).double()
    assert verify_reference(*batch)[0].tolist() == [rejected]
    assert_is_reference(batch, kernel_device, block=16, blocks=1)


def test_rows_that_are_not_named_are_not_read(kernel_device):
    """NaN in every row but those drawn from, and at the ids that no draft names in the accepted ones.

    The token behind drafts that are all accepted has none: the draft row that follows, another sequence's,
    takes nothing from it.
    """
    p, q = torch.full((8, 40), torch.nan), torch.full((6, 40), torch.nan)
    tokens = torch.tensor([6, 7, 8, 3, 4, 5])  # three accepted; one accepted and one rejected
    for row, draft in ((0, 0), (1, 1), (2, 2), (4, 3)):
        p[row, tokens[draft]] = q[draft, tokens[draft]] = 1
    p[3], q[3, 9] = torch.eye(40)[9] / 2 + torch.eye(40)[30] / 2, 1
    p[5], q[4] = torch.full((40,), 1 / 40), torch.eye(40)[4]
    batch = p, q, tokens, starts_of([3, 3]), torch.full((6,), 0.5).double(), torch.full((8,), 0.3).double()
    assert [part.tolist() for part in verify_reference(*batch)] == [[3, 1], [9, 12]]
    assert_is_reference(batch, kernel_device, block=16, blocks=1)


def test_tensors_that_are_views(kernel_device):
    """Probabilities of a padded vocabulary, uniforms side by side: 0 accepts all drafts, 0.9 none."""
    p, q = torch.full((3, 50), 1 / 33), torch.full((2, 60), torch.nan)
    q[:, :33] = torch.eye(33)[[5, 6]]
    uniforms = torch.tensor([[0.0, 0.9]]).double().repeat(3, 1)
    tokens = torch.tensor([[5, 1], [6, 1]])[:, 0]
    batch = p[:, :33], q[:, :33], tokens, starts_of([2]), uniforms[:2, 0], uniforms[:, 1]
    assert [part.tolist() for part in verify_reference(*batch)] == [[2], [29]]
    assert_is_reference(batch, kernel_device, block=16, blocks=1)


def test_no_sequences(kernel_device):
    empty = torch.zeros(0, dtype=torch.int64, device=kernel_device)
    starts = torch.zeros(1, dtype=torch.int32, device=kernel_device)
    none = torch.zeros(0, 5, device=kernel_device)
    assert gpu.verify_gpu(none, none, empty, starts, empty.double(), empty.double())[1].shape == (0,)
    assert gpu.match_samples_gpu(empty, empty, starts)[1].shape == (0,)


@settings(max_examples=15)
@given(counts=st.lists(st.integers(0, 20), min_size=1, max_size=4), seed=st.integers(0, 1 << 30))
def test_matched_samples_are_the_reference(kernel_device, counts, seed):
    generator = torch.Generator().manual_seed(seed)
    drafts = torch.randint(0, 2, (sum(counts),), generator=generator)
    starts = starts_of(counts)
    samples = torch.randint(0, 2, (sum(counts) + len(counts),), generator=generator)
    for sequence, (first, count) in enumerate(zip(starts.tolist(), counts, strict=False)):
        agreeing = int(torch.randint(0, count + 1, (1,), generator=generator))
        samples[first + sequence : first + sequence + agreeing] = drafts[first : first + agreeing]
    expected = match_samples_reference(samples, drafts, starts)
    there = (part.to(kernel_device) for part in (samples, drafts, starts))
    for actual, wanted in zip(gpu.match_samples_gpu(*there), expected, strict=True):
        assert torch.equal(actual.cpu(), wanted)


# --- at the model's widths --------------------------------------------------------------------------------


def wide_batch(sequences: int, most_drafts: int, vocabulary: int) -> tuple[Tensor, ...]:
    """Softmax rows of normal logits; the drafts' are the target's with some noise."""
    generator = torch.Generator("cuda").manual_seed(sequences)
    counts = torch.arange(sequences) % (most_drafts + 1)
    starts = starts_of(counts.tolist())
    drafts, rows = int(counts.sum()), int(counts.sum()) + sequences
    logits = torch.randn(rows, vocabulary, generator=generator, device="cuda").mul_(3)
    of_draft = torch.arange(drafts) + torch.arange(sequences).repeat_interleave(counts)
    noise = torch.randn(drafts, vocabulary, generator=generator, device="cuda")
    q = (logits[of_draft.cuda()] + noise).softmax(-1)
    tokens = torch.multinomial(q, 1, generator=generator)[:, 0] if drafts else starts[:0].long().cuda()
    uniforms = (
        torch.rand(number, generator=generator, dtype=torch.float64, device="cuda")
        for number in (drafts, rows)
    )
    return logits.softmax(-1), q, tokens, starts.cuda(), *uniforms


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("vocabulary", [VOCABULARY, VOCABULARY - 1])
@pytest.mark.parametrize(("sequences", "most_drafts"), [(1, 0), (3, 7), (64, 15)])
def test_it_is_the_reference_at_real_width(sequences, most_drafts, vocabulary):
    batch = wide_batch(sequences, most_drafts, vocabulary)
    on_cpu = [part.cpu() for part in batch]
    for draft in (batch[1], None):
        expected = verify_reference(on_cpu[0], None if draft is None else on_cpu[1], *on_cpu[2:])
        for _ in range(3):
            for actual, wanted in zip(gpu.verify_gpu(batch[0], draft, *batch[2:]), expected, strict=True):
                assert torch.equal(actual.cpu(), wanted)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_rows_beyond_32_bits_and_a_captured_graph():
    """The last sequence's rows begin past 2**31 elements; a replay takes new tokens from the same tensors."""
    rows = (1 << 31) // VOCABULARY + 3
    p = torch.full((rows, VOCABULARY), torch.nan, device="cuda")
    p[rows - 2 :] = 0
    p[rows - 2, 7], p[rows - 1, 9], p[0] = 1.0, 1.0, p[rows - 1]
    drafts = rows - 2  # of two sequences
    tokens = torch.full((drafts,), -1, device="cuda")
    starts = torch.tensor([0, drafts - 1, drafts], dtype=torch.int32, device="cuda")
    uniforms = torch.zeros(drafts, device="cuda").double(), torch.zeros(rows, device="cuda").double()
    arguments = p, None, tokens, starts, *uniforms
    assert [part.tolist() for part in gpu.verify_gpu(*arguments)] == [[0, 0], [9, 7]]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        accepted, following = gpu.verify_gpu(*arguments)
    tokens[-1] = 7
    for _ in range(2):
        graph.replay()
        assert (accepted.tolist(), following.tolist()) == ([0, 1], [9, 9])
