"""`hsdopt solve`: the best plan for a profile."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hsdopt.cli.common import load_profile, milliseconds, output, print_json, require_extra, status, write_text
from hsdopt.errors import InvalidArgumentError

if TYPE_CHECKING:
    from rich.table import Table

    from hsdopt.plan import Plan
    from hsdopt.profiles import Profile
    from hsdopt.solvers.solution import Candidate, Solution
    from hsdopt.solvers.what_if import Sensitivity, WhatIf
    from hsdopt.work import PlanWork

ProfilePath = Annotated[Path, typer.Argument(help="A profile made by hsdopt profile.", metavar="PROFILE")]
Family = Annotated[str, typer.Option("--family", help="speculative, hierarchy, cascade, adaptive, bild or all.")]
MaxLength = Annotated[int, typer.Option("--max-draft-length", min=1, help="Longest draft of any level.")]
MaxLevels = Annotated[
    int | None, typer.Option("--max-levels", min=1, help="Most models in the stack, target included.")
]
MaxMemory = Annotated[int | None, typer.Option("--max-memory-bytes", min=1, help="Most bytes of weights.")]
Allow = Annotated[list[str] | None, typer.Option("--allow", help="A drafter that may be used; repeat for more.")]
Require = Annotated[list[str] | None, typer.Option("--require", help="A drafter that must be used; repeat for more.")]
Context = Annotated[float | None, typer.Option("--context", min=0, help="Context length; as profiled if not given.")]
Deviation = Annotated[
    float | None,
    typer.Option("--max-deviation", min=0, max=1, help="With --family bild: share of tokens that may differ."),
]
Hypothetical = Annotated[
    str | None,
    typer.Option("--what-if", metavar="C[,C...]", help="Ask about drafters of these cost ratios, such as 0.05,0.2."),
]
Plot = Annotated[Path | None, typer.Option("--what-if-plot", help="Save the what-if curve: a path without suffix.")]
Device = Annotated[
    str | None,
    typer.Option(
        "--hardware",
        metavar="NAME|FLOPS,BYTES[,SECONDS]",
        help="Estimate for an accelerator that was not measured: its name, or its peak FLOP/s, bytes per second, and "
        "seconds besides per pass (in place of launching kernels).",
    ),
]
Replicates = Annotated[int, typer.Option("--replicates", min=0, help="Bootstrap replicates behind the intervals.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Of the bootstrap.")]
ClosedForm = Annotated[bool, typer.Option("--closed-form", help="Let the closed form decide, not a replay of traces.")]
Out = Annotated[Path | None, typer.Option("--output", "-o", help="Write the plan to this file; - prints it alone.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def solve(
    profile: ProfilePath,
    family: Family = "all",
    max_draft_length: MaxLength = 24,
    max_levels: MaxLevels = None,
    max_memory_bytes: MaxMemory = None,
    allow: Allow = None,
    require: Require = None,
    context: Context = None,
    max_deviation: Deviation = None,
    hardware: Device = None,
    what_if: Hypothetical = None,
    what_if_plot: Plot = None,
    replicates: Replicates = 200,
    seed: Seed = 0,
    closed_form: ClosedForm = False,
    output_path: Out = None,
    as_json: Json = False,
) -> None:
    """Find the fastest stack for a profile, and say how fast it should be."""
    from hsdopt.cli.predictions import replayer
    from hsdopt.solvers.solve import solve as find

    if as_json and str(output_path) == "-":
        raise InvalidArgumentError("expected -o - or --json, not both: each prints one document; name a file with -o")
    ratios = _ratios(what_if)
    if what_if_plot is not None and ratios is None:
        raise InvalidArgumentError("expected --what-if with --what-if-plot, such as --what-if 0.05; got none")
    profiled = _on(hardware, load_profile(profile))
    solution = find(
        profiled,
        family=family,
        max_draft_length=max_draft_length,
        max_levels=max_levels,
        max_memory_bytes=max_memory_bytes,
        allowed=allow,
        required=require,
        context=context,
        max_deviation=max_deviation,
        interval=replicates,
        seed=seed,
        rerank=None if closed_form else replayer(profiled, context=context),
    )
    answer = None
    if ratios is not None:
        from hsdopt.solvers.what_if import what_if as ask

        answer = ask(profiled, cost_ratio=ratios, max_draft_length=max_draft_length, context=context)
    sensitivities = _sensitivities(solution, profiled, context)
    if output_path is not None:
        from hsdopt.plan import plan_to_json

        write_text(output_path, json.dumps(plan_to_json(solution.plan), indent=2) + "\n")
    if str(output_path) == "-":
        return
    if as_json:
        print_json(to_json(solution, profiled, what_if=answer, sensitivities=sensitivities, context=context))
    else:
        show(solution, profiled, context=context)
        _show_measurements(sensitivities)
        if answer is not None:
            _show_what_if(answer)
    if answer is not None and what_if_plot is not None:
        _plot(answer, what_if_plot)


def _on(hardware: str | None, profile: Profile) -> Profile:
    """Return a profile as it is, or with the estimated costs of other hardware."""
    if hardware is None:
        return profile
    from hsdopt.work import read_hardware, roofline, without_cpu_only

    flops, moved, besides, name = read_hardware(hardware)
    left, gone = without_cpu_only(profile)
    if gone:
        status().print(f"left out on {name}: {', '.join(gone)}; int8 and int4 copies run on CPUs only")
    return roofline(left, flops_per_second=flops, bytes_per_second=moved, overhead_seconds=besides, name=name)


def _ratios(text: str | None) -> list[float] | None:
    """Return the cost ratios of a comma-separated list."""
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise InvalidArgumentError(
            f"expected --what-if as cost ratios with commas, such as 0.05,0.2; got {text!r}"
        ) from None


def _sensitivities(solution: Solution, profile: Profile, context: float | None) -> tuple[Sensitivity, ...]:
    from hsdopt.solvers.what_if import sensitivities

    contender = solution.contender
    return () if contender is None else sensitivities(contender.plan, profile, context=context)


def to_json(
    solution: Solution,
    profile: Profile,
    *,
    what_if: WhatIf | None = None,
    sensitivities: Sequence[Sensitivity] = (),
    context: float | None = None,
) -> dict[str, Any]:
    """Return a solution as what `--json` prints."""
    from hsdopt.work import estimate_of

    best, single, contender = solution.candidate, solution.best_single, solution.contender
    work = _Works(profile, context)
    return {
        **_candidate(best, solution, work),
        "estimate": estimate_of(profile),
        "speculate": solution.speculate,
        "interval": solution.interval,
        "probability_within": solution.probability_within,
        "resolution": solution.resolution,
        "predictor": solution.predictor,
        "exact": solution.exact,
        "memory_bytes": solution.memory_bytes,
        "why": solution.why,
        "warnings": list(solution.warnings),
        "autoregression": _candidate(solution.autoregression, solution, work),
        "best_single": None if single is None else _candidate(single, solution, work),
        "contender": None if contender is None else _candidate(contender, solution, work),
        "best_by_family": {name: _candidate(other, solution, work) for name, other in solution.best_by_family.items()},
        "runners_up": [_candidate(other, solution, work) for other in solution.runners_up],
        "frontier": [
            {**_candidate(point.candidate, solution, work), "deviation": point.deviation} for point in solution.frontier
        ],
        "sensitivities": [asdict(row) for row in sensitivities],
        "what_if": None if what_if is None else asdict(what_if),
        "plan_file": _plan_json(best.plan),
    }


def _plan_json(plan: Plan) -> dict[str, Any]:
    from hsdopt.plan import plan_to_json

    return plan_to_json(plan)


class _Works:
    """What plans compute and move per token, each once."""

    def __init__(self, profile: Profile, context: float | None) -> None:
        self._profile = profile
        self._context = context
        self._known: dict[Plan, PlanWork | None] = {}

    def __call__(self, plan: Plan) -> PlanWork | None:
        """Return the work of one plan; None if the profile does not say how large its models are."""
        from hsdopt.errors import PredictionError
        from hsdopt.work import plan_work

        if plan not in self._known:
            try:
                self._known[plan] = plan_work(plan, self._profile, context=self._context)
            except PredictionError:
                self._known[plan] = None
        return self._known[plan]


def _candidate(candidate: Candidate, solution: Solution, work: _Works) -> dict[str, Any]:
    from hsdopt.plan import format_plan

    made = work(candidate.plan)
    return {
        "plan": format_plan(candidate.plan),
        "family": candidate.family,
        "seconds_per_token": candidate.seconds_per_token,
        "speedup": _speedup(candidate, solution),
        "closed_form_seconds_per_token": candidate.estimate.seconds_per_token,
        "tokens_per_pass": candidate.estimate.tokens_per_pass,
        "work": None if made is None else {**asdict(made), "intensity": made.intensity},
    }


def _speedup(candidate: Candidate, solution: Solution) -> float:
    return solution.autoregression.seconds_per_token / candidate.seconds_per_token


def show(solution: Solution, profile: Profile, *, context: float | None = None) -> None:
    """Print a solution for people."""
    from rich.text import Text

    from hsdopt.work import estimate_of

    console = output()
    estimate = estimate_of(profile)
    for line in _headline(solution):
        console.print(Text(line if estimate is None else f"estimate: {line}"), soft_wrap=True)
    console.print()
    work = _Works(profile, context)
    console.print(_table(solution, work))
    if solution.frontier:
        console.print(_frontier(solution, work))
    for line in _footnotes(solution, work):
        console.print(Text(line))
    warned = () if estimate is None else (f"costs are an estimate, {estimate}",)
    for warning in (*warned, *solution.warnings):
        status().print(Text(f"warning: {warning}"))


def _headline(solution: Solution) -> list[str]:
    """Return the answer in two lines: the plan, and how fast it should be."""
    if not solution.speculate:
        line = f"Do not speculate: run {solution.plan.description} alone, "
        return [line + f"{milliseconds(solution.seconds_per_token)} ms per token."]
    low_high = "" if solution.interval is None else " (95 %: {:.2f} to {:.2f})".format(*solution.interval)
    speed = f"{milliseconds(solution.seconds_per_token)} ms per token, {solution.speedup:.2f}x{low_high}"
    return [f"Run {solution.plan.description}", f"{speed} over {solution.autoregression.plan.description} alone."]


def _table(solution: Solution, work: _Works) -> Table:
    """Return the plan beside the best of each family, and the runner-up."""
    table = _new_table("", "plan", *_headings(solution, work))
    rows: list[tuple[str, Candidate | None]] = [("chosen", solution.candidate)]
    if not solution.speculate:
        rows.append(("contender", solution.contender))
    names = {"speculative": "best single drafter"}
    families = ("speculative", "hierarchy", "cascade", "adaptive", "bild")
    rows += [(names.get(family, f"best {family}"), solution.best_by_family.get(family)) for family in families]
    rows.append(("runner-up", next(iter(solution.runners_up), None)))
    rows.append(("autoregression", solution.autoregression))
    shown: dict[Plan, None] = {}
    for name, candidate in rows:
        if candidate is not None and (candidate.plan not in shown or name == "best single drafter"):
            shown.setdefault(candidate.plan)
            table.add_row(name, *_cells(candidate, solution, work))
    return table


def _headings(solution: Solution, work: _Works) -> tuple[str, ...]:
    """Return the headings of the numbers; those of work only where it is known."""
    known = work(solution.autoregression.plan) is not None
    return ("ms/token", "speed-up", *(("FLOPs x", "bytes x") if known else ()))


def _new_table(first: str, second: str, *numbers: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column(first, no_wrap=True)
    table.add_column(second, overflow="fold")
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _cells(candidate: Candidate, solution: Solution, work: _Works) -> tuple[Any, ...]:
    from rich.text import Text

    speedup = f"{_speedup(candidate, solution):.2f}x"
    cells = (Text(candidate.plan.description), milliseconds(candidate.seconds_per_token), speedup)
    if work(solution.autoregression.plan) is None:
        return cells
    made = work(candidate.plan)
    return (*cells, *(("", "") if made is None else (f"{made.flops_relative:.2f}", f"{made.bytes_relative:.2f}")))


def _frontier(solution: Solution, work: _Works) -> Table:
    table = _new_table("differs", "Big Little Decoder", *_headings(solution, work))
    for point in solution.frontier:
        table.add_row(f"{point.deviation:.1%}", *_cells(point.candidate, solution, work))
    return table


def _footnotes(solution: Solution, work: _Works) -> list[str]:
    """Return why, memory, work, and how sure all that is."""
    lines = [f"why: {solution.why}", f"memory: {solution.memory_bytes / 1e6:.0f} MB of weights"]
    made = work(solution.plan)
    if made is not None:
        rough = " (from numbers of parameters alone)" if made.approximate else ""
        lines.append(
            f"work: {made.flops_per_token / 1e9:.3g} GFLOP and {made.bytes_per_token / 1e6:.3g} MB moved per token, "
            f"{made.intensity:.2g} FLOP per byte{rough}; x against autoregression"
        )
    searched = "" if solution.exact else "; searched, not proved the optimum"
    lines.append(f"predicted by: {solution.predictor}{searched}")
    if solution.probability_within is not None and solution.resolution is not None:
        what = "this plan" if solution.speculate else "the contender"
        lines.append(
            f"sure: {what} is within 2 % of the best candidate with {solution.probability_within:.0%}; "
            f"differences below {solution.resolution:.1%} may be noise"
        )
    return lines


def _show_measurements(sensitivities: Sequence[Sensitivity]) -> None:
    """Print the three measurements that matter most."""
    if sensitivities:
        parts = [f"{row.what} of {' by '.join(row.models)} {row.elasticity:+.2f}" for row in sensitivities[:3]]
        output().print(f"matters most (% of latency per %): {', '.join(parts)}", markup=False)


def _show_what_if(answer: WhatIf) -> None:
    console = output()
    console.print()
    console.print(f"What a drafter would need to improve on {answer.speedup:.2f}x (closed form), and would bring:")
    chosen = [rate for rate in (0.5, 0.7, 0.8, 0.9) if rate in answer.acceptances]
    table = _new_table("cost ratio", "acceptance needed", *(f"x at {rate:g}" for rate in chosen))
    for point in (*answer.points, *answer.curve):
        needed = "never" if point.acceptance is None else f"{point.acceptance:.3f}"
        speedups = dict(zip(answer.acceptances, point.speedups, strict=True))
        table.add_row(f"{point.cost_ratio:.3g}", needed, *(f"{speedups[rate]:.2f}x" for rate in chosen))
        if point is answer.points[-1]:
            table.add_section()
    console.print(table)


def _plot(answer: WhatIf, path: Path) -> None:
    with require_extra("plots"):
        from matplotlib.figure import Figure

        from hsdopt.plots import save_figure, style, what_if_curve
    with style():
        figure = Figure(figsize=(6.0, 3.6), layout="constrained")
        what_if_curve(answer, ax=figure.add_subplot())
    for written in save_figure(figure, path):
        status().print(f"wrote {written}", markup=False)
