"""Expected seconds per token in closed form.

`speculative`, `cascade`, `hierarchy` and `bild` hold the formulas of one published scheme each, at the level of
numbers and arrays. Every acceptance is an iid rate or a survival curve, every cost a number or a function of
the new tokens of a pass; `bursts` has a rate per hidden state, `trees` one per child, `batches` many sequences.
All lists run from the bottom of a stack to the target.
"""

from __future__ import annotations

from hsdopt.latency import batches, bild, bursts, cascade, hierarchy, speculative, trees
from hsdopt.latency.expected import Estimate, expected_latency

__all__ = [
    "Estimate",
    "batches",
    "bild",
    "bursts",
    "cascade",
    "expected_latency",
    "hierarchy",
    "speculative",
    "trees",
]
