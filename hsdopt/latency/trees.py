"""Draft trees: tokens per verify pass, the best tree of a size, rejection with several candidates.

A draft tree is nested tuples: a node is the tuple of its children, ``()`` is a node without any, and the outermost
tuple is the root, the last token that is already held. The root is not drafted. One verify pass scores every
drafted node. ``acceptance[d][b]`` is the chance that child ``b`` of a node at depth ``d`` is the token accepted
there, given that the node was; the children of one node exclude each other, so that a row sums to at most 1.

Source: the sum over nodes of the product of the acceptances on the path to each, as in Chen et al., Sequoia,
arXiv 2402.12374, and Cai et al., Medusa, arXiv 2401.10774; rejection with several candidates as in Miao et al.,
SpecInfer, arXiv 2305.09781 (with replacement), and Jeon et al., arXiv 2402.14160 (without).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from hsdopt.checks import FloatArray, check_length, check_rates
from hsdopt.errors import InvalidArgumentError

Tree: TypeAlias = tuple["Tree", ...]
"""A node: the tuple of its children."""
TreeLike: TypeAlias = Sequence["TreeLike"]
"""A tree as it is taken: nested sequences of any kind."""
PositionalAcceptance: TypeAlias = Sequence[Sequence[float] | FloatArray] | Sequence[float] | FloatArray
"""One row of acceptances for each depth; a single row, bare or in a list, holds at every depth."""

_DEEPEST = 4096  # drafted tokens; a sequence that holds itself would have no end
_ROUNDING = 1e-9  # what a sum of probabilities may be off by
_TIE = 1e-12  # gap under which two trees count as equally good


def expected_tokens(tree: TreeLike, acceptance: PositionalAcceptance) -> float:
    """Return the expected tokens gained by one verify pass over a draft tree.

    Parameters
    ----------
    tree
        Nested sequences; a node is the sequence of its children.
    acceptance
        ``acceptance[d][b]``, the chance that child ``b`` of a node at depth ``d`` is accepted and no earlier
        sibling was; one row alone holds at every depth.

    Returns
    -------
    float
        Tokens per pass, between 1 and the depth of the tree plus 1.

    Raises
    ------
    InvalidArgumentError
        If the tree is malformed, deeper than the rows or wider than a row, or a row is no distribution.

    Notes
    -----
    The sum over all nodes, the root counted as 1, of the product of the acceptances on the path to the node.

    Examples
    --------
    >>> expected_tokens((((),), ()), [(0.5, 0.25)])
    2.0
    """
    return float(sum(weights.sum() for weights, _ in _levels(tree, _as_rows(acceptance))))


def token_distribution(tree: TreeLike, acceptance: PositionalAcceptance) -> list[float]:
    """Return the distribution of the tokens gained by one verify pass over a draft tree.

    Parameters
    ----------
    tree
        Nested sequences; a node is the sequence of its children.
    acceptance
        As in `expected_tokens`.

    Returns
    -------
    list of float
        ``[P(N=0), P(N=1), ...]``, up to the depth of the tree plus 1; ``P(N=0)`` is 0.

    Raises
    ------
    InvalidArgumentError
        As in `expected_tokens`.

    Notes
    -----
    ``P(N = d + 1)`` is the sum over the nodes at depth ``d`` of the product of the acceptances on the path to the
    node times the chance that none of its children is accepted.

    Examples
    --------
    >>> token_distribution((((),), ()), [(0.5, 0.25)])
    [0.0, 0.25, 0.5, 0.25]
    """
    return [0.0] + [float(weights @ ends) for weights, ends in _levels(tree, _as_rows(acceptance))]


def best_tree(acceptance: PositionalAcceptance, nodes: int, *, max_levels: int | None = None) -> tuple[Tree, float]:
    """Return the draft tree of a given size that gains the most tokens per verify pass, and those tokens.

    Parameters
    ----------
    acceptance
        As in `expected_tokens`, in any order within a row. With more than one row the tree is at most
        ``len(acceptance)`` drafted tokens deep.
    nodes
        Drafted nodes, at least 1; the root is not drafted. Where the rows and `max_levels` leave room for fewer,
        the tree has as many as fit.
    max_levels
        Most levels, the root's included: 3 is a tree of two drafted tokens at most in depth. None is no limit.

    Returns
    -------
    tuple of (tree, float)
        The tree as nested tuples, and its expected tokens. Among equally good trees an
        earlier sibling gets the smaller subtree, so that broad trees go before deep ones.

    Raises
    ------
    InvalidArgumentError
        If a row is no distribution, or `nodes` or `max_levels` is not a whole number of at least 1.

    Notes
    -----
    Dynamic program over depth, child and nodes: the best forest of ``m`` nodes that are children ``b, b + 1, ...``
    of one node, or below them, is ``max over s of p_b (1 + forest of s - 1 nodes one level down) + forest of m - s
    nodes from child b + 1``. It takes O(depths * children * nodes**2) operations, at most ``nodes`` depths and
    ``nodes`` children: well under a second for 64 nodes. If no row increases, it takes the largest products, as
    the greedy construction does.

    Examples
    --------
    >>> tree, tokens = best_tree([(0.5, 0.3)], 3)
    >>> tree, round(tokens, 12)
    ((((),), ()), 2.05)
    """
    rows = _as_rows(acceptance)
    size = check_length(nodes, "nodes", minimum=1)
    depth = size if len(rows) == 1 else min(size, len(rows))
    if max_levels is not None:
        depth = min(depth, check_length(max_levels, "max_levels", minimum=1) - 1)
    forest = np.full(size + 1, -np.inf)
    forest[0] = 0.0
    splits: list[list[Any]] = []
    for level in reversed(range(depth)):
        forest, chosen = _forest(rows[min(level, len(rows) - 1)], forest)
        splits.append(chosen)
    fitting = int(np.isfinite(forest).sum()) - 1
    tree = _assemble(splits[::-1], fitting)
    return tree, expected_tokens(tree, rows)


def any_accepted(
    p: Sequence[float] | FloatArray, q: Sequence[float] | FloatArray, candidates: int, *, replacement: bool
) -> float:
    """Return the chance that rejection sampling accepts one of several candidates for one position.

    Parameters
    ----------
    p, q
        Distributions of the verifier and of the drafter over the same tokens.
    candidates
        Candidates drawn from `q`, tried one after the other; 0 accepts none.
    replacement
        Whether a token that was refused can be drawn again. Without replacement, drawing stops when no token of
        `q` is left.

    Returns
    -------
    float
        A probability.

    Raises
    ------
    InvalidArgumentError
        If `p` or `q` is no distribution, their lengths differ, or `candidates` is no whole number of at least 0.

    Notes
    -----
    Candidate ``x`` is accepted with probability ``min(1, p(x) / q(x))``; otherwise ``p`` becomes the normalised
    ``max(p - q, 0)`` and, without replacement, ``q`` loses ``x`` and is normalised. Exact, by enumeration of the
    refusals: O(tokens * candidates) with replacement, up to O(tokens**candidates) without.

    Examples
    --------
    >>> round(any_accepted([0.5, 0.3, 0.2], [0.2, 0.2, 0.6], 2, replacement=False), 12)
    0.9
    """
    wanted, drafted = _as_distribution(p, "p"), _as_distribution(q, "q")
    if len(wanted) != len(drafted):
        raise InvalidArgumentError(
            f"expected p and q over the same tokens; got {len(wanted)} and {len(drafted)} of them: pad with zeros"
        )
    refused = _all_refused(wanted, drafted, check_length(candidates, "candidates"), replacement=replacement)
    return min(1.0, max(0.0, 1.0 - refused))


def _all_refused(p: FloatArray, q: FloatArray, candidates: int, *, replacement: bool) -> float:
    """Return the chance that every candidate is refused, over all ways in which that happens."""
    refused = 0.0
    branches = [(1.0, p, q, candidates)]
    while branches:
        chance, verifier, drafter, left = branches.pop()
        if left == 0 or not drafter.any():
            refused += chance
            continue
        residual = np.maximum(verifier - drafter, 0.0)
        if not residual.any():  # the two agree: accepted for certain
            continue
        residual /= residual.sum()
        surplus = np.maximum(drafter - verifier, 0.0)
        if replacement:
            branches.append((chance * float(surplus.sum()), residual, drafter, left - 1))
            continue
        for token in np.flatnonzero(surplus):
            rest = _without(drafter, int(token))
            branches.append((chance * float(surplus[token]), residual, rest, left - 1))
    return refused


def _levels(tree: TreeLike, rows: list[FloatArray]) -> Iterator[tuple[FloatArray, FloatArray]]:
    """Yield, per depth, every node's chance of being reached and its chance of being the last one accepted."""
    nodes, weights, depth = [_children(tree)], np.ones(1), 0
    while nodes:
        below = [_children(child) for node in nodes for child in node]
        if below and 1 < len(rows) <= depth:
            raise InvalidArgumentError(
                f"expected a tree at most {len(rows)} drafted tokens deep, one row of acceptance for each depth; "
                "got a deeper one: add rows, or give a single row for all depths"
            )
        if depth > _DEEPEST:
            raise InvalidArgumentError(f"expected a tree at most {_DEEPEST} drafted tokens deep; got a deeper one")
        row = rows[min(depth, len(rows) - 1)]
        counts = [len(node) for node in nodes]
        if max(counts) > len(row):
            raise InvalidArgumentError(
                f"expected at most {len(row)} children at depth {depth + 1}, one for each acceptance; "
                f"got {max(counts)}: drop some, or give their acceptances"
            )
        yield weights, np.array([max(0.0, 1.0 - float(row[:count].sum())) for count in counts])
        weights = np.concatenate([weight * row[:count] for weight, count in zip(weights, counts, strict=True)])
        nodes, depth = below, depth + 1


