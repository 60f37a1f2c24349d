"""Profiles: what was measured about a set of models, on one machine, for one workload.

A profile is two files: ``profile.json`` (provenance, models, raw cost samples) and beside it
``profile.traces.npz`` (what every model said along the target's output, and the lookup table),
which the former names by its SHA-256, so that the two of different profiles are never read as one.
Cost curves and acceptance laws are derived from those when the profile is loaded, so nothing
derived can go stale.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hsdopt.acceptance import Acceptance, Strays, Traces
from hsdopt.costs import CostCurve, CostSample
from hsdopt.errors import InvalidArgumentError, PredictionError, ProfileError
from hsdopt.files import excerpt, parse_json, prepared, read_document, require_regular
from hsdopt.plan import LOOKUP, Plan
from hsdopt.traces_file import compressed, pack_traces, read_arrays, sha256, unpack_traces

__all__ = ["SCHEMA", "ModelInfo", "Profile", "Setting", "Shape", "traces_path"]

SCHEMA = 1
"""The version of the profile's schema that this code writes and reads."""

PUBLISHED = 4
"""Draft length for which the published definitions of acceptance are written down."""

DEFAULT_MAX_LENGTH = 32
"""Longest draft for which acceptance is derived from traces."""


_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Name = Annotated[str, Field(min_length=1)]
_Tokens = Annotated[int, Field(ge=0, le=2**24)]
"""Tokens of one pass, or of one context: more than any model has positions for."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Shape(_Record):
    """What the work of a network's passes follows from; see `hsdopt.work`.

    Attributes
    ----------
    layers, hidden_size, intermediate_size, heads, kv_heads, head_dim, vocab_size : int
        Of the decoder. Layers may differ in width; the matrices are then counted, and attention is that of the widths
        given here.
    matrix_parameters : int or None
        Entries of all matrices that every new token is multiplied with: neither embedding tables nor the head nor
        experts. Taken to be those of gated feed-forward layers if not counted.
    expert_parameters : int
        Entries of the matrices of all experts together.
    experts, experts_per_token : int
        Experts of a layer, and how many of them a token goes through; 0 without experts.
    weight_bytes : int or None
        Bytes of the weights that a pass reads, those of all experts included: everything but tables of which it
        reads some rows. `value_bytes` per parameter if not counted.
    value_bytes : int
        Bytes of one number in the key-value cache.
    cross_attention : bool
        Whether every layer attends to an encoder's output as well.
    """

    layers: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=0)
    heads: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    matrix_parameters: int | None = Field(default=None, ge=0)
    expert_parameters: int = Field(default=0, ge=0)
    experts: int = Field(default=0, ge=0)
    experts_per_token: int = Field(default=0, ge=0)
    weight_bytes: int | None = Field(default=None, ge=0)
    value_bytes: int = Field(default=2, ge=1)
    cross_attention: bool = False


class ModelInfo(_Record):
    """One model of a profile, with enough to load it again.

    Attributes
    ----------
    source : str
        Built-in name, folder, GGUF file or hub id that `load_models` takes.
    kind : str
        "transformers" or "lookup".
    parameters, bytes : int
        Parameters, and bytes of weights that this model adds (shared tensors count once).
    context : int or None
        The most positions it can hold.
    tokenizer : str
        Fingerprint of its vocabulary.
    shape : Shape or None
        What the work of its passes follows from; None in profiles that were made without.
    """

    source: str
    kind: Literal["transformers", "lookup"] = "transformers"
    parameters: int = Field(default=0, ge=0)
    bytes: int = Field(default=0, ge=0)
    context: int | None = Field(default=None, ge=1)
    tokenizer: str = ""
    dtype: str = ""
    device: str = "cpu"
    engine: str = "transformers"
    revision: str = ""
    recipe: str = ""
    shape: Shape | None = None


class Setting(_Record):
    """How tokens were chosen while profiling; predictions hold for this setting alone."""

    temperature: float = Field(default=0.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    repetition_penalty: float = Field(default=1.0, gt=0)
    max_new_tokens: int = Field(default=48, ge=1)


class _Sample(_Record):
    model: str
    tokens: Annotated[_Tokens, Field(ge=1)]
    context: _Tokens
    batch: Annotated[_Tokens, Field(ge=1)] = 1
    seconds: list[_Seconds] = Field(min_length=1)
    median: _Seconds = 0.0
    spread: _Seconds = 0.0


class _Strays(_Record):
    drafter: str
    verifier: str
    counts: list[tuple[int, int, int, int]]  # asked, proposed, accepted, drafts


class _File(_Record):
    schema_version: int = Field(alias="schema")
    target: str
    models: dict[_Name, ModelInfo]
    setting: Setting
    provenance: dict[str, Any]
    costs: list[_Sample]
    switches: dict[str, _Seconds] = {}
    overhead: dict[str, _Seconds] = {}
    counts: dict[str, Any] = {}
    strays: list[_Strays] = []
    traces_sha256: str | None = None


@dataclass(frozen=True, slots=True)
class Profile:
    """Pass costs and acceptance of a target and its drafters.

    Attributes
    ----------
    target : str
        Name of the target.
    costs : mapping of str to CostCurve
        c(n) per model; for the lookup drafter the seconds of one request.
    acceptances : mapping of (drafter, verifier) to Acceptance
        Laws given by hand; those of traced pairs are derived by `acceptance`.
    models : mapping of str to ModelInfo
        Where each model came from.
    setting : Setting
        Temperature and filters.
    samples : mapping of str to tuple of CostSample
        Raw timings.
    traces : Traces or None
        What every model said, position by position.
    lookup : mapping of str to ndarray
        The lookup drafter's table (arrays), empty if there is none.
    overhead : mapping of str to float
        Seconds outside the passes, by what they are spent on.
    strays : mapping of (drafter, verifier) to Strays
        What became of drafts off the target's trajectory, from short runs; empty if none were made.
    provenance : mapping
        Versions, device, threads, workload hash, date, command line.
    """

    target: str
    costs: Mapping[str, CostCurve]
    acceptances: Mapping[tuple[str, str], Acceptance] = field(default_factory=lambda: MappingProxyType({}))
    models: Mapping[str, ModelInfo] = field(default_factory=lambda: MappingProxyType({}))
    setting: Setting = field(default_factory=Setting)
    samples: Mapping[str, tuple[CostSample, ...]] = field(default_factory=lambda: MappingProxyType({}))
    traces: Traces | None = None
    lookup: Mapping[str, NDArray[np.int64]] = field(default_factory=lambda: MappingProxyType({}))
    overhead: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    strays: Mapping[tuple[str, str], Strays] = field(default_factory=lambda: MappingProxyType({}))
    provenance: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    _laws: dict[tuple[str, str], Acceptance] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Refuse a profile without its target."""
        if self.target not in self.costs:
            raise ProfileError(
                f"expected costs of the target {self.target}; got those of {', '.join(self.costs) or 'none'}"
            )

    @classmethod
    def from_rates(
        cls,
        target: str,
        costs: Mapping[str, float | CostCurve | Callable[[int], float]],
        acceptance: Mapping[tuple[str, str], float | Acceptance],
        *,
        max_tokens: int = 257,
    ) -> Profile:
        """Return a profile from numbers given by hand, for what-if questions and tests.

        Parameters
        ----------
        target : str
        costs : mapping
            Per model a number (the same for any number of tokens), a curve, or a function of n.
        acceptance : mapping of (drafter, verifier)
            Rates (independent tokens) or laws.
        max_tokens : int
            How far a cost function is tabulated.

        Examples
        --------
        >>> profile = Profile.from_rates("big", {"big": 1.0, "small": 0.1}, {("small", "big"): 0.8})
        >>> profile.cost("small")(3)
        0.1
        """
        laws = {
            pair: value if isinstance(value, Acceptance) else Acceptance.from_rate(value)
            for pair, value in acceptance.items()
        }
        return cls(target, {name: _as_curve(cost, max_tokens) for name, cost in costs.items()}, laws)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the models, drafters in the order given, the target last."""
        return (*(name for name in self.costs if name != self.target), self.target)

    @property
    def drafters(self) -> tuple[str, ...]:
        """Names of all models but the target."""
        return self.names[:-1]

    @property
    def context(self) -> float | None:
        """The mean context length that the target's output visited; None without traces."""
        return None if self.traces is None or not len(self.traces) else float(np.mean(self.traces.context))

    def require(self, name: str) -> None:
        """Raise PredictionError if the profile has no model `name`."""
        if name not in self.costs:
            raise PredictionError(f"expected one of the profiled models ({', '.join(self.names)}); got {name}")

    def require_greedy(self, plan: Plan) -> None:
        """Raise PredictionError if tokens were sampled, so that the traces say nothing of a `Bild` plan.

        Its thresholds are compared with the laws that tokens are drawn from, and its drafts are draws from the small
        model's; the traces hold laws of unprocessed logits, and most likely tokens.
        """
        if self.setting.temperature > 0 or self.setting.repetition_penalty != 1:
            raise PredictionError(
                f"expected a profile at --temperature 0 to predict {plan}; its traces at temperature "
                f"{self.setting.temperature:g} do not hold what its thresholds are compared with: "
                "run it with hsdopt validate --plan, or profile without sampling"
            )

    def cost(self, name: str) -> CostCurve:
        """Return the cost curve of `name`.

        Raises
        ------
        PredictionError
            If the profile has no such model.
        """
        self.require(name)
        return self.costs[name]

    def acceptance(self, drafter: str, verifier: str) -> Acceptance:
        """Return how `verifier` receives the tokens of `drafter`.

        Raises
        ------
        PredictionError
            If the pair was not measured.
        """
        pair = (drafter, verifier)
        if pair in self.acceptances:
            return self.acceptances[pair]
        if pair not in self._laws:
            self.require(drafter)
            self.require(verifier)
            if self.traces is None:
                raise PredictionError(
                    f"expected an acceptance rate of {drafter}'s tokens by {verifier}; none was given"
                )
            self._laws[pair] = self.traces.acceptance(drafter, verifier, self.max_draft_length)
        return self._laws[pair]

    @property
    def max_draft_length(self) -> int:
        """The longest draft for which traces can speak."""
        if self.traces is None:
            return DEFAULT_MAX_LENGTH
        longest = int(np.bincount(np.asarray(self.traces.prompt)).max()) if len(self.traces) else 1
        return max(1, min(DEFAULT_MAX_LENGTH, longest - 1))

    def with_traces(self, traces: Traces) -> Profile:
        """Return the profile with other traces in place of its own, and the laws that follow from them."""
        return replace(self, traces=traces, _laws={})

    def as_iid(self) -> Profile:
        """Return the published model's view: one cost per model, one acceptance rate per pair."""
        laws = {
            (drafter, verifier): self.acceptance(drafter, verifier).as_iid()
            for drafter in self.drafters
            for verifier in self.names
            if verifier not in (drafter, LOOKUP)
        }
        costs = {name: CostCurve.fixed(curve(1, self.context)) for name, curve in self.costs.items()}
        return replace(self, costs=costs, acceptances=laws, traces=None, samples={}, _laws={})

    def resample(self, rng: np.random.Generator) -> Profile:
        """Return one bootstrap replicate: prompts and cost samples drawn with replacement."""
        curves = dict(self.costs)
        for name, samples in self.samples.items():
            drawn = [replace(s, seconds=tuple(rng.choice(s.seconds, len(s.seconds)).tolist())) for s in samples]
            known = self.costs[name]
            curves[name] = _fixed(drawn) if known.constant else CostCurve.from_samples(drawn, switch=known.switch)
        traces = (
            None
            if self.traces is None
            else self.traces.take(rng.integers(self.traces.prompts, size=self.traces.prompts))
        )
        return replace(self, costs=curves, traces=traces, _laws={})

    def save(self, path: str | Path) -> None:
        """Write the profile to `path` and its traces beside it; a failure leaves both as they were.

        Raises
        ------
        ProfileError
            If a file cannot be written (a full disk, a missing folder); what stood there before is kept.
        """
        path = Path(path)
        require_regular(path, "a profile, which keeps its traces beside it")
        by_hand = [name for name in self.costs if name not in self.samples]
        if by_hand or self.acceptances:
            raise ProfileError(
                f"expected a measured profile to save; numbers of {', '.join(by_hand) or self.target} were given by "
                "hand, and files hold measurements only"
            )
        arrays = {**pack_traces(self.traces), **{f"lookup/{key}": value for key, value in self.lookup.items()}}
        try:
            traces = compressed(arrays)
            stored = _to_file(self).model_copy(update={"traces_sha256": sha256(traces)})
            # numbers as the json module writes them, so that they read as they stood in the journal
            text = json.dumps(stored.model_dump(mode="json", by_alias=True), indent=1)
            with prepared(path, lambda stream: stream.write(text.encode())) as put:
                if traces is None:
                    put()
                    traces_path(path).unlink(missing_ok=True)
                else:
                    with prepared(traces_path(path), lambda stream: stream.write(traces)) as put_traces:
                        put_traces()
                        put()
        except OSError as error:
            raise ProfileError(
                f"cannot write {path}: {error.strerror or error}; free some space or choose another -o"
            ) from error

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Return the profile saved at `path`.

        Raises
        ------
        ProfileError
            Naming file, field, expected and found, if anything does not fit.
        """
        path = Path(path)
        stored = _read(path)
        curves, samples = _curves(stored, path)
        beside = traces_path(path)
        if stored.traces_sha256 is None and stored.counts:
            raise ProfileError(f"{path}, field traces_sha256: expected the checksum of its traces; got none")
        arrays = {} if stored.traces_sha256 is None else read_arrays(beside, stored.traces_sha256)
        lookup = {key.removeprefix("lookup/"): value for key, value in arrays.items() if key.startswith("lookup/")}
        return cls(
            stored.target,
            curves,
            models=dict(stored.models),
            setting=stored.setting,
            samples=samples,
            traces=unpack_traces(
                arrays,
                beside,
                target=stored.target,
                verifiers=tuple(name for name, info in stored.models.items() if info.kind != LOOKUP),
                greedy=stored.setting.temperature == 0,
            ),
            lookup=lookup,
            overhead=stored.overhead,
            strays=_unpack_strays(stored, path),
            provenance=stored.provenance,
        )


def _as_curve(cost: float | CostCurve | Callable[[int], float], max_tokens: int) -> CostCurve:
    if isinstance(cost, CostCurve):
        return cost
    return CostCurve.from_function(cost, max_tokens) if callable(cost) else CostCurve.fixed(cost)


def _fixed(samples: Sequence[CostSample]) -> CostCurve:
    return CostCurve.fixed(float(np.median([seconds for sample in samples for seconds in sample.seconds])))


def traces_path(path: Path) -> Path:
    """Return where the traces of the profile at `path` lie: beside it, or beside the file that a link leads to."""
    beside = _beside(path)
    return _beside(path.resolve()) if path.is_symlink() and not beside.exists() else beside


def _beside(path: Path) -> Path:
    return path.with_name(path.name.removesuffix(".json") + ".traces.npz")


def _to_file(profile: Profile) -> _File:
    costs = [
        _Sample(
            model=name,
            tokens=s.tokens,
            context=s.context,
            batch=s.batch,
            seconds=list(s.seconds),
            median=s.median,
            spread=s.spread,
        )
        for name, samples in profile.samples.items()
        for s in samples
    ]
    return _File(
        schema=SCHEMA,
        target=profile.target,
        models=dict(profile.models),
        setting=profile.setting,
        provenance=dict(profile.provenance),
        costs=costs,
        switches={name: curve.switch for name, curve in profile.costs.items() if curve.switch},
        overhead=dict(profile.overhead),
        counts=_counts(profile),
        strays=[
            _Strays(drafter=drafter, verifier=verifier, counts=[(*kind, n) for kind, n in sorted(of.counts.items())])
            for (drafter, verifier), of in profile.strays.items()
        ],
    )


def _unpack_strays(stored: _File, path: Path) -> dict[tuple[str, str], Strays]:
    found = {}
    for entry in stored.strays:
        try:
            found[entry.drafter, entry.verifier] = Strays({(a, p, m): n for a, p, m, n in entry.counts})
        except InvalidArgumentError as error:
            raise ProfileError(f"{path}, field strays: {error}") from error
    return found


def _counts(profile: Profile) -> dict[str, Any]:
    """Return rates with the counts behind them, for people who read the file; loading derives them anew."""
    if profile.traces is None:
        return {}
    counts: dict[str, Any] = {}
    for drafter in profile.drafters:
        for verifier in profile.names:
            if verifier in (drafter, LOOKUP):
                continue
            law = profile.acceptance(drafter, verifier)
            trials = law.trials[0] if law.trials else 0
            counts[f"{drafter} by {verifier}"] = {
                "rate": round(law.rate, 6),
                "first_position": round(law.survival[1], 6),
                "positions": trials,
                "published": asdict(law.published(min(PUBLISHED, profile.max_draft_length))),
                "survival": [round(s, 6) for s in law.survival],
            }
    return counts


def _read(path: Path) -> _File:
    try:
        data = read_document(path, error=ProfileError)
    except FileNotFoundError:
        raise ProfileError(
            f"expected a profile at {path}; there is no such file: make one with hsdopt profile"
        ) from None
    except OSError as error:
        raise ProfileError(f"expected a readable profile at {path}; {error}") from error
    value = parse_json(data, str(path), error=ProfileError)
    version = value.get("schema") if isinstance(value, dict) else None
    if version != SCHEMA or isinstance(version, bool):
        raise ProfileError(
            f"expected schema {SCHEMA} in {path}; got {excerpt(version)}: profile again, or use another hsdopt"
        )
    try:
        # the JSON mode of pydantic reads pairs as tuples; the text is known to be sound
        stored = _File.model_validate_json(data.removeprefix(b"\xef\xbb\xbf"))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(_shown(str(part)) for part in first["loc"])
        raise ProfileError(
            f"{path}, field {where}: {first['msg'].lower()}; got {excerpt(first.get('input'))}"
        ) from error
    _require_names(stored, path)
    return stored


def _require_names(stored: _File, path: Path) -> None:
    """Refuse a profile whose fields do not speak of one set of models."""
    known = ", ".join(map(_shown, stored.models)) or "none"
    if stored.target not in stored.models or stored.models[stored.target].kind == LOOKUP:
        raise ProfileError(
            f"{path}, field target: expected a language model out of {known}; got {_shown(stored.target)}"
        )
    named = [("costs", sample.model) for sample in stored.costs] + [("switches", name) for name in stored.switches]
    named += [("strays", name) for entry in stored.strays for name in (entry.drafter, entry.verifier)]
    for name in (name for name, info in stored.models.items() if (info.kind == LOOKUP) != (name == LOOKUP)):
        raise ProfileError(
            f"{path}, field models.{_shown(name)}.kind: expected lookup under the name lookup and there alone;"
            f" got {stored.models[name].kind}"
        )
    for field_name, name in named:
        if name not in stored.models:
            raise ProfileError(f"{path}, field {field_name}: expected a model out of {known}; got {_shown(name)}")


def _shown(name: str) -> str:
    """Return a name as one line shows it."""
    return name if name.isprintable() and len(name) <= 60 else excerpt(name)


def _curves(stored: _File, path: Path) -> tuple[dict[str, CostCurve], dict[str, tuple[CostSample, ...]]]:
    samples: dict[str, list[CostSample]] = {name: [] for name in stored.models}
    for s in stored.costs:
        samples[s.model].append(CostSample(s.tokens, s.context, tuple(s.seconds), s.batch))
    curves = {}
    for name, taken in samples.items():
        if not taken:
            raise ProfileError(f"{path}, field costs: expected timings of {name}; got none: finish it with --resume")
        try:
            if stored.models[name].kind == LOOKUP:
                curves[name] = _fixed(taken)
            else:
                curves[name] = CostCurve.from_samples(taken, switch=stored.switches.get(name, 0.0))
        except InvalidArgumentError as error:
            raise ProfileError(f"{path}, field costs of {name}: {error}; finish it with --resume") from error
    return curves, {name: tuple(taken) for name, taken in samples.items()}
