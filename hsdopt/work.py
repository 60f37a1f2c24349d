"""Work: floating-point operations and bytes moved, per pass and per plan, and the seconds that they take at least.

Sources: the count of a decoder's operations is that of Kaplan et al. (arXiv 2001.08361, section 2.1): two per matrix
entry and token, and attention over the keys and values before. Operations, memory operations and their quotient, the
arithmetic intensity, relative to plain decoding are what Kim et al. (Big Little Decoder, arXiv 2302.07863) report. The
roofline is that of Williams et al. (2009): a pass takes as long as its operations at the peak rate, or as the bytes
that it moves at the full bandwidth, whichever is longer. Here it also takes as long as launching its kernels one by
one, which is what small models wait for on an accelerator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from hsdopt.checks import check_length, check_nonnegative
from hsdopt.costs import CostCurve
from hsdopt.errors import InvalidArgumentError, PredictionError
from hsdopt.latency.expected import expected_passes
from hsdopt.plan import LOOKUP, Plan
from hsdopt.profiles import ModelInfo, Profile, Shape

__all__ = [
    "HARDWARE",
    "KERNELS_PER_LAYER",
    "LAUNCH_SECONDS",
    "Hardware",
    "PassWork",
    "PlanWork",
    "estimate_of",
    "pass_work",
    "plan_work",
    "read_hardware",
    "roofline",
    "without_cpu_only",
]

KERNELS_PER_LAYER = 10
"""Kernels that a pass launches per layer, at least: two norms, the inputs of attention, their rotation, attention, its
output, two products of the feed-forward layer, its activation, and a sum. Kernels that are not fused are more."""

LAUNCH_SECONDS = 5e-6
"""Seconds from one kernel launch to the next, about, where the host launches them one by one."""

_CPU_ONLY = frozenset({"int8", "int4"})  # recipes whose kernels there are for CPUs alone
_LONGEST = 64  # new tokens that are tabulated where a profile names no longest pass


@dataclass(frozen=True, slots=True)
class Hardware:
    """Peak rates of an accelerator, and where they are published.

    Attributes
    ----------
    flops_per_second : float
        Dense matrix products in bfloat16, without sparsity.
    bytes_per_second : float
        Bandwidth of its memory.
    source : str
    """

    flops_per_second: float
    bytes_per_second: float
    source: str


HARDWARE: Mapping[str, Hardware] = MappingProxyType(
    {
        "A100": Hardware(312e12, 2.039e12, "NVIDIA A100 data sheet, SXM 80 GB"),
        "H100": Hardware(989e12, 3.35e12, "NVIDIA H100 data sheet, SXM; half the figure with sparsity"),
        "H200": Hardware(989e12, 4.8e12, "NVIDIA H200 data sheet, SXM; half the figure with sparsity"),
        "L4": Hardware(121e12, 0.3e12, "NVIDIA L4 data sheet; half the figure with sparsity"),
        "L40S": Hardware(362e12, 0.864e12, "NVIDIA L40S data sheet"),
        "RTX4090": Hardware(165e12, 1.008e12, "NVIDIA Ada architecture paper; sums in float32"),
    }
)
"""Well-known accelerators by name."""


@dataclass(frozen=True, slots=True)
class PassWork:
    """What one pass computes and moves.

    Attributes
    ----------
    flops : float
        Floating-point operations; a multiplication and an addition count as two.
    bytes : float
        Weights read once, keys and values read and written. Activations are left out: they stay in caches.
    approximate : bool
        Whether it follows from the number of parameters alone, without attention.
    """

    flops: float
    bytes: float
    approximate: bool = False

    @property
    def intensity(self) -> float:
        """Operations per byte; nan where nothing is moved."""
        return self.flops / self.bytes if self.bytes else math.nan


@dataclass(frozen=True, slots=True)
class PlanWork:
    """What a plan computes and moves per emitted token, all models together.

    Attributes
    ----------
    flops_per_token, bytes_per_token : float
    flops_relative, bytes_relative : float
        Over those of the target's own autoregression at the same context.
    approximate : bool
        Whether the work of some model follows from its number of parameters alone.
    """

    flops_per_token: float
    bytes_per_token: float
    flops_relative: float
    bytes_relative: float
    approximate: bool = False

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops_per_token / self.bytes_per_token

    @property
    def intensity_relative(self) -> float:
        """Arithmetic intensity over that of the target's own autoregression."""
        return self.flops_relative / self.bytes_relative