def _children(node: object) -> Sequence[object]:
    if isinstance(node, str | bytes) or not isinstance(node, Sequence):
        raise InvalidArgumentError(
            f"expected a tree of nested tuples, each node the tuple of its children; got {node!r} for a node: "
            "write () for a node without children"
        )
    return node


def _as_rows(acceptance: PositionalAcceptance) -> list[FloatArray]:
    try:
        rows: list[Any] = list(acceptance)
    except TypeError:
        rows = []
    if not rows:
        raise InvalidArgumentError(
            f"expected acceptance to be a list of rows, one for each depth or one for all; got {acceptance!r}"
        )
    if all(np.ndim(entry) == 0 for entry in rows):
        rows = [rows]
    return [_as_row(row, f"acceptance[{depth}]") for depth, row in enumerate(rows)]


def _as_row(values: object, name: str) -> FloatArray:
    row = check_rates(values, f"entry of {name}")
    if row.ndim != 1:
        raise InvalidArgumentError(f"expected {name} to be one list of rates; got {row.ndim} axes")
    if row.sum() > 1.0 + _ROUNDING:
        raise InvalidArgumentError(
            f"expected {name} to sum to at most 1, as siblings exclude each other; got {row.sum()}: "
            "take the differences of cumulative rates"
        )
    return row


