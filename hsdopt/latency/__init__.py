"""Expected seconds per token in closed form.

`speculative`, `cascade`, `hierarchy` and `bild` hold the formulas of one published scheme each, at the level of
numbers and arrays. Every acceptance is an iid rate or a survival curve, every cost a number or a function of
the new tokens of a pass; `bursts` has a rate per hidden state. All lists run from the bottom of a stack to the
target.
"""

from __future__ import annotations

from hsdopt.latency import bild, bursts, cascade, hierarchy, speculative
from hsdopt.latency.expected import Estimate, expected_latency

__all__ = ["Estimate", "bild", "bursts", "cascade", "expected_latency", "hierarchy", "speculative"]
