"""The summary of logits: right, sound, and the same bits for a row whatever stands beside it."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megaspan.ops.logits import (
    LogitSummary,
    logit_summary,
    logit_summary_native,
    logit_summary_reference,
    native,
)
from megaspan.ops.logits.native import supports

versions = pytest.mark.parametrize("version", [logit_summary_native, logit_summary_reference])


def random_logits(rows: int, width: int, seed: int = 0, scale: float = 5.0) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * scale


def equal(a: LogitSummary, b: LogitSummary) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in LogitSummary.__annotations__)


def test_there_is_a_compiled_version_here():
    assert supports(torch.zeros(1, 3))


@versions
@pytest.mark.parametrize("width", [1, 7, 16, 17, 97, 1003, 12288])
def test_best_and_total_are_those_of_a_plain_loop(version, width):
    logits = random_logits(5, width)
    summary = version(logits, width)
    assert summary.best_ids.tolist() == logits.argmax(-1).tolist()
    assert summary.best.tolist() == logits.amax(-1).double().tolist()
    assert np.allclose(summary.log_totals, logits.double().logsumexp(-1).numpy(), rtol=0, atol=2e-6)
    assert not summary.failed.any()


@versions
@given(width=st.integers(2, 70), seed=st.integers(0, 1000), data=st.data())
def test_padding_is_never_best_but_counts_in_the_total(version, width, seed, data):
    vocabulary = data.draw(st.integers(1, width))
    logits = random_logits(3, width, seed)
    logits[:, vocabulary:] += 20
    summary = version(logits, vocabulary)
    assert summary.best_ids.tolist() == logits[:, :vocabulary].argmax(-1).tolist()
    assert np.allclose(summary.log_totals, logits.double().logsumexp(-1).numpy(), rtol=0, atol=2e-5)
    masked = logits.clone()
    masked[:, vocabulary:] = -torch.inf
    assert not version(masked, vocabulary).failed.any()


@versions
def test_the_lowest_id_is_best_among_equals(version):
    logits = torch.zeros(2, 40)
    logits[1, [5, 21, 39]] = 3.0
    assert version(logits, 40).best_ids.tolist() == [0, 5]


@versions
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 15, 16, 31, 32, 36])
def test_a_row_that_is_not_finite_fails_alone(version, value, place):
    logits = random_logits(3, 37)
    logits[1, place] = value
    assert version(logits, 37).failed.tolist() == [False, True, False]


@versions
def test_a_bad_number_in_the_padding_fails_the_row(version):
    logits = random_logits(2, 40)
    logits[0, 38], logits[1, 39] = torch.nan, torch.inf
    assert version(logits, 35).failed.tolist() == [True, True]


@given(rows=st.integers(1, 65), width=st.sampled_from([97, 1003]), threads=st.integers(1, 3), data=st.data())
def test_a_rows_bits_do_not_depend_on_the_others(rows, width, threads, data):
    logits = random_logits(rows, width, seed=rows)
    chosen = data.draw(st.integers(0, rows - 1))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole, alone = logit_summary(logits, width), logit_summary(logits[chosen : chosen + 1], width)
    finally:
        torch.set_num_threads(before)
    row = LogitSummary(*(getattr(whole, n)[chosen : chosen + 1] for n in LogitSummary.__annotations__))
    assert equal(row, alone)


def test_rows_may_be_apart_in_memory():
    wide = random_logits(4, 64)
    assert equal(logit_summary(wide[:, 8:50], 40), logit_summary(wide[:, 8:50].clone(), 40))


def test_a_vocabulary_that_rows_do_not_have_is_refused():
    with pytest.raises(ValueError, match="vocabulary"):
        logit_summary(torch.zeros(2, 5), 6)


def test_no_thread_is_woken_that_has_no_row(monkeypatch):
    """One row of a large vocabulary is one thread's work: a second one would only be waited for."""
    asked = []
    monkeypatch.setattr(native, "_function", lambda: lambda call: asked.append(call._obj.threads))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    for rows in (1, 3, 20):
        logit_summary_native(torch.zeros(rows, 200_000), 200_000)
    assert asked == [1, 3, 8]
