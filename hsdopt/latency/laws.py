"""The law of the tokens that one verify pass gains, and its renewal process.

A pass over a draft of ``L`` tokens gains ``N = A + 1`` tokens, ``A`` the accepted prefix. Everything in
`hsdopt.latency` reads the law of ``N`` from here, whether acceptance is an iid rate or a survival curve.
"""

from __future__ import annotations

import numpy as np

from hsdopt.checks import Acceptance, FloatArray, as_survival, check_rate, is_rate


def token_law(acceptance: Acceptance, draft_length: int) -> FloatArray:
    """Return ``P(N = n)`` for ``n = 0..draft_length + 1`` (its first entry is 0).

    Parameters
    ----------
    acceptance
        An iid rate, or a survival curve that covers the draft.
    draft_length
        Tokens drafted per verify pass.

    Returns
    -------
    numpy.ndarray
        Shape ``[draft_length + 2]``.

    Raises
    ------
    InvalidArgumentError
        If the acceptance is invalid or its curve too short.

    Examples
    --------
    >>> token_law(0.5, 2).tolist()
    [0.0, 0.5, 0.25, 0.25]
    """
    survival = as_survival(acceptance, draft_length)
    if not is_rate(acceptance):
        return law_from_survival(survival)
    law = np.zeros(draft_length + 2)
    # (1 - a) a^m rather than a difference of two powers, which loses its digits as a nears 1
    law[1:-1] = (1.0 - check_rate(acceptance)) * survival[:-1]
    law[-1] = survival[-1]
    return law


def law_from_survival(survival: FloatArray) -> FloatArray:
    """Return ``P(N = n)`` for ``n = 0..L + 1`` from ``S[0..L]``, along the last axis.

    Examples
    --------
    >>> law_from_survival(np.array([1.0, 0.5, 0.25])).tolist()
    [0.0, 0.5, 0.25, 0.25]
    """
    ends = np.zeros((*survival.shape[:-1], 1))
    return np.concatenate([ends, survival[..., :-1] - survival[..., 1:], survival[..., -1:]], axis=-1)


def renewal_masses(law: FloatArray, tokens: int) -> FloatArray:
    """Return ``u[s]``, the chance that some pass ends with exactly ``s`` tokens held, ``s = 0..tokens - 1``.

    Parameters
    ----------
    law
        ``P(N = n)``, with no mass at 0.
    tokens
        How many values to return.

    Returns
    -------
    numpy.ndarray
        Shape ``[tokens]``; its cumulative sum is the expected number of passes until 1, 2, ... tokens are held.

    Examples
    --------
    >>> renewal_masses(np.array([0.0, 0.5, 0.5]), 3).tolist()
    [1.0, 0.5, 0.75]
    """
    masses = np.zeros(tokens)
    masses[:1] = 1.0
    for held in range(1, tokens):
        gains = law[1 : held + 1]
        masses[held] = gains @ masses[held - len(gains) : held][::-1]
    return masses