def _as_distribution(values: object, name: str) -> FloatArray:
    weights = check_rates(values, f"entry of {name}")
    if weights.ndim != 1:
        raise InvalidArgumentError(f"expected {name} to be one list of probabilities; got {weights.ndim} axes")
    if abs(weights.sum() - 1.0) > _ROUNDING:
        raise InvalidArgumentError(f"expected {name} to sum to 1; got {weights.sum()}: normalise it")
    return weights


def _forest(row: FloatArray, below: FloatArray) -> tuple[FloatArray, list[Any]]:
    """Return the best forest of every size under one node, and what each child takes of every size.

    ``chosen[b][m]`` is the size of child ``b``'s subtree when it and the siblings behind it hold ``m`` nodes.
    """
    size = len(below) - 1
    forest = np.full(size + 1, -np.inf)
    forest[0] = 0.0
    gap = np.arange(size + 1)[:, None] - np.arange(1, size + 1)
    chosen = []
    for rate in row[:size][::-1]:
        child = np.where(np.isfinite(below[:-1]), rate * (1.0 + np.maximum(below[:-1], 0.0)), -np.inf)
        values = np.where(gap >= 0, forest[gap] + child, -np.inf)
        best = values.max(axis=1)
        chosen.append(1 + np.argmax(values >= best[:, None] - _TIE, axis=1))
        forest = best
        forest[0] = 0.0
    return forest, chosen[::-1]


def _assemble(splits: list[list[Any]], size: int) -> Tree:
    """Return the tree of a size from the sizes that its subtrees were given, depth by depth."""
    levels = [[[size]]]
    for chosen in splits:
        levels.append([_shares(chosen, total) for siblings in levels[-1] for total in siblings])
    below: list[Tree] = [()] * sum(len(siblings) for siblings in levels[-1])
    for level in reversed(levels[1:]):
        remaining = iter(below)
        below = [tuple(next(remaining) for _ in siblings) for siblings in level]
    return below[0]


def _shares(chosen: list[Any], total: int) -> list[int]:
    """Return how many nodes hang below each child of a node with ``total`` nodes below it."""
    shares: list[int] = []
    while total:
        taken = int(chosen[len(shares)][total])
        shares.append(taken - 1)
        total -= taken
    return shares


def _without(distribution: FloatArray, token: int) -> FloatArray:
    """Return a distribution without one token, normalised, or zeros if nothing else was in it."""
    rest = distribution.copy()
    rest[token] = 0.0
    total = rest.sum()
    return rest / total if total > 0.0 else rest
