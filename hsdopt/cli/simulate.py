"""`hsdopt simulate`: a plan run without models, beside its closed form."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hsdopt.cli.common import load_plan, load_profile, milliseconds, new_table, output, print_json, require_extra

if TYPE_CHECKING:
    from hsdopt.latency import Estimate
    from hsdopt.plan import Plan
    from hsdopt.profiles import Profile
    from hsdopt.simulate import Counts

ProfilePath = Annotated[Path, typer.Argument(help="A profile made by hsdopt profile.", metavar="PROFILE")]
PlanText = Annotated[str, typer.Option("--plan", help="A plan in notation, or a plan.json.")]
Tokens = Annotated[
    int, typer.Option("--tokens", min=1, help="Tokens to simulate; bild plans are replayed along the traced ones.")
]
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
    """Simulate a plan pass by pass, and hold its closed form against that.

    Big Little Decoder asks how sure a model is of its very words, which only traces know: its plans are replayed
    along the outputs that were profiled.
    """
    profiled, parsed = load_profile(profile), load_plan(plan)
    run = _simulated(parsed, profiled, tokens, seed) if parsed.bild is None else _replayed(parsed, profiled)
    if plot is not None:
        with require_extra("plots"):
            from matplotlib.figure import Figure

            from hsdopt.plots import save_figure, simulated_distribution

        figure = Figure(layout="constrained")
        simulated_distribution(
            run.sample, closed_form=run.estimate.seconds_per_token, title=parsed.label, ax=figure.add_subplot()
        )
        save_figure(figure, plot)
    if as_json:
        print_json(run.to_json())
    else:
        _show(run)


@dataclass(frozen=True, slots=True)
class _Run:
    """What was simulated, how sure it is, and the closed form of the same."""

    plan: Plan
    method: str
    counts: Counts
    estimate: Estimate
    sample: list[float]
    standard_error: float | None = None
    interval: tuple[float, float] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        counts, estimate = self.counts, self.estimate
        expected = {"seconds_per_token": estimate.seconds_per_token, "tokens_per_pass": estimate.tokens_per_pass}
        return {
            "plan": str(self.plan),
            "method": self.method,
            "tokens": counts.tokens,
            "seconds_per_token": counts.seconds_per_token,
            "standard_error": self.standard_error,
            "interval": self.interval,
            "tokens_per_pass": counts.tokens_per_pass,
            "closed_form": expected,
            "passes_per_token": counts.passes_per_token,
            "tokens_histogram": list(counts.tokens_histogram),
        }


def _simulated(plan: Plan, profiled: Profile, tokens: int, seed: int) -> _Run:
    from hsdopt.latency import expected_latency
    from hsdopt.simulate import simulate as run_events

    estimate = expected_latency(plan, profiled)
    run = run_events(plan, profiled, tokens=tokens, seed=seed)
    sample = run.lane_seconds_per_token.tolist()
    return _Run(plan, "event simulation", run, estimate, sample, standard_error=run.standard_error)


def _replayed(plan: Plan, profiled: Profile) -> _Run:
    """Return a replay along the profiled outputs, and the closed form for outputs of their length."""
    import numpy as np

    from hsdopt.latency import expected_latency
    from hsdopt.simulate import replay

    run = replay(plan, profiled)
    estimate = expected_latency(plan, profiled, tokens=round(float(run.prompt_tokens.mean())))
    sample = run.prompt_seconds_per_token
    interval = run.interval(np.random.default_rng(0))
    return _Run(plan, "trace replay", run, estimate, sample[np.isfinite(sample)].tolist(), interval=interval)


def _show(run: _Run) -> None:
    counts, estimate = run.counts, run.estimate
    table = new_table("", "replayed" if run.standard_error is None else "simulated", "closed form")
    simulated = milliseconds(counts.seconds_per_token)
    if run.standard_error is not None:
        simulated += f" +- {milliseconds(run.standard_error)}"
    table.add_row("ms per token", simulated, milliseconds(estimate.seconds_per_token))
    table.add_row("tokens per pass", f"{counts.tokens_per_pass:.3f}", f"{estimate.tokens_per_pass:.3f}")
    expected = {share.model: share.passes for share in estimate.breakdown}
    for model, passes in counts.passes_per_token.items():
        table.add_row(f"passes of {model} per token", f"{passes:.3f}", f"{expected.get(model, 0.0):.3f}")
    typer.echo(f"{run.plan} ({_doubt(run)})")
    output().print(table)


def _doubt(run: _Run) -> str:
    if run.interval is None:
        return "+- standard error"
    low, high = (milliseconds(bound) for bound in run.interval)
    return f"replayed along the {run.counts.tokens} tokens traced; 95 % over prompts: {low} to {high} ms"
