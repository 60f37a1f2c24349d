"""Draft trees against reference cases, brute force over all trees, exact fractions and simulation."""

from __future__ import annotations

import functools
import heapq
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsdopt.errors import InvalidArgumentError
from hsdopt.latency import speculative, trees
from hsdopt.latency.trees import Tree

DATA = json.loads((Path(__file__).parent / "data" / "cases2_trees_batches.json").read_text())
CASES, BEST = DATA["trees"], DATA["trees"]["best_expected_tokens"]
HEADS = CASES["medusa_7b_rank_probabilities"]
checked = settings(deadline=None, derandomize=True, max_examples=60)


def row_of(weights: list[int]) -> tuple[float, ...]:
    """A row of acceptances in any order from whole weights, the first of which is the chance of refusal."""
    return tuple(weight / (sum(weights) or 1) for weight in weights[1:])


rows = st.lists(st.integers(0, 9), min_size=2, max_size=5).map(row_of)
falling_rows = rows.map(lambda row: tuple(sorted(row, reverse=True)))
drawn_trees = st.recursive(st.just(()), lambda below: st.lists(below, max_size=2).map(tuple), max_leaves=10)
distributions = (
    st.lists(st.integers(0, 6), min_size=4, max_size=4).filter(any).map(lambda w: [Fraction(x, sum(w)) for x in w])
)


def drafted(tree: Tree) -> int:
    return sum(1 + drafted(child) for child in tree)


def depth(tree: Tree) -> int:
    return max((1 + depth(child) for child in tree), default=0)


@functools.cache
def all_trees(nodes: int) -> list[Tree]:
    """Every ordered tree with that many nodes below its root."""
    if nodes == 0:
        return [()]
    return [
        (first, *others) for size in range(nodes) for first in all_trees(size) for others in all_trees(nodes - 1 - size)
    ]


def fits(tree: Tree, acceptance: Sequence[Sequence[float]], level: int = 0) -> bool:
    if tree and 1 < len(acceptance) <= level:
        return False
    row = acceptance[min(level, len(acceptance) - 1)]
    return len(tree) <= len(row) and all(fits(child, acceptance, level + 1) for child in tree)


def tokens_by_recursion(tree: Tree, acceptance: Sequence[Sequence[float]], level: int = 0) -> float:
    row = acceptance[min(level, len(acceptance) - 1)]
    return 1.0 + sum(
        chance * tokens_by_recursion(child, acceptance, level + 1) for chance, child in zip(row, tree, strict=False)
    )


def greedy_tokens(acceptance: Sequence[Sequence[float]], nodes: int) -> float:
    """One and the largest products of acceptances among all nodes of the endless tree."""
    total = 1.0
    open_nodes = [(-chance, 1) for chance in acceptance[0]]
    heapq.heapify(open_nodes)
    for _ in range(nodes):
        if not open_nodes:
            break
        product, level = heapq.heappop(open_nodes)
        total -= product
        if len(acceptance) == 1 or level < len(acceptance):
            for chance in acceptance[min(level, len(acceptance) - 1)]:
                heapq.heappush(open_nodes, (product * chance, level + 1))
    return total


def best_over_all_trees(acceptance: Sequence[Sequence[float]], nodes: int, max_levels: int | None) -> tuple[int, float]:
    """The most nodes up to ``nodes`` that fit, and the most tokens of any tree with that many."""
    for size in range(nodes, -1, -1):
        fitting = [
            tokens_by_recursion(tree, acceptance)
            for tree in all_trees(size)
            if fits(tree, acceptance) and (max_levels is None or depth(tree) < max_levels)
        ]
        if fitting:
            return size, max(fitting)
    raise AssertionError


def exact_acceptance(p: Sequence[Fraction], q: Sequence[Fraction], candidates: int, *, replacement: bool) -> Fraction:
    """The chance that one of the candidates is accepted, as the recursion reads, in exact fractions."""
    if candidates == 0 or not any(q):
        return Fraction(0)
    total = Fraction(0)
    residual = [max(a - b, Fraction(0)) for a, b in zip(p, q, strict=True)]
    for token, drawn in enumerate(q):
        if drawn == 0:
            continue
        taken = min(Fraction(1), p[token] / drawn)
        total += drawn * taken
        if taken < 1:
            rest = list(q)
            if not replacement:
                rest[token] = Fraction(0)
                rest = [chance / (sum(rest) or 1) for chance in rest]
            again = [chance / sum(residual) for chance in residual]
            total += drawn * (1 - taken) * exact_acceptance(again, rest, candidates - 1, replacement=replacement)
    return total