def pass_work(
    info: ModelInfo, tokens: int, context: float, *, scored: int | None = None, encoded: float = 0.0
) -> PassWork:
    """Return what one pass of a model computes and moves.

    Parameters
    ----------
    info : ModelInfo
        With a shape; else the work is approximate: two operations per parameter and token, and all weights read.
        Nothing for a lookup drafter.
    tokens : int
        New tokens.
    context : float
        Tokens in the cache before.
    scored : int, optional
        Positions whose logits are computed; all of the new tokens if not given.
    encoded : float
        Tokens that an encoder read, to which a decoder attends.

    Raises
    ------
    PredictionError
        If neither shape nor parameters of the model are known.
    InvalidArgumentError
        If a number is outside its domain.

    Notes
    -----
    With n new tokens at context c, M matrix entries, a head of width times vocabulary, L layers, H query heads and
    G key heads of width d: ``2 n M + 2 scored head + 4 L H d n (c + n)`` operations, and the weights' bytes plus
    ``2 L G d (c + n)`` values of the cache, c positions read and n written. Attention is counted as the dense
    product that kernels compute, masked entries among it, and sliding windows save nothing, as here they are only
    masks. Of E experts, with k of them per token, a token multiplies with k / E of their entries, and a pass reads
    the share ``1 - (1 - k / E)^n`` that some token is expected to go to, if all are as likely.

    Examples
    --------
    >>> from hsdopt.profiles import Shape
    >>> shape = Shape(
    ...     layers=2, hidden_size=8, intermediate_size=16, heads=2, kv_heads=1, head_dim=4, vocab_size=10, value_bytes=4
    ... )
    >>> work = pass_work(ModelInfo(source="m", shape=shape), 3, 5)
    >>> work.flops, work.bytes
    (8928.0, 5440.0)
    """
    check_length(tokens, "tokens", minimum=1)
    check_nonnegative(context, "context")
    if info.kind == LOOKUP:
        return PassWork(0.0, 0.0)
    if info.shape is None:
        return _approximate(info, tokens)
    shape, logits = info.shape, tokens if scored is None else scored
    used = shape.experts_per_token / shape.experts if shape.experts else 0.0
    matrices = _matrix_parameters(shape) + used * shape.expert_parameters
    seen = context + tokens + (encoded if shape.cross_attention else 0.0)
    attention = 2.0 * shape.layers * shape.head_dim * seen
    return PassWork(
        2.0 * (tokens * matrices + logits * _head_parameters(shape) + tokens * shape.heads * attention),
        _weight_bytes(shape, (1.0 - used) ** tokens) + shape.value_bytes * shape.kv_heads * attention,
    )


def _approximate(info: ModelInfo, tokens: int) -> PassWork:
    if not info.parameters or not info.bytes:
        raise PredictionError(
            f"expected parameters and bytes of {info.source} in the profile; it names none: profile the model again"
        )
    return PassWork(2.0 * tokens * info.parameters, float(info.bytes), approximate=True)


def _head_parameters(shape: Shape) -> int:
    return shape.hidden_size * shape.vocab_size


def _matrix_parameters(shape: Shape) -> int:
    """Return the entries counted, else those of query, key, value, output and a gated feed-forward layer."""
    if shape.matrix_parameters is not None:
        return shape.matrix_parameters
    attention = 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    return shape.layers * shape.hidden_size * (attention + 3 * shape.intermediate_size)


def _weight_bytes(shape: Shape, idle: float) -> float:
    """Return the bytes of weights that a pass reads if it needs no part `idle` of the experts."""
    parameters = _matrix_parameters(shape) + shape.expert_parameters + _head_parameters(shape)
    total = shape.value_bytes * parameters if shape.weight_bytes is None else shape.weight_bytes
    return total * (1.0 - idle * shape.expert_parameters / parameters)


