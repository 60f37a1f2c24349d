"""`hsdopt check`: whether a profile still holds on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hsdopt.cli.common import (
    load_profile,
    new_table,
    output,
    print_json,
    progress_bar,
    require_extra,
    require_sources,
)
from hsdopt.cli.faults import CHECK_FAILED

if TYPE_CHECKING:
    from hsdopt.profiles import Profile
    from hsdopt.profiling import Drift

ProfilePath = Annotated[Path, typer.Argument(help="A profile made by hsdopt profile.", metavar="PROFILE")]
Seconds = Annotated[float, typer.Option("--seconds", min=0, help="How long to measure; loading comes on top.")]
Device = Annotated[str | None, typer.Option("--device", help="cpu or cuda; the profile's.")]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads; the profile's.")]
Remote = Annotated[bool, typer.Option("--trust-remote-code", help="Let a hub model run its own code.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def check(
    profile: ProfilePath,
    seconds: Seconds = 20.0,
    device: Device = None,
    threads: Threads = None,
    trust_remote_code: Remote = False,
    as_json: Json = False,
) -> None:
    """Time a few passes of every model again; exit 1 if the profile does not hold here any more."""
    with require_extra("runtime"):
        from hsdopt.profiling import recheck
        from hsdopt.profiling.hardware import same_device, use_threads
        from hsdopt.runtime import load_models
    profiled = load_profile(profile)
    require_sources(profiled)
    where = profiled.models[profiled.target].device if device is None else device
    use_threads(threads, profiled.provenance)
    reason = same_device(dict(profiled.provenance), where)
    drifts: tuple[Drift, ...] = ()
    if reason is None:
        models = load_models(profiled, device=where, trust_remote_code=trust_remote_code)
        with progress_bar() as report:
            drifts = recheck(profiled, models, seconds=seconds, progress=report)
    holds = reason is None and all(drift.holds for drift in drifts)
    if as_json:
        print_json({"profile": str(profile), "holds": holds, "reason": reason, "models": [_row(d) for d in drifts]})
    else:
        _show(drifts)
        typer.echo(_verdict(profile, profiled, drifts, reason))
    if not holds:
        raise typer.Exit(CHECK_FAILED)


def _row(drift: Drift) -> dict[str, Any]:
    return {
        "model": drift.model,
        "change": drift.change,
        "tolerance": drift.tolerance,
        "holds": drift.holds,
        "passes": [
            {
                "tokens": then.tokens,
                "context": then.context,
                "profiled_seconds": then.median,
                "seconds": now.median,
                "timings": len(now.seconds),
            }
            for then, now in zip(drift.stored, drift.measured, strict=True)
        ],
    }


def _show(drifts: tuple[Drift, ...]) -> None:
    """Print the change of every model's pass costs."""
    if not drifts:
        return
    table = new_table("model", "short passes", "middle", "long", "overall", "tolerance", "holds")
    for drift in drifts:
        each = [f"{change:+.1%}" for change in drift.changes]
        cells = (each[0], each[len(each) // 2], each[-1])
        holds = "yes" if drift.holds else "no"
        table.add_row(drift.model, *cells, f"{drift.change:+.1%}", f"{drift.tolerance:.1%}", holds)
    output().print(table)


def _verdict(path: Path, profile: Profile, drifts: tuple[Drift, ...], reason: str | None) -> str:
    if reason is not None:
        return f"{path} does not hold here: {reason}"
    moved = [f"{drift.model} {drift.change:+.1%}" for drift in drifts if not drift.holds]
    date = profile.provenance.get("date", "then")
    if not moved:
        return f"{path} holds: passes cost what they did on {date}"
    return f"{path} does not hold any more: pass costs changed since {date} ({', '.join(moved)}); profile again"
