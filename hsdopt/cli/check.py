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

_ALIKE = 0.005  # tolerances that differ less are printed as one
_LOUD = 0.2  # from such a tolerance on, that nothing changed is said with the reservation


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
    kinds = zip(drift.stored, drift.measured, drift.changes, drift.tolerances, strict=True)
    moved = {tokens for tokens, _ in drift.moved}
    return {
        "model": drift.model,
        "change": drift.change,
        "holds": drift.holds,
        "passes": [
            {
                "tokens": then.tokens,
                "context": then.context,
                "profiled_seconds": then.median,
                "seconds": now.median,
                "timings": len(now.seconds),
                "change": change,
                "tolerance": tolerance,
                "holds": then.tokens not in moved,
            }
            for then, now, change, tolerance in kinds
        ],
    }


def _show(drifts: tuple[Drift, ...]) -> None:
    """Print the change of every model's pass costs, a column per number of new tokens."""
    if not drifts:
        return
    sizes = sorted({sample.tokens for drift in drifts for sample in drift.stored})
    table = new_table("model", *(_tokens(size) for size in sizes), "noise explains", "holds")
    for drift in drifts:
        changes = {then.tokens: f"{change:+.1%}" for then, change in zip(drift.stored, drift.changes, strict=True)}
        low, high = min(drift.tolerances), max(drift.tolerances)
        noise = f"{high:.0%}" if high - low < _ALIKE else f"{low:.0%} to {high:.0%}"
        table.add_row(drift.model, *(changes.get(size, "") for size in sizes), noise, "yes" if drift.holds else "no")
    output().print(table)


def _tokens(size: int) -> str:
    return "1 token" if size == 1 else f"{size} tokens"


def _verdict(path: Path, profile: Profile, drifts: tuple[Drift, ...], reason: str | None) -> str:
    if reason is not None:
        return f"{path} does not hold here: {reason}"
    date = profile.provenance.get("date", "then")
    moved = [f"{drift.model} {_moved(drift)}" for drift in drifts if not drift.holds]
    if moved:
        return f"{path} does not hold any more: pass costs changed since {date} ({'; '.join(moved)}); profile again"
    limits = [limit for drift in drifts for limit in drift.tolerances]
    noise = f", or noise of up to {max(limits):.0%} hides a change" if max(limits, default=0.0) >= _LOUD else ""
    return f"{path} holds: passes cost what they did on {date}{noise}"


def _moved(drift: Drift) -> str:
    """Return which passes changed, and by how much."""
    return ", ".join(f"{change:+.1%} at {_tokens(size)}" for size, change in drift.moved)
