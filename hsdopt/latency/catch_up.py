"""The law of the tokens that a model of a stack has to catch up with when a request reaches it.

A model's cache ends where it last read. Between two requests its verifier, and every level above, may have
accepted tokens that it has not read: its own last token after a full acceptance, the correction or bonus token
of each level. Its *deficit* is how many tokens of the output so far its cache lacks; 1 is the usual case.

With acceptances independent from level to level, the deficit is followed exactly, one level at a time:

- a verify pass that accepts ``A`` of ``L`` tokens leaves ``1 + max(0, d - (L - A))`` of a deficit ``d``;
- passing up ``T`` of ``h`` tokens held leaves ``max(0, d - (h - T))``;
- the next request comes after a pass that is not the last of its level's own request, or after any pass of the
  target.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np

from hsdopt.checks import Acceptance, CostFunction, FloatArray, as_survival, check_choice
from hsdopt.latency.laws import law_from_survival, renewal_masses

CatchUp: TypeAlias = Literal["none", "parallel", "sequential"]


def check_catch_up(catch_up: str) -> None:
    """Raise an error unless the word is a way to pay for missing tokens.

    Raises
    ------
    InvalidArgumentError
        If it is not.
    """
    check_choice(catch_up, "catch_up", ("none", "parallel", "sequential"))


def catch_up_seconds(pending: FloatArray, curve: CostFunction, draft_length: int, catch_up: CatchUp) -> float:
    """Return what requests cost more for the tokens that a model lacks beyond the first.

    Parameters
    ----------
    pending
        ``[p]``: how many requests find the model lacking ``p`` tokens.
    curve
        Cost of one of its passes.
    draft_length
        Tokens that its first pass verifies; 0 for a model that verifies nothing.
    catch_up
        "none", "parallel" (the first pass reads them too) or "sequential" (one more pass each).

    Returns
    -------
    float
        In the unit of the cost.
    """
    if catch_up == "none":
        return 0.0
    extra = [(float(pending[lacking]), int(lacking) - 1) for lacking in np.flatnonzero(pending) if lacking > 1]
    if catch_up == "sequential":
        return sum(requests * more * curve(1) for requests, more in extra)
    usual = draft_length + 1
    return sum(requests * (curve(usual + more) - curve(usual)) for requests, more in extra)


def pending_law(
    passed_up: FloatArray,
    acceptances: Sequence[Acceptance],
    draft_lengths: Sequence[int],
    passes: Sequence[float] | FloatArray,
    *,
    truncate: bool,
) -> FloatArray:
    """Return the law of the tokens that a model lacks when a request reaches it.

    Parameters
    ----------
    passed_up
        ``[d, n]``: the chance that the model lacks ``d`` of the ``n`` tokens that it passes up.
    acceptances
        The acceptance of its drafts, then those of each level above it, by the next; the last is the target's.
    draft_lengths
        The tokens that each level between it and the target owes per request.
    passes
        The passes per emitted token of each level above it, the target last.
    truncate
        Whether a level passes up exactly what it owes, or everything it holds.

    Returns
    -------
    numpy.ndarray
        ``[p]`` is the chance of ``p`` tokens; at least 1 is lacking.
    """
    pending, joint = np.zeros(len(passed_up) + len(acceptances)), passed_up
    for acceptance, owed, requests in zip(acceptances[:-1], draft_lengths, passes[1:], strict=True):
        going_on, joint = _within_request(after_pass(joint, acceptance), owed, truncate=truncate)
        pending[: len(going_on)] += requests * going_on
    pending += passes[-1] * after_pass(joint, acceptances[-1]).sum(axis=1)
    return np.asarray(pending / pending.sum())


def drafted(law: FloatArray) -> FloatArray:
    """Return ``[d, n]`` of a model that verifies nothing: it has not read the last of the ``n`` tokens it drew."""
    return np.stack([np.zeros(len(law)), law])


def verified(law: FloatArray, owed: int, *, truncate: bool) -> FloatArray:
    """Return ``[d, n]`` of a verifier, which has not read the correction or bonus token of its last pass."""
    return _within_request(drafted(law), owed, truncate=truncate)[1]


def after_pass(joint: FloatArray, acceptance: Acceptance) -> FloatArray:
    """Return ``[d, n]`` once the ``[d, n]`` passed up is verified: ``d`` lacking after a pass that gained ``n``."""
    deficits, longest = joint.shape[0], joint.shape[1] - 1
    survival = as_survival(acceptance, longest)
    after = np.zeros((deficits + 1, longest + 2))
    for lacking, length in np.argwhere(joint):
        law = law_from_survival(survival[: length + 1])
        gained = np.arange(1, length + 2)
        left = 1 + np.maximum(0, lacking - (length + 1 - gained))
        np.add.at(after, (left, gained), joint[lacking, length] * law[1:])
    return after


def _within_request(after: FloatArray, owed: int, *, truncate: bool) -> tuple[FloatArray, FloatArray]:
    """Return deficits after the passes that do not end a request, and ``[d, n]`` as the request is passed up."""
    going_on = np.zeros(len(after))
    held = np.zeros((len(after), owed + after.shape[1] - 1))
    for before, mass in enumerate(renewal_masses(after.sum(axis=0), owed)):
        short = owed - before
        going_on += mass * after[:, :short].sum(axis=1)
        held[:, owed : before + after.shape[1]] += mass * after[:, short:]
    return going_on, _cut(held, owed) if truncate else held


def _cut(held: FloatArray, owed: int) -> FloatArray:
    """Return ``[d, n]`` once all tokens beyond those owed are discarded."""
    passed_up = np.zeros((len(held), owed + 1))
    for surplus in range(held.shape[1] - owed):
        left = np.maximum(0, np.arange(len(held)) - surplus)
        np.add.at(passed_up[:, owed], left, held[:, owed + surplus])
    return passed_up
