"""`hsdopt simulate`: event simulation of a plan beside its closed form."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hsdopt.cli.common import load_plan, load_profile, milliseconds, new_table, output, print_json, require_extra

if TYPE_CHECKING:
    from hsdopt.latency import Estimate
    from hsdopt.simulate import SimulatedRun

ProfilePath = Annotated[Path, typer.Argument(help="A profile made by hsdopt profile.", metavar="PROFILE")]
PlanText = Annotated[str, typer.Option("--plan", help="A plan in notation, or a plan.json.")]
Tokens = Annotated[int, typer.Option("--tokens", min=1, help="Tokens to simulate.")]
Seed = Annotated[int, typer.Option("--seed", min=0)]
Plot = Annotated[Path | None, typer.Option("--plot", help="Write the distribution as PNG, SVG and CSV to this stem.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def simulate(
    profile: ProfilePath,
    plan: PlanText,
    tokens: Tokens = 100_000,
    seed: Seed = 0,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Simulate a plan pass by pass, and hold its closed form against that."""
    from hsdopt.latency import expected_latency
    from hsdopt.simulate import simulate as run_events

    profiled, parsed = load_profile(profile), load_plan(plan)
    estimate = expected_latency(parsed, profiled)
    run = run_events(parsed, profiled, tokens=tokens, seed=seed)
    if plot is not None:
        with require_extra("plots"):
            from matplotlib.figure import Figure

            from hsdopt.plots import save_figure, simulated_distribution

        seconds = run.lane_seconds_per_token.tolist()
        figure = Figure(layout="constrained")
        simulated_distribution(
            seconds, closed_form=estimate.seconds_per_token, title=parsed.label, ax=figure.add_subplot()
        )
        save_figure(figure, plot)
    if as_json:
        print_json(_to_json(run, estimate))
    else:
        _show(run, estimate)


def _to_json(run: SimulatedRun, estimate: Estimate) -> dict[str, Any]:
    return {
        "plan": str(run.plan),
        "seconds_per_token": run.seconds_per_token,
        "standard_error": run.standard_error,
        "tokens_per_pass": run.tokens_per_pass,
        "closed_form": {"seconds_per_token": estimate.seconds_per_token, "tokens_per_pass": estimate.tokens_per_pass},
        "passes_per_token": run.passes_per_token,
        "tokens_histogram": list(run.tokens_histogram),
    }


def _show(run: SimulatedRun, estimate: Estimate) -> None:
    table = new_table("", "simulated", "closed form")
    simulated = f"{milliseconds(run.seconds_per_token)} +- {milliseconds(run.standard_error)}"
    table.add_row("ms per token", simulated, milliseconds(estimate.seconds_per_token))
    table.add_row("tokens per pass", f"{run.tokens_per_pass:.3f}", f"{estimate.tokens_per_pass:.3f}")
    expected = {share.model: share.passes for share in estimate.breakdown}
    for model, passes in run.passes_per_token.items():
        table.add_row(f"passes of {model} per token", f"{passes:.3f}", f"{expected.get(model, 0.0):.3f}")
    typer.echo(f"{run.plan} (+- standard error)")
    output().print(table)