def plan_work(plan: Plan, profile: Profile, *, context: float | None = None) -> PlanWork:
    """Return what a plan computes and moves per emitted token in the long run.

    Parameters
    ----------
    plan : Level, Adaptive or Bild
    profile : Profile
        Acceptance, for the passes that the plan makes, and shapes of its models.
    context : float, optional
        Tokens in the caches; the mean of those visited, or the middle of the target's curve, if not given.

    Raises
    ------
    PredictionError
        If the profile cannot speak about the plan, or knows neither shape nor parameters of a model.

    Notes
    -----
    Exact passes by size, as in `expected_latency`. Models that only draft compute one row of logits per pass;
    those that verify one for every new token, which is a row too many for every token their caches had to catch up
    on. Prefills and encoders are left out, and so is attention to an encoder's output, whose length is no part of a
    profile.

    Examples
    --------
    >>> from hsdopt.plan import parse_plan
    >>> profile = Profile.from_rates("big", {"big": 1.0, "small": 0.125}, {("small", "big"): 0.5})
    >>> sizes = {"big": 1000, "small": 100}
    >>> models = {name: ModelInfo(source=name, parameters=size, bytes=4 * size) for name, size in sizes.items()}
    >>> work = plan_work(parse_plan("big(small:2)"), replace(profile, models=models))
    >>> round(work.flops_relative, 3), round(work.bytes_relative, 3)
    (1.843, 0.686)
    """
    place = _context(profile) if context is None else context
    verifiers = plan.verifiers
    flops = moved = 0.0
    approximate = False
    for (model, tokens), count in expected_passes(plan, profile).passes.items():
        work = pass_work(_info(profile, model), tokens, place, scored=None if model in verifiers else 1)
        flops += count * work.flops
        moved += count * work.bytes
        approximate |= work.approximate
    alone = pass_work(_info(profile, plan.target), 1, place)
    return PlanWork(flops, moved, flops / alone.flops, moved / alone.bytes, approximate or alone.approximate)


