"""Rejection sampling of draft tokens over the whole vocabulary, in one launch."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from megaspan.bench.kernels.registry import Case, Scale, Trial, WrongResult, operation
from megaspan.ops.verify import verify, verify_reference

DRAFTS = 5  # of each sequence


@operation("verify")
def verify_cases(scale: Scale) -> Iterator[Case]:
    for batch in (scale.batches[0], 2 * scale.batches[-1]):
        yield Case(
            name=f"verify, {batch} sequence{'s' * (batch > 1)} of {DRAFTS} drafts",
            make=partial(_make, scale, batch),
            unit="µs",
            nbytes=2 * 4 * batch * scale.config.vocab_size,  # the rows that the next token is drawn from
            decode=True,
        )


def _operands(batch: int, vocabulary: int, device: torch.device) -> tuple[Tensor, ...]:
    """Drafts drawn from one random distribution and verified by another that is not far from it."""
    drafts = DRAFTS * batch
    logits = 2 * torch.randn(drafts + batch, vocabulary, device=device)
    target = logits.softmax(1)
    of_drafts = torch.arange(drafts, device=device)
    near = logits[of_drafts + of_drafts // DRAFTS] + 0.5 * torch.randn(drafts, vocabulary, device=device)
    draft = near.softmax(1)
    starts = torch.arange(0, drafts + 1, DRAFTS, dtype=torch.int32, device=device)
    uniforms = torch.rand(2 * drafts + batch, dtype=torch.float64, device=device)
    chosen = torch.multinomial(draft, 1)[:, 0]
    return target, draft, chosen, starts, uniforms[:drafts], uniforms[drafts:]


def _make(scale: Scale, batch: int, device: torch.device) -> Trial:
    vocabulary = scale.config.vocab_size
    copies = scale.copies(4 * 2 * (DRAFTS + 1) * batch * vocabulary)
    made = [_operands(batch, vocabulary, device) for _ in range(copies)]

    def check() -> None:
        expected = verify_reference(*(operand.cpu() for operand in made[0]))
        for actual, wanted in zip(verify(*made[0]), expected, strict=True):
            if not torch.equal(actual.cpu(), wanted):
                raise WrongResult("other tokens come out than of the reference")

    return Trial([partial(verify, *operands) for operands in made], check)