@pytest.mark.parametrize("case", CASES["laws"])
def test_distribution_gives_the_reference_cases(case: dict[str, Any]) -> None:
    distribution = trees.token_distribution(case["tree"], case["p"])
    expected = [0.0] + [float(Fraction(case["law_exact"][str(n)])) for n in range(1, len(case["law"]) + 1)]
    assert distribution == pytest.approx(expected, rel=1e-12)
    assert distribution[1:] == pytest.approx(list(case["law"].values()), rel=1e-12)
    assert trees.expected_tokens(case["tree"], case["p"]) == pytest.approx(case["expected"], rel=1e-12)
    assert drafted(case["tree"]) + 1 == case["nodes_with_root"]


@pytest.mark.parametrize(
    ("name", "row", "first", "max_levels"),
    [
        ("p (.6,.2,.1) at every depth, m = 1.. nodes, root counted", (0.6, 0.2, 0.1), 1, None),
        ("the same, at most 3 levels, m = 4..", (0.6, 0.2, 0.1), 4, 3),
        ("p (.5,.3,.15), m = 1..", (0.5, 0.3, 0.15), 1, None),
        ("p (.8), m = 1..", (0.8,), 1, None),
    ],
)
def test_best_tree_gives_the_reference_cases(
    name: str, row: tuple[float, ...], first: int, max_levels: int | None
) -> None:
    for counted, tokens in enumerate(BEST[name], start=first):
        if counted == 1:
            assert tokens == trees.expected_tokens((), [row]) == 1.0
            continue
        tree, gained = trees.best_tree([row], counted - 1, max_levels=max_levels)
        assert gained == pytest.approx(tokens, rel=1e-12)
        assert drafted(tree) == counted - 1
        assert max_levels is None or depth(tree) < max_levels


def test_best_tree_gives_the_published_heads() -> None:
    chain: Tree = ((((),),),)
    chain = (chain,)
    assert depth(chain) == drafted(chain) == 4
    assert trees.expected_tokens(chain, HEADS["heads"]) == pytest.approx(HEADS["chain of 4"], abs=5e-5)
    for nodes, tokens in HEADS["best n nodes, root not counted"].items():
        assert trees.best_tree(HEADS["heads"], int(nodes))[1] == pytest.approx(tokens, abs=5e-5)


@given(st.lists(rows, min_size=1, max_size=3), st.integers(1, 7), st.none() | st.integers(1, 4))
@checked
def test_best_tree_equals_brute_force_over_all_ordered_trees(
    acceptance: list[tuple[float, ...]], nodes: int, max_levels: int | None
) -> None:
    tree, gained = trees.best_tree(acceptance, nodes, max_levels=max_levels)
    size, best = best_over_all_trees(acceptance, nodes, max_levels)
    assert drafted(tree) == size
    assert gained == pytest.approx(best, rel=1e-12)
    assert fits(tree, acceptance)
    assert max_levels is None or depth(tree) < max_levels


@pytest.mark.parametrize("acceptance", [[(0.1, 0.6, 0.2)], [(0.05, 0.1, 0.8), (0.4, 0.5), (0.0, 1.0)]])
def test_best_tree_of_ten_nodes_equals_brute_force(acceptance: list[tuple[float, ...]]) -> None:
    tree, gained = trees.best_tree(acceptance, 10)
    assert drafted(tree) == 10
    assert gained == pytest.approx(best_over_all_trees(acceptance, 10, None)[1], rel=1e-12)


@given(st.lists(falling_rows, min_size=1, max_size=4), st.integers(1, 40))
@checked
def test_best_tree_is_greedy_where_no_row_increases(acceptance: list[tuple[float, ...]], nodes: int) -> None:
    gained = trees.best_tree(acceptance, nodes)[1]
    assert gained == pytest.approx(greedy_tokens(acceptance, nodes), rel=1e-12)


def test_best_tree_of_sixty_four_nodes_is_fast_and_the_same_every_time() -> None:
    wide = [[rate / 1000.0 for rate in range(40, 0, -1)]]
    start = time.process_time()
    found = trees.best_tree(wide, 64)
    assert time.process_time() - start < 5.0
    assert found == trees.best_tree(wide, 64)
    assert found[1] == pytest.approx(greedy_tokens(wide, 64), rel=1e-12)


def test_best_tree_of_equal_products_is_the_shallow_one() -> None:
    assert trees.best_tree([(0.5, 0.25)], 2) == (((), ()), 1.75)


