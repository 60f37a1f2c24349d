"""Benchmarks of the solvers: ``pytest tests/bench_solvers.py``, or run the file for a table with fitted slopes."""

from __future__ import annotations

import sys
import time
import tracemalloc
from typing import TYPE_CHECKING, Literal

import numpy as np
import pytest

from hsdopt.gsp import shortest_path
from hsdopt.gsp.reduction import hierarchy_graph
from hsdopt.solvers.adaptive import optimal_latency
from hsdopt.solvers.cascade import optimal_row
from hsdopt.solvers.exhaustive import best_stack
from hsdopt.solvers.hierarchy import best_hierarchies, optimal_hierarchy

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_benchmark.fixture import BenchmarkFixture

    Pool = tuple[np.ndarray, np.ndarray]

SMALL = (4, 8)  # models, longest draft: what the enumerator can still do


def pool(models: int, seed: int = 0) -> Pool:
    """Return costs and acceptances that fall with the distance of two models on a line."""
    rng = np.random.default_rng(seed)
    place = np.sort(rng.uniform(0, 1, models))
    costs = np.sort(np.exp(rng.uniform(np.log(0.002), 0, models)))
    costs[-1] = 1.0
    return costs, 1 - 0.9 * np.abs(place[:, np.newaxis] - place)


def seconds(call: Callable[[], object], repeats: int = 5) -> float:
    """Return the least of some timings."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def peak_bytes(call: Callable[[], object]) -> int:
    """Return the most memory that the call held at once."""
    tracemalloc.start()
    call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def slope(sizes: list[int], times: list[float]) -> float:
    """Return the exponent of the fitted power law."""
    return float(np.polyfit(np.log(sizes), np.log(times), 1)[0])


def growth(order: Literal["given", "any"], by: Literal["models", "length"]) -> float:
    """Return the exponent with which the time grows, from the larger half of the sizes up."""
    if by == "models":
        sizes, shapes = [16, 32, 64], [(16, 64), (32, 64), (64, 64)]
    else:
        sizes, shapes = [32, 64, 128], [(32, 32), (32, 64), (32, 128)]
    times = [
        seconds(lambda m=models, n=longest: optimal_hierarchy(*pool(m), n, order=order))  # type: ignore[misc]
        for models, longest in shapes
    ]
    return slope(sizes, times)


@pytest.mark.parametrize("order", ["given", "any"])
def test_eight_models_length_32(benchmark: BenchmarkFixture, order: Literal["given", "any"]) -> None:
    benchmark(optimal_hierarchy, *pool(8), 32, order=order)
    if order == "given":
        assert seconds(lambda: optimal_hierarchy(*pool(8), 32)) < 0.005


@pytest.mark.parametrize("order", ["given", "any"])
def test_64_models_length_128(benchmark: BenchmarkFixture, order: Literal["given", "any"]) -> None:
    benchmark.pedantic(optimal_hierarchy, (*pool(64), 128), {"order": order}, rounds=2)
    assert peak_bytes(lambda: optimal_hierarchy(*pool(64), 128, order=order)) < 1e9
    if order == "given":
        assert seconds(lambda: optimal_hierarchy(*pool(64), 128), 2) < 1


@pytest.mark.parametrize("by", ["models", "length"])
def test_growth(by: Literal["models", "length"]) -> None:
    # Small sizes are all overhead, which only flattens the slope; timing noise needs some room above 2.
    assert growth("given", by) < 2.5


@pytest.mark.benchmark(group="the same small instance")
@pytest.mark.parametrize("method", ["sweep", "dag", "dijkstra", "linear-program", "enumeration"])
def test_side_by_side(benchmark: BenchmarkFixture, method: str) -> None:
    found = benchmark.pedantic(small_solvers()[method], rounds=3)
    assert found == pytest.approx(optimal_hierarchy(*pool(SMALL[0]), SMALL[1]).latency, rel=1e-12)


@pytest.mark.benchmark(group="other solvers")
def test_other_solvers(benchmark: BenchmarkFixture) -> None:
    benchmark(optimal_latency, *pool(8), 32)


def small_solvers() -> dict[str, Callable[[], float]]:
    """Return every way to the optimum of one small pool; the graph is made beforehand."""
    (costs, rates), longest = pool(SMALL[0]), SMALL[1]
    graph = hierarchy_graph(costs, rates, longest)

    def by_graph(method: Literal["dag", "dijkstra", "linear-program"]) -> Callable[[], float]:
        return lambda: shortest_path(graph, "s", "t", method=method).cost

    return {
        "sweep": lambda: optimal_hierarchy(costs, rates, longest).latency,
        "dag": by_graph("dag"),
        "dijkstra": by_graph("dijkstra"),
        "linear-program": by_graph("linear-program"),
        "enumeration": lambda: best_stack(costs.tolist(), rates.tolist(), longest).latency,
    }


def report() -> None:
    """Print the table."""
    rows: list[tuple[str, str]] = []
    for models, longest in ((8, 32), (64, 128)):
        for order in ("given", "any"):
            call = lambda m=models, n=longest, o=order: optimal_hierarchy(*pool(m), n, order=o)  # noqa: E731
            size = f"{models} models, length {longest}, order {order}"
            rows.append((size, f"{seconds(call, 3) * 1e3:.2f} ms, {peak_bytes(call) / 1e6:.0f} MB"))
    for order in ("given", "any"):
        slopes = f"models^{growth(order, 'models'):.2f} length^{growth(order, 'length'):.2f}"
        rows.append((f"growth, order {order}", slopes))
    rows += [
        (f"{SMALL[0]} models, length {SMALL[1]}: {name}", f"{seconds(call, 3) * 1e3:.2f} ms")
        for name, call in small_solvers().items()
    ]
    graph = hierarchy_graph(*pool(8), 16)
    for method in ("dag", "dijkstra", "linear-program"):
        time_taken = seconds(lambda m=method: shortest_path(graph, "s", "t", method=m), 1)  # type: ignore[misc]
        rows.append((f"8 models, length 16: {method}", f"{time_taken * 1e3:.1f} ms"))
    rows += [
        ("8 models, length 32: 20 best", f"{seconds(lambda: best_hierarchies(*pool(8), 32)) * 1e3:.2f} ms"),
        ("8 models, length 32: adaptive", f"{seconds(lambda: optimal_latency(*pool(8), 32)) * 1e3:.2f} ms"),
        ("row of 4 drafters, length 64", f"{seconds(best_row) * 1e3:.2f} ms"),
    ]
    sys.stdout.writelines(f"{name:45s} {figure}\n" for name, figure in rows)


def best_row() -> float:
    """Return the EWIF of one row."""
    return optimal_row([(0.9, 0.2), (0.8, 0.1), (0.6, 0.02), (0.3, 0.0)], 64)[0]


if __name__ == "__main__":
    report()