def _context(profile: Profile) -> float:
    contexts = profile.cost(profile.target).contexts
    return float(contexts[len(contexts) // 2]) if profile.context is None else profile.context


def _info(profile: Profile, model: str) -> ModelInfo:
    if model == LOOKUP:
        return ModelInfo(source=LOOKUP, kind="lookup")
    if model not in profile.models:
        raise PredictionError(f"expected parameters and bytes of {model} in the profile; it was given by hand")
    return profile.models[model]


def roofline(
    profile: Profile,
    *,
    flops_per_second: float,
    bytes_per_second: float,
    overhead_seconds: float | None = None,
    name: str = "other hardware",
) -> Profile:
    """Return a profile whose pass costs are an estimate for hardware that one does not have.

    Every pass takes ``max(flops / flops_per_second, bytes / bytes_per_second, launches)``, where `launches` is
    ``layers * KERNELS_PER_LAYER * LAUNCH_SECONDS``: kernels run while the host launches further ones, so that a pass
    takes no less than either. A model whose shape is not known counts as one layer. If `overhead_seconds` is given,
    every pass takes ``max(flops / flops_per_second, bytes / bytes_per_second) + overhead_seconds`` instead. Peak
    rates are never reached, and real passes launch more kernels, so the costs are lower bounds for a host that
    launches kernels one by one; ratios between plans are what such an estimate is for. Acceptance, weights' types and
    the seconds of the lookup drafter, which runs on the host, stay as profiled.

    Parameters
    ----------
    profile : Profile
        Measured anywhere.
    flops_per_second, bytes_per_second : float
        Peak rates, such as those in `HARDWARE`.
    overhead_seconds : float, optional
        What every pass costs besides, in place of the launches of its kernels.
    name : str
        Of the hardware.

    Returns
    -------
    Profile
        Its provenance says "estimate"; it has no timings, and cannot be saved.

    Raises
    ------
    InvalidArgumentError
        If a rate is not above 0, or the overhead is negative.
    PredictionError
        If the profile knows neither shape nor parameters of a model.

    Examples
    --------
    >>> profile = Profile.from_rates("big", {"big": 1.0}, {})
    >>> models = {"big": ModelInfo(source="big", parameters=1000, bytes=2000)}
    >>> estimate = roofline(replace(profile, models=models), flops_per_second=1e6, bytes_per_second=1e5)
    >>> estimate.cost("big")(1), estimate.cost("big")(20)
    (0.02, 0.04)
    """
    for rate, what in ((flops_per_second, "flops_per_second"), (bytes_per_second, "bytes_per_second")):
        if check_nonnegative(rate, what) == 0.0 or not math.isfinite(rate):
            raise InvalidArgumentError(f"expected a finite {what} above 0; got {rate}")
    fixed = None if overhead_seconds is None else check_nonnegative(overhead_seconds, "overhead_seconds")

    def seconds(info: ModelInfo, tokens: int, context: float) -> float:
        work = pass_work(info, tokens, context)
        busy = max(work.flops / flops_per_second, work.bytes / bytes_per_second)
        return max(busy, _launch_seconds(info)) if fixed is None else busy + fixed

    costs = {
        model: curve if model == LOOKUP else _curve(curve, partial(seconds, _info(profile, model)))
        for model, curve in profile.costs.items()
    }
    launches = f"at least {KERNELS_PER_LAYER} kernel launches of {LAUNCH_SECONDS * 1e6:g} us per layer and pass"
    besides = launches if fixed is None else f"{fixed:.4g} s besides per pass"
    rates = f"{flops_per_second:.4g} FLOP/s, {bytes_per_second:.4g} B/s, {besides}"
    words = f"roofline of {name}: {rates}, weights as profiled; not measured, a lower bound"
    said = {"estimate": words, "device": f"estimate: {name}"}
    return replace(profile, costs=costs, samples={}, overhead={}, provenance={**profile.provenance, **said}, _laws={})


def _launch_seconds(info: ModelInfo) -> float:
    """Return the seconds in which the host launches the kernels of a pass; as of one layer if the shape is unknown."""
    return (1 if info.shape is None else info.shape.layers) * KERNELS_PER_LAYER * LAUNCH_SECONDS


def without_cpu_only(profile: Profile) -> tuple[Profile, tuple[str, ...]]:
    """Return a profile without the drafters that run on CPUs only, and their names.

    Parameters
    ----------
    profile : Profile

    Raises
    ------
    PredictionError
        If the target itself runs on CPUs only.

    Examples
    --------
    >>> profile = Profile.from_rates("big", {"big": 1.0, "quick": 0.5}, {("quick", "big"): 0.9})
    >>> models = {"big": ModelInfo(source="m"), "quick": ModelInfo(source="int8@m")}
    >>> left, gone = without_cpu_only(replace(profile, models=models))
    >>> list(left.costs), gone
    (['big'], ('quick',))
    """
    gone = tuple(name for name, info in profile.models.items() if not _CPU_ONLY.isdisjoint(info.source.split("@")[:-1]))
    if profile.target in gone:
        source = profile.models[profile.target].source
        raise PredictionError(f"expected a target that runs on accelerators; {source} runs on CPUs only")
    costs = {name: curve for name, curve in profile.costs.items() if name not in gone}
    acceptances = {pair: law for pair, law in profile.acceptances.items() if not {*pair} & {*gone}}
    models = {name: info for name, info in profile.models.items() if name not in gone}
    return replace(profile, costs=costs, acceptances=acceptances, models=models, _laws={}), gone


def _curve(measured: CostCurve, seconds: Callable[[int, float], float]) -> CostCurve:
    """Return a curve over every number of tokens that `measured` covers, at its contexts."""
    counts = tuple(range(1, 1 + (_LONGEST if measured.constant else measured.tokens[-1])))
    return CostCurve(
        counts, measured.contexts, tuple(tuple(seconds(n, context) for n in counts) for context in measured.contexts)
    )


def read_hardware(text: str) -> tuple[float, float, float | None, str]:
    """Return FLOP/s, bytes per second, seconds besides per pass (None if not given) and the name of hardware.

    Parameters
    ----------
    text : str
        A name in `HARDWARE`, or two or three numbers with commas.

    Raises
    ------
    InvalidArgumentError
        If it is neither.

    Examples
    --------
    >>> read_hardware("H100")
    (989000000000000.0, 3350000000000.0, None, 'H100')
    >>> read_hardware("3e14,2e12,1e-5")
    (300000000000000.0, 2000000000000.0, 1e-05, 'other hardware')
    """
    name = next((known for known in HARDWARE if known.lower() == text.strip().lower()), None)
    if name is not None:
        return HARDWARE[name].flops_per_second, HARDWARE[name].bytes_per_second, None, name
    try:
        flops, moved, *more = (float(part) for part in text.split(","))
        (besides,) = more or (None,)
    except ValueError:
        raise InvalidArgumentError(
            f"expected hardware out of {', '.join(HARDWARE)}, or its FLOP/s and bytes per second with commas, such as "
            f"312e12,2.039e12; got {text!r}"
        ) from None
    return flops, moved, besides, "other hardware"


def estimate_of(profile: Profile) -> str | None:
    """Return what a profile's costs were estimated by; None if they were measured (or given by hand)."""
    said = profile.provenance.get("estimate")
    return None if said is None else str(said)