def test_a_very_long_chain_is_no_recursion() -> None:
    node: Any = []
    for _ in range(3000):
        node = [node]
    assert trees.expected_tokens(node, [(1.0,)]) == 3001.0


@given(drawn_trees, rows.filter(lambda row: len(row) > 1))
@checked
def test_distribution_sums_to_one_and_its_mean_is_the_expectation(tree: Tree, row: tuple[float, ...]) -> None:
    distribution = trees.token_distribution(tree, [row])
    assert len(distribution) == depth(tree) + 2
    assert min(distribution) >= 0.0 == distribution[0]
    assert math.fsum(distribution) == pytest.approx(1.0)
    mean = sum(tokens * chance for tokens, chance in enumerate(distribution))
    assert mean == pytest.approx(trees.expected_tokens(tree, [row])) == tokens_by_recursion(tree, [row])


@given(drawn_trees, rows.filter(lambda row: len(row) > 1))
@checked
def test_a_tree_never_loses_to_the_chain_it_contains(tree: Tree, row: tuple[float, ...]) -> None:
    length, node = 0, tree
    while node:
        length, node = length + 1, node[0]
    chain = speculative.expected_tokens(row[0], length)
    assert trees.expected_tokens(tree, [row]) >= chain - 1e-12


@given(st.floats(0.0, 1.0), st.integers(1, 12))
@checked
def test_one_child_each_is_a_chain(rate: float, length: int) -> None:
    tree, gained = trees.best_tree((rate,), length)
    assert depth(tree) == drafted(tree) == length
    assert gained == pytest.approx(speculative.expected_tokens(rate, length))


def test_distribution_agrees_with_simulation() -> None:
    tree: Tree = ((((), ()), ()), ((),), ())
    acceptance = [(0.5, 0.2, 0.1), (0.3, 0.6), (0.2, 0.2)]
    random, samples = np.random.default_rng(3), 20_000
    counts: dict[int, int] = defaultdict(int)
    for _ in range(samples):
        node, level = tree, 0
        while node:
            child = int(np.searchsorted(np.cumsum(acceptance[level][: len(node)]), random.random(), side="right"))
            if child == len(node):
                break
            node, level = node[child], level + 1
        counts[level + 1] += 1
    for tokens, chance in enumerate(trees.token_distribution(tree, acceptance)):
        error = 4 * (chance * (1 - chance) / samples) ** 0.5
        assert abs(counts[tokens] / samples - chance) <= error


@pytest.mark.parametrize("case", DATA["multi_candidate"]["cases"])
def test_several_candidates_give_the_reference_cases(case: dict[str, Any]) -> None:
    p, q = ([float(Fraction(chance)) for chance in case[name]] for name in "pq")
    for name, candidates, replacement in [("one", 1, True), ("two_with", 2, True), ("two_without", 2, False)]:
        accepted = trees.any_accepted(p, q, candidates, replacement=replacement)
        assert accepted == pytest.approx(float(Fraction(case[name])), rel=1e-12)


@given(distributions, distributions, st.integers(0, 5), st.booleans())
@checked
def test_several_candidates_equal_exact_enumeration(
    p: list[Fraction],
    q: list[Fraction],
    candidates: int,
    replacement: bool,  # noqa: FBT001
) -> None:
    accepted = trees.any_accepted(p, q, candidates, replacement=replacement)
    assert accepted == pytest.approx(float(exact_acceptance(p, q, candidates, replacement=replacement)), abs=1e-12)
    overlap = sum(min(a, b) for a, b in zip(p, q, strict=True))
    assert candidates == 0 or accepted >= float(overlap) - 1e-12


@pytest.mark.parametrize("replacement", [True, False])
def test_several_candidates_agree_with_simulation(replacement: bool) -> None:  # noqa: FBT001
    p, q, candidates = [0.5, 0.1, 0.3, 0.1], [0.1, 0.4, 0.1, 0.4], 3
    random, samples, hits = np.random.default_rng(7), 20_000, 0
    for _ in range(samples):
        verifier, drafter = np.array(p), np.array(q)
        for _ in range(candidates):
            token = random.choice(4, p=drafter)
            if random.random() < verifier[token] / drafter[token]:
                hits += 1
                break
            verifier = np.maximum(verifier - drafter, 0.0)
            verifier /= verifier.sum()
            if not replacement:
                drafter[token] = 0.0
                drafter /= drafter.sum()
    chance = trees.any_accepted(p, q, candidates, replacement=replacement)
    assert abs(hits / samples - chance) < 4 * (chance * (1 - chance) / samples) ** 0.5


