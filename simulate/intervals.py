"""How far out to read the percentiles of a bootstrap over few prompts."""

from __future__ import annotations

import math

from scipy.stats import norm
from scipy.stats import t as student

__all__ = ["expanded_tail"]


def expanded_tail(count: int, confidence: float) -> float:
    """Return the share of bootstrap means to cut off at each end, for an interval from `count` prompts.

    The plain share is too large for few prompts: it is that of Student's t and of sqrt(n / (n - 1)) instead (Hesterberg
    2015, The American Statistician 69, 371-386). With a single prompt nothing is cut off.

    Examples
    --------
    >>> round(expanded_tail(6, 0.95), 4), round(expanded_tail(1000, 0.95), 4)
    (0.0024, 0.0248)
    """
    if count < 2:
        return 0.0
    spread = math.sqrt(count / (count - 1))
    return float(norm.cdf(-spread * student.ppf((1 + confidence) / 2, count - 1)))
