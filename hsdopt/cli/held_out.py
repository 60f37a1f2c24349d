"""What commands share that run plans of a profile on held-out prompts: the machine, the prompts, and the plans."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from hsdopt.cli.common import require_extra, require_sources
from hsdopt.errors import InvalidArgumentError

if TYPE_CHECKING:
    from hsdopt.plan import Plan
    from hsdopt.profiles import Profile
    from hsdopt.profiling import Workload

__all__ = ["held_out_half", "prepared_device", "question", "runnable"]


def prepared_device(profiled: Profile, device: str | None, threads: int | None) -> str:
    """Return the device to run on, once models and machine are known to be those of the profile.

    The profile's own device and number of threads are used where none is given.

    Raises
    ------
    HsdoptError
        If a model has moved away, or the machine is another one.
    """
    with require_extra("all"):
        from hsdopt.profiling.hardware import require_same_device, use_threads

    require_sources(profiled)
    where = profiled.models[profiled.target].device if device is None else device
    use_threads(threads, profiled.provenance)
    require_same_device(dict(profiled.provenance), where)
    return where


def held_out_half(profiled: Profile, prompts: str | None, count: int | None) -> Workload:
    """Return the validation half of `prompts`, or of the profile's own workload, at most `count` of them.

    Raises
    ------
    InvalidArgumentError
        If neither names any.
    """
    from hsdopt.profiling import load_workload

    source = str(profiled.provenance.get("workload", "")) if prompts is None else prompts
    if not source:
        raise InvalidArgumentError("expected --prompts, since the profile names no workload")
    half = load_workload(source).validation
    return half if count is None else half.take(count)


def question(profiled: Profile, workload: Workload, **options: Any) -> dict[str, Any]:  # noqa: ANN401 -- any JSON value
    """Return what tells one measurement from another, as its report keeps it."""
    return {
        "workload_sha256": workload.sha256,
        "setting": profiled.setting.model_dump(),
        **options,
        "profile": {key: profiled.provenance.get(key) for key in ("date", "command", "workload_sha256")},
    }


def runnable(profiled: Profile, plans: Iterable[Plan]) -> list[Plan]:
    """Return the plans, each once, if the profile has all their models and they end in its target.

    Raises
    ------
    HsdoptError
        If a model is not the profile's, or a plan has another target.
    """
    unique = list(dict.fromkeys(plans))
    for plan in unique:
        for name in plan.models:
            profiled.require(name)
        if plan.target != profiled.target:
            raise InvalidArgumentError(f"expected plans that end in the target {profiled.target}; got {plan.label}")
    return unique