def test_an_exhausted_drafter_stops() -> None:
    for candidates in (1, 2, 9):
        assert trees.any_accepted([0.25, 0.75], [1.0, 0.0], candidates, replacement=False) == 0.25
    assert trees.any_accepted([0.25, 0.75], [1.0, 0.0], 9, replacement=True) == 0.25
    assert trees.any_accepted([0.25, 0.75], [0.25, 0.75], 1, replacement=False) == 1.0


def test_nested_lists_are_trees_and_one_bare_row_holds_at_every_depth() -> None:
    as_lists = trees.token_distribution([[[]], []], (0.5, 0.25))
    assert as_lists == trees.token_distribution((((),), ()), [np.array([0.5, 0.25])])
    assert trees.best_tree((0.5, 0.25), 5) == trees.best_tree([[0.5, 0.25]], 5)


def test_where_fewer_nodes_fit_the_tree_has_those() -> None:
    assert trees.best_tree([(0.5,), (0.5,)], 9) == ((((),),), 1.75)
    assert trees.best_tree([(0.5, 0.25)], 9, max_levels=2) == (((), ()), 1.75)
    assert trees.best_tree([(0.5, 0.25)], 9, max_levels=1) == ((), 1.0)


def bad_calls() -> Iterator[tuple[Callable[[], object], str]]:
    nan = float("nan")
    yield lambda: trees.expected_tokens(((), 3), [(0.5, 0.2)]), "got 3 for a node: write"
    yield lambda: trees.expected_tokens("()", [(0.5,)]), "got '\\(\\)' for a node"
    yield lambda: trees.expected_tokens(None, [(0.5,)]), "got None for a node"
    yield lambda: trees.expected_tokens((((),),), [(0.5,), ()]), "at most 0 children at depth 2"
    yield lambda: trees.expected_tokens(((), ()), [(0.5,)]), "at most 1 children at depth 1.*got 2"
    yield lambda: trees.token_distribution(((((),),),), [(0.5,), (0.5,)]), "at most 2 drafted tokens deep"
    yield lambda: trees.expected_tokens((), [(0.7, 0.4)]), r"acceptance\[0\] to sum to at most 1.*got 1\.1"
    yield lambda: trees.expected_tokens((), [(0.5,), (-0.1,)]), r"acceptance\[1\] to be a rate.*got -0.1"
    yield lambda: trees.expected_tokens((), [(nan,)]), r"acceptance\[0\] to be a rate.*got nan"
    yield lambda: trees.expected_tokens((), [((0.5,),)]), "one list of rates; got 2 axes"
    yield lambda: trees.expected_tokens((), []), "a list of rows.*got \\[\\]"
    yield lambda: trees.expected_tokens((), 0.5), "a list of rows.*got 0.5"
    yield lambda: trees.best_tree([(0.5,)], 0), "nodes to be a whole number of at least 1; got 0"
    yield lambda: trees.best_tree([(0.5,)], 2.5), "nodes to be a whole number"
    yield lambda: trees.best_tree([(0.5,)], 2, max_levels=0), "max_levels to be a whole number of at least 1; got 0"
    yield lambda: trees.any_accepted([0.5, 0.4], [0.5, 0.5], 1, replacement=True), "p to sum to 1; got 0.9"
    yield lambda: trees.any_accepted([0.5, 0.5], [1.5, -0.5], 1, replacement=True), "every entry of q to be a rate"
    yield lambda: trees.any_accepted([1.0], [0.5, 0.5], 1, replacement=True), "the same tokens; got 1 and 2"
    yield lambda: trees.any_accepted([[1.0]], [1.0], 1, replacement=True), "got 2 axes"
    yield lambda: trees.any_accepted([1.0], [1.0], -1, replacement=True), "candidates to be a whole number"


@pytest.mark.parametrize(("call", "message"), list(bad_calls()))
def test_bad_input_is_one_clear_error(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        call()


def test_all_ordered_trees_are_counted() -> None:
    catalan = [math.comb(2 * n, n) // (n + 1) for n in range(8)]
    assert [len(set(all_trees(n))) for n in range(8)] == catalan
    assert all(drafted(tree) == 5 for tree in all_trees(5))


def test_a_tree_that_holds_itself_is_refused() -> None:
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(InvalidArgumentError, match="deep"):
        trees.expected_tokens(endless, [0.5])  # type: ignore[arg-type]
