"""Verify draft tokens: rejection sampling, which leaves the target's distribution exact.

Leviathan et al. 2023 (arXiv 2211.17192), algorithm 1, for a ragged batch. Probabilities become whole numbers
before they are added up (see `reference`), so a draw is the same on every device.

Shapes: S sequences, D drafts of all of them, V vocabulary. Sequence s has the drafts draft_starts[s] to
draft_starts[s + 1] and one row more of the target, for the token after its last draft; so there are R = D + S
rows, and the target's row of draft d is row d + s.
"""

from torch import Tensor

from megaspan.ops.verify.reference import match_samples_reference, verify_reference

__all__ = ["match_samples", "match_samples_reference", "verify", "verify_reference"]


def verify(
    target: Tensor,
    draft: Tensor | None,
    draft_tokens: Tensor,
    draft_starts: Tensor,
    accept_uniforms: Tensor,
    draw_uniforms: Tensor,
) -> tuple[Tensor, Tensor]:
    """Accept a prefix of each sequence's drafts and draw the token that follows it.

    A draft x is accepted if u q(x) < p(x). The first that is not is replaced by a draw from max(p - q, 0),
    normalised; where all are accepted, the next token is drawn from the target's last row.

    Each token of a request may own two numbers of a counter-based stream: whether it is accepted, and what is
    drawn in its place. Both are used up only by the token that comes out, so that they may be made by its
    index in the request, whatever the bursts; what the draft layer draws with must be a third.

    Args:
        target: [R, V] fp32, probabilities after temperature, top-p and all else; each row adds up to 1. Those
            of a greedy request are 1 at its best token.
        draft: [D, V] fp32, what the drafts were drawn from. None: q is 1 at the draft, however it was chosen;
            it is accepted with probability p(x) (target-only acceptance), and the output is as exact.
        draft_tokens: [D] int64. An id outside the vocabulary is no draft: the drafts end there, and the next
            token is drawn from the target. So drafts can be padded with -1 to a shape that does not change.
        draft_starts: [S + 1] int32, from 0 to D.
        accept_uniforms: [D] fp64 in [0, 1). draw_uniforms: [R] fp64 in [0, 1), each for a token that is drawn
            at this row.

    Returns:
        How many drafts are accepted, [S] int32, and the token after them, [S] int64: -1 where the row of the
        target has nothing to draw. A token of probability 0 never comes out.

    Raises:
        ValueError: shapes disagree.
    """
    _check(target, draft, draft_tokens, draft_starts, accept_uniforms, draw_uniforms)
    arguments = (target, draft, draft_tokens, draft_starts, accept_uniforms, draw_uniforms)
    if target.is_cuda:
        from megaspan.ops.verify.gpu import verify_gpu

        return verify_gpu(*arguments)
    return verify_reference(*arguments)


def match_samples(samples: Tensor, draft_tokens: Tensor, draft_starts: Tensor) -> tuple[Tensor, Tensor]:
    """Accept drafts as long as they are what the target itself draws; the first other draw replaces them.

    Target-only acceptance with the tokens of a run without drafts: a seed's output stays the same, and with
    each row's best token for samples this is greedy decoding.

    samples: [R] int64, a token from each row of the target. draft_tokens: [D] int64. draft_starts: [S + 1]
    int32. Returns the accepted counts [S] int32 and the tokens after them [S] int64.
    """
    if samples.is_cuda:
        from megaspan.ops.verify.gpu import match_samples_gpu

        return match_samples_gpu(samples, draft_tokens, draft_starts)
    return match_samples_reference(samples, draft_tokens, draft_starts)


def _check(
    target: Tensor,
    draft: Tensor | None,
    draft_tokens: Tensor,
    draft_starts: Tensor,
    accept_uniforms: Tensor,
    draw_uniforms: Tensor,
) -> None:
    rows, drafts, sequences = len(target), len(draft_tokens), len(draft_starts) - 1
    if rows != drafts + sequences:
        raise ValueError(
            f"target has {rows} rows: give one for each of {drafts} drafts and {sequences} sequences"
        )
    if draft is not None and draft.shape != (drafts, target.shape[1]):
        raise ValueError(f"draft is {list(draft.shape)}: give [D, V] = {[drafts, target.shape[1]]}")
    if accept_uniforms.shape != (drafts,) or draw_uniforms.shape != (rows,):
        raise ValueError(
            f"accept_uniforms {list(accept_uniforms.shape)} and draw_uniforms {list(draw_uniforms.shape)}"
            f" must be [{drafts}] and [{rows}]"
        )
