"""Replay of traces: a plan walked along the outputs that the target wrote while it was profiled.

Nothing is averaged before the walk. Whether a verifier accepts a drafter's token is read at the
position of the trajectory at which it stands, and every pass costs what the curve says at the
context reached there. Three approximations remain. Inside a draft that has left the trajectory,
acceptance is drawn from counts of short runs (`Profile.strays`), or, where there are none, models
are taken to say what they said on the trajectory at the same position; a draft that reaches past the
end of an output reads its last position; and a token of the small model that Big Little Decoder
lets stand is taken to be the trajectory's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from hsdopt.acceptance import Traces
from hsdopt.checks import check_length
from hsdopt.errors import InvalidArgumentError, PredictionError
from hsdopt.overhead import Overhead
from hsdopt.plan import LOOKUP, Bild, Plan
from hsdopt.profiles import DEFAULT_MAX_LENGTH, Profile
from hsdopt.simulate.engine import (
    CostTable,
    Counts,
    Draft,
    Edge,
    Engine,
    Floats,
    Ints,
    Where,
    World,
    compile_plan,
    counted,
    edges,
    refuse_extrapolation,
)
from hsdopt.simulate.intervals import expanded_tail

__all__ = ["BildCounts", "ReplayedRun", "replay", "replay_many"]

_REPEATS = 16
"""Walks per prompt when acceptance has to be drawn."""

"""The most tokens of a stint in the public code of Big Little Decoder."""

PRIOR_DRAFTS = 10.0
"""Drafts off the trajectory that the law along it is worth, where some were counted."""

_ENDLESS = np.iinfo(np.int64).max // 2
"""A run of accepted tokens that lasts to the end of an output; drafts past the end count as its last position."""


@dataclass(frozen=True, slots=True)
class BildCounts:
    """What Big Little Decoder did.

    Attributes
    ----------
    fallbacks : int
        Stints that the small model ended because it was unsure; each discarded one of its tokens.
    rollbacks : int
        Reviews that withdrew a token.
    withdrawn : int
        Tokens withdrawn, those behind the first doubtful one included.
    deviations : int
        Small tokens let stand though the large model's most likely token was another.
    """

    fallbacks: int
    rollbacks: int
    withdrawn: int
    deviations: int


@dataclass(frozen=True, slots=True)
class ReplayedRun(Counts):
    """What a replayed run did; counts are summed over prompts and repeats.

    Attributes
    ----------
    plan : Plan
    prompt_tokens : ndarray of int, shape [prompts]
        Tokens after the first, per prompt.
    prompt_rounds : ndarray of float, shape [prompts]
        Passes of the target, per prompt.
    prompt_seconds : ndarray of float, shape [prompts]
        Seconds from the end of prefill, per prompt; the mean over repeats.
    repeats : int
        Walks per prompt; 1 if nothing had to be drawn.
    bild : BildCounts or None
        Fallbacks and rollbacks of a bild plan.
    overhead : float
        Seconds per token outside the passes; 0 unless they were asked for. They are part of `seconds_per_token`, of
        `prompt_seconds` and of the intervals.
    """

    plan: Plan
    prompt_tokens: Ints = field(repr=False, compare=False)
    prompt_rounds: Floats = field(repr=False, compare=False)
    prompt_seconds: Floats = field(repr=False, compare=False)
    repeats: int
    bild: BildCounts | None = None
    overhead: float = 0.0

    @property
    def seconds_per_token(self) -> float:
        """Seconds per token of the target, pooled (sum over sum)."""
        return self.seconds / self.tokens + self.overhead if self.tokens else 0.0

    @property
    def prompt_seconds_per_token(self) -> Floats:
        """Seconds per token after the first of each prompt (nan for outputs of one token), shape [prompts]."""
        tokens = self.prompt_tokens.astype(float)
        return np.asarray(np.divide(self.prompt_seconds, tokens, out=np.full_like(tokens, np.nan), where=tokens > 0))

    def interval(
        self, rng: np.random.Generator, *, replicates: int = 1000, confidence: float = 0.95
    ) -> tuple[float, float]:
        """Return the bootstrap interval of `seconds_per_token` over prompts; the percentiles are the plain ones.

        Raises
        ------
        InvalidArgumentError
            If `replicates` is below 1 or `confidence` is not between 0 and 1.
        """
        check_length(replicates, "replicates", minimum=1)
        if not 0 < confidence < 1:
            raise InvalidArgumentError(f"expected a confidence between 0 and 1; got {confidence}")
        kept = np.flatnonzero(self.prompt_tokens)
        drawn = rng.choice(kept, (replicates, len(kept)))
        rates = self.prompt_seconds[drawn].sum(axis=1) / self.prompt_tokens[drawn].sum(axis=1)
        low, high = np.quantile(rates, [(1 - confidence) / 2, (1 + confidence) / 2])
        return float(low), float(high)

    def predictive_interval(
        self,
        rng: np.random.Generator,
        *,
        prompts: int,
        noise: Floats | None = None,
        replicates: int = 4000,
        confidence: float = 0.95,
    ) -> tuple[float, float]:
        """Return where the seconds per token over `prompts` new prompts should lie.

        Both what was replayed and what will be run are samples of prompts, so the ratio of two bootstrap means, one
        of each size, spreads the prediction. Percentiles are moved out for the number of replayed prompts, as in
        `hsdopt.simulate.compare`. `noise` holds factors, drawn with replacement, by which the seconds may be off for
        another reason, such as the timings behind the cost curves.

        Raises
        ------
        InvalidArgumentError
            If a number is below 1 or `confidence` is not between 0 and 1.
        """
        check_length(replicates, "replicates", minimum=1)
        check_length(prompts, "prompts", minimum=1)
        if not 0 < confidence < 1:
            raise InvalidArgumentError(f"expected a confidence between 0 and 1; got {confidence}")
        kept = np.flatnonzero(self.prompt_tokens)

        def means(size: int) -> Floats:
            drawn = rng.choice(kept, (replicates, size))
            return np.asarray(self.prompt_seconds[drawn].sum(axis=1) / self.prompt_tokens[drawn].sum(axis=1))

        tail = expanded_tail(len(kept), confidence)
        other = 1.0 if noise is None else rng.choice(noise, replicates)
        low, high = np.quantile(means(prompts) / means(len(kept)) * other, [tail, 1 - tail])
        return float(low * self.seconds_per_token), float(high * self.seconds_per_token)


def replay(
    plan: Plan,
    profile: Profile,
    *,
    max_new_tokens: int | None = None,
    seed: int = 0,
    context: float | None = None,
    repeats: int | None = None,
    overhead: bool = False,
) -> ReplayedRun:
    """Return what a plan does along the outputs traced in a profile.

    Every output runs from the token that prefill gave to its last one; drafts are cut near the end
    as the runtime cuts them. Greedy traces are walked once, without chance, unless counts from short runs
    say what a level below the target does off the trajectory. Sampled ones accept a
    token with the probability traced at its position, in several walks per prompt.

    Parameters
    ----------
    plan : Plan
        Any plan, Big Little Decoder included.
    profile : Profile
        A profile with traces.
    max_new_tokens : int or None
        Cut outputs to this length, the first token included; None for all that was traced.
    seed : int
        Of the draws; without effect where nothing is drawn.
    context : float or None
        Read every cost at this context length; None for the one reached at each pass.
    repeats : int or None
        Walks per prompt; None for 1 if nothing is drawn, else 16.
    overhead : bool
        Add the seconds outside the passes that the profile measured.

    Returns
    -------
    ReplayedRun

    Raises
    ------
    PredictionError
        If the profile has no traces of the models, its outputs have one token each, a level is
        lenient, passes longer than profiled take more than 0.2 % of the time, or the profile has no overhead where
        it is asked for.
    InvalidArgumentError
        If a number is below 1.

    Examples
    --------
    Two models that agree everywhere but at the fourth of six tokens:

    >>> import numpy as np
    >>> from hsdopt.costs import CostCurve
    >>> from hsdopt.plan import parse_plan
    >>> tokens = np.arange(6)
    >>> traces = Traces(
    ...     tokens, np.zeros(6, dtype=int), 10 + tokens,
    ...     {"big": tokens, "small": np.array([0, 1, 2, 9, 4, 5])},
    ... )
    >>> costs = {"big": CostCurve.fixed(1.0), "small": CostCurve.fixed(0.1)}
    >>> run = replay(parse_plan("big(small:4)"), Profile("big", costs, traces=traces))
    >>> run.tokens_histogram, round(run.seconds_per_token, 9)
    ((0, 0, 1, 1), 0.5)
    """
    (run,) = replay_many(
        [plan],
        profile,
        max_new_tokens=max_new_tokens,
        seed=seed,
        context=context,
        repeats=repeats,
        overhead=overhead,
    )
    return run


def replay_many(
    plans: Iterable[Plan],
    profile: Profile,
    *,
    max_new_tokens: int | None = None,
    seed: int = 0,
    context: float | None = None,
    repeats: int | None = None,
    overhead: bool = False,
) -> list[ReplayedRun]:
    """Return `replay` of each plan; what they share is prepared once.

    Raises
    ------
    PredictionError, InvalidArgumentError
        As `replay` does.
    """
    if repeats is not None:
        check_length(repeats, "repeats", minimum=1)
    check_length(seed, "seed", minimum=0)
    plans = tuple(plans)
    script = _Script(profile, max_new_tokens, context, max(map(_reach, plans), default=0))
    beside = Overhead.of(profile) if overhead else Overhead()
    runs = []
    for plan in plans:
        for model in plan.models:
            profile.require(model)
        run = _walk(plan, script, seed, repeats) if plan.bild is None else _BildWalk(plan.bild, script).run()
        refuse_extrapolation(plan, run, {model: script.costs(model) for model in plan.models})
        runs.append(_with_overhead(run, beside))
    return runs


def _with_overhead(run: ReplayedRun, beside: Overhead) -> ReplayedRun:
    outside = beside.seconds(run.kinds_per_token, run.plan.target)
    return replace(run, overhead=outside, prompt_seconds=run.prompt_seconds + outside * run.prompt_tokens)


def _reach(plan: Plan) -> int:
    """Return how far past the end of an output a plan may come."""
    return compile_plan(plan).reach if plan.bild is None else 0


class _Script:
    """The traced outputs of a profile, and costs along them, read by every plan that is replayed.

    Attributes
    ----------
    profile : Profile
    traces : Traces
    first, ends : ndarray of int, shape [prompts]
        Positions at which each output begins and ends in the traces.
    wanted : ndarray of int, shape [prompts]
        Tokens to gain after the first.
    prompt : ndarray of int, shape [prompts]
        Tokens before each output.
    """

    def __init__(self, profile: Profile, max_new_tokens: int | None, context: float | None, beyond: int) -> None:
        if profile.traces is None or not len(profile.traces):
            raise PredictionError("expected a profile with traces to replay; this one has none: use simulate instead")
        self.profile = profile
        self.traces = profile.traces
        _, self.first, count = np.unique(self.traces.prompt, return_index=True, return_counts=True)
        self.ends = self.first + count - 1
        if max_new_tokens is not None:
            count = np.minimum(count, check_length(max_new_tokens, "max_new_tokens", minimum=1))
        self.wanted = count - 1
        if not self.wanted.any():
            raise PredictionError("expected outputs of at least 2 tokens to replay; got 1: profile longer outputs")
        self.prompt = np.asarray(self.traces.context)[self.first].astype(np.int64)
        self._context = context
        # Big Little Decoder's first review reads the last token of the prompt again.
        self._span = (int(self.prompt.min()) - 1, int((self.prompt + self.wanted).max()))
        self._beyond = beyond
        self._tables: dict[str, CostTable] = {}
        self._odds: dict[tuple[str, str], Floats] = {}
        self._runs: dict[tuple[str, str, float], Ints | None] = {}
        self._strays: dict[tuple[str, str], _Stray] = {}
        self._end_of_each = np.repeat(self.ends, self.ends - self.first + 1)

    def costs(self, model: str) -> CostTable:
        """Return the costs of a model along the outputs, and a little past their ends."""
        if model not in self._tables:
            curve = self.profile.cost(model)
            if self._context is None:
                first, last = self._span
                curve(1, last)  # refuses contexts that were not profiled
                self._tables[model] = CostTable(curve, span=(first, last + self._beyond))
            else:
                self._tables[model] = CostTable(curve, context=self._context)
        return self._tables[model]

    def odds(self, drafter: str, verifier: str) -> Floats:
        """Return the probability, per position, that the verifier accepts the drafter's token.

        Under sampling it is that of the token that was realised, min(1, q/p), where it was traced: the product of
        overlaps along a trajectory would be biased. Pairs below the target have only their overlap.
        """
        pair = (drafter, verifier)
        if pair not in self._odds:
            self.require(*pair)
            ratio = self.traces.ratio.get(pair)
            self._odds[pair] = self.traces.agreement(drafter, verifier) if ratio is None else ratio
        return self._odds[pair]

    def runs(self, drafter: str, verifier: str, lenience: float = 1.0) -> Ints | None:
        """Return, per position, how many tokens in a row are accepted from there on; None if that is drawn."""
        key = (drafter, verifier, lenience)
        if key not in self._runs:
            odds = self.odds(drafter, verifier) if lenience == 1 else self._lenient(drafter, verifier, lenience)
            drawn = bool(np.any((odds > 0) & (odds < 1)))
            self._runs[key] = None if drawn else _runs(odds, self._end_of_each)
        return self._runs[key]

    def agreed(self, model: str) -> Ints:
        """Return, per position, how many tokens in a row `model` writes as the target does."""
        if model == self.profile.target:
            return np.full(len(self.traces), _ENDLESS)
        runs = self.runs(model, self.profile.target)
        assert runs is not None  # noqa: S101 -- texts are followed through greedy traces only
        return runs

    def stray(self, drafter: str, verifier: str, lenience: float) -> _Stray | None:
        """Return what a model below the target does with drafts off its trajectory; None if nothing was counted."""
        pair = (drafter, verifier)
        if lenience != 1 or verifier == self.profile.target or self.traces.overlap or pair not in self.profile.strays:
            return None
        if pair not in self._strays:
            prior = self.profile.acceptance(drafter, verifier)
            curves = self.profile.strays[pair].survival(prior, DEFAULT_MAX_LENGTH, weight=PRIOR_DRAFTS)
            self._strays[pair] = _Stray(*curves)
        return self._strays[pair]

    def _lenient(self, drafter: str, verifier: str, lenience: float) -> Floats:
        """Return where a lenient verifier takes a greedy drafter's token: it is its own, or p > q / lenience."""
        likely = np.exp(-self.traces.surprise[drafter, verifier]) > self.traces.top[drafter] / lenience
        return np.asarray(likely | (self.traces.choice[drafter] == self.traces.choice[verifier]), dtype=float)

    def check_lenience(self, plan: Plan) -> None:
        """Raise PredictionError if a level of `plan` is lenient and the traces do not tell what it accepts."""
        setting = self.profile.setting
        for level in plan.lenient:
            below = [segment.level for segment in level.row if segment.level.model != LOOKUP]
            plain = setting.temperature == 0 and setting.top_p == 1 and setting.top_k == 0
            plain = plain and setting.repetition_penalty == 1 and not self.traces.overlap
            known = all((one.model, level.model) in self.traces.surprise for one in below)
            if not (plain and known) or any(one.lenience != 1 for one in below):
                raise PredictionError(
                    f"expected lenience 1 to predict {plan}; got {level.lenience:g} at {level.model}: traces tell what "
                    "a lenient level accepts when decoding is greedy, without filters, and no level below it is "
                    "lenient; measure it with short runs"
                )

    def lookup(self, verifier: str) -> tuple[Ints, Ints]:
        """Return what the lookup drafter proposes at each position, and how much of it the verifier accepts."""
        if self.traces.proposed is None or verifier not in self.traces.lookup_accepted:
            raise PredictionError(
                f"expected traces of lookup under {verifier}; add it with --draft lookup --into profile.json"
            )
        return self.traces.proposed, self.traces.lookup_accepted[verifier]

    def require(self, *models: str) -> None:
        """Raise PredictionError if a model was not traced."""
        for model in models:
            if model not in self.traces.choice:
                raise PredictionError(
                    f"expected traces of {model}; got those of {', '.join(self.traces.choice)}: "
                    f"add it with --draft {model} --into profile.json"
                )


@dataclass(frozen=True, slots=True)
class _Stray:
    """Chances that at least 0, 1, ... tokens are proposed, and accepted, off the trajectory."""

    offered: Floats
    taken: Floats

    def proposed(self, draws: Floats) -> Ints:
        """Return how many tokens are proposed, by numbers drawn uniformly."""
        return np.asarray((draws[:, np.newaxis] < self.offered[1:]).sum(axis=1))

    def accepted(self, draws: Floats, sure: Ints) -> Ints:
        """Return how many tokens are accepted, given that at least `sure` are."""
        least = self.taken[np.minimum(sure, len(self.taken) - 1)]
        more = (draws * least)[:, np.newaxis] < self.taken[1:]
        return np.asarray(np.maximum(more.sum(axis=1), sure))


def _runs(odds: Floats, ends: Ints) -> Ints:
    """Return the distance from each position to the next refusal in the same output; `ends` is its last position."""
    places = np.arange(len(odds))
    refusals = np.where(odds > 0, len(odds), places)
    following = np.minimum.accumulate(refusals[::-1])[::-1]
    return np.asarray(np.where(following > ends, _ENDLESS, following - places))


class _Trajectories(World):
    """Acceptance as traced, at the position at which a draft starts.

    With `follow` it is known per lane where the text left the target's own output, if it did. A draft behind that
    place is judged by what was counted in short runs, if the profile has such counts, else as if the trajectory went
    on.
    """

    def __init__(self, script: _Script, lanes: Ints, rng: np.random.Generator, *, follow: bool) -> None:
        self._script = script
        self._rng = rng
        self._shift = (script.first - script.prompt)[lanes]
        self._ends = script.ends[lanes]
        self._target = script.profile.target
        self._left = np.full(len(lanes), _ENDLESS)  # place of the first token that is not the target's
        self.writes = follow

    def propose(self, edge: Edge, asked: Ints, where: Where, start: Ints) -> Draft:
        """Read what the lookup drafter found; draw it off the trajectory."""
        proposed, taken = self._script.lookup(edge.verifier)
        places = self._places(where, start)
        tokens = np.minimum(asked, proposed[places])
        if self.writes:
            law = self._script.stray(edge.drafter, edge.verifier, edge.lenience)
            place, left = start + self._shift[where], self._left[where]
            if law is not None:
                astray = np.flatnonzero(left < place)
                tokens[astray] = np.minimum(asked[astray], law.proposed(self._rng.random(len(astray))))
            _, taken = self._script.lookup(self._target)
            self._leave(place, left, np.minimum(taken[places], _ENDLESS), tokens, where)
        return Draft(tokens)

    def accept(self, edge: Edge, draft: Draft, where: Where, start: Ints) -> Ints:
        """Read how much of a draft is accepted; draw where the traces give a probability, or say nothing."""
        places = self._places(where, start)
        accepted = self._read(edge, draft, where, places)
        if not self.writes:
            return accepted
        right = self._left[where] - start - self._shift[where]  # drafted tokens that are the target's, or below 0
        if edge.verifier == self._target:
            return np.minimum(draft.tokens, np.maximum(right, 0))
        law = self._script.stray(edge.drafter, edge.verifier, edge.lenience)
        if law is None:
            return accepted
        sure = np.clip(right + 1, 0, None)
        astray = np.flatnonzero((right < 0) | (accepted > right))
        drawn = law.accepted(self._rng.random(len(astray)), sure[astray])
        accepted[astray] = np.minimum(draft.tokens[astray], drawn)
        return accepted

    def write(self, model: str, tokens: Ints, where: Where, start: Ints) -> None:
        """See where a model by itself leaves the target's output."""
        agreed = self._script.agreed(model)[self._places(where, start)]
        self._leave(start + self._shift[where], self._left[where], agreed, tokens, where)

    def reviewed(self, model: str, accepted: Ints, where: Where, start: Ints) -> None:
        """See whether what stands after a review, the verifier's own token included, is the target's output."""
        end, left = start + accepted + self._shift[where], self._left[where]
        wrong = self._script.agreed(model)[self._places(where, start + accepted)] == 0
        self._left[where] = np.where(left < end, left, np.where(wrong, end, _ENDLESS))

    def _leave(self, place: Ints, left: Ints, agreed: Ints, tokens: Ints, where: Where) -> None:
        """Put `tokens` more tokens on the text, of which `agreed` are the target's."""
        self._left[where] = np.where(left < place, left, np.where(agreed < tokens, place + agreed, _ENDLESS))

    def _read(self, edge: Edge, draft: Draft, where: Where, places: Ints) -> Ints:
        """Return how much of a draft is accepted along the trajectory."""
        if edge.node is None:
            _, accepted = self._script.lookup(edge.verifier)
            return np.asarray(np.minimum(draft.tokens, accepted[places]))
        runs = self._script.runs(edge.drafter, edge.verifier, edge.lenience)
        if runs is not None:
            return np.asarray(np.minimum(draft.tokens, runs[places]))
        return self._draw(self._script.odds(edge.drafter, edge.verifier), draft.tokens, places, self._ends[where])

    def _draw(self, odds: Floats, tokens: Ints, places: Ints, ends: Ints) -> Ints:
        accepted, alive = np.zeros_like(tokens), np.ones(len(tokens), dtype=bool)
        for ahead in range(int(tokens.max())):
            alive &= self._rng.random(len(tokens)) < odds[np.minimum(places + ahead, ends)]
            alive &= tokens > ahead
            accepted += alive
        return accepted

    def _places(self, where: Where, start: Ints) -> Ints:
        return np.asarray(np.minimum(start + self._shift[where], self._ends[where]))


def _walk(plan: Plan, script: _Script, seed: int, repeats: int | None) -> ReplayedRun:
    """Walk a stack of levels along every output, all of them side by side."""
    node = compile_plan(plan)
    below = tuple(edges(node))
    script.check_lenience(plan)
    middle = [edge for edge in below if edge.verifier != plan.target]
    strays = any(script.stray(edge.drafter, edge.verifier, edge.lenience) is not None for edge in middle)
    drawn = any(
        edge.node is not None and script.runs(edge.drafter, edge.verifier, edge.lenience) is None for edge in below
    )
    if repeats is None:
        repeats = _REPEATS if drawn or strays else 1
    prompts = len(script.first)
    lanes = np.tile(np.arange(prompts), repeats)
    follow = strays or any(edge.lenience != 1 for edge in middle)
    world = _Trajectories(script, lanes, np.random.default_rng(seed), follow=follow)
    costs = [script.costs(model) for model in plan.models]
    engine = Engine(node, plan.models, costs, world, script.prompt[lanes] + 1)
    rounds = engine.finish(script.wanted[lanes])
    return ReplayedRun(
        **counted(engine.counts()),
        plan=plan,
        prompt_tokens=script.wanted,
        prompt_rounds=rounds.reshape(repeats, prompts).mean(axis=0),
        prompt_seconds=engine.seconds.reshape(repeats, prompts).mean(axis=0),
        repeats=repeats,
    )


class _BildWalk:
    """Big Little Decoder walked along every output, one after the other.

    The first token costs nothing, as prefill gave its logits: under "paper" semantics it is the small
    model's and the large one reviews it with the rest of the stint, unless the small model is unsure of it.
    """

    def __init__(self, plan: Bild, script: _Script) -> None:
        script.profile.require_greedy(plan)
        script.require(plan.small, plan.large)
        traces, pair = script.traces, (plan.small, plan.large)
        if plan.small not in traces.top or pair not in traces.surprise:
            raise PredictionError(
                f"expected traces of {plan.small}'s confidence and of its surprise under {plan.large}; profile both "
                "models together"
            )
        self._plan = plan
        self._script = script
        self._reference = plan.semantics == "reference"
        self._longest = _ENDLESS if plan.longest_run is None else plan.longest_run
        self._doubts = _doubts(plan, traces)
        self._exceeds = (traces.surprise[pair] > plan.rollback).tolist()
        self._agrees = (traces.choice[plan.small] == traces.choice[plan.large]).tolist()
        self._small: list[tuple[int, int, int, bool]] = []  # prompt, tokens fed, tokens cached, behind the other's
        self._large: list[tuple[int, int, int, bool]] = []
        self._last_is_large = True
        self._gained: Counter[int] = Counter()
        self._drafted = self._accepted = self._fallbacks = self._rollbacks = self._deviations = 0

    def run(self) -> ReplayedRun:
        """Walk all outputs and count."""
        for index, wanted in enumerate(self._script.wanted.tolist()):
            self._output(index, int(self._script.first[index]), wanted)
        plan, drafted, accepted = self._plan, self._drafted, self._accepted
        both = ((plan.small, self._small), (plan.large, self._large))
        passes = Counter((model, fed) for model, made in both for _, fed, _, _ in made)
        switches = {model: sum(switched for *_, switched in made) for model, made in both}
        small, large = (self._seconds(plan.small, self._small), self._seconds(plan.large, self._large))
        return ReplayedRun(
            tokens=int(self._script.wanted.sum()),
            rounds=len(self._large),
            passes=dict(passes),
            drafted={(plan.small, plan.large): drafted},
            accepted={(plan.small, plan.large): accepted},
            discarded={plan.small: self._fallbacks, plan.large: 0},
            tokens_histogram=tuple(self._gained[size] for size in range(max(self._gained) + 1)),
            model_seconds={plan.small: float(small.sum()), plan.large: float(large.sum())},
            switches={model: count for model, count in switches.items() if count},
            plan=plan,
            prompt_tokens=self._script.wanted,
            prompt_rounds=np.bincount([index for index, *_ in self._large], minlength=len(small)).astype(float),
            prompt_seconds=small + large,
            repeats=1,
            bild=BildCounts(self._fallbacks, self._rollbacks, drafted - accepted, self._deviations),
        )

    def _output(self, index: int, first: int, wanted: int) -> None:
        """Walk one output from its first position to its last."""
        shift = int(self._script.prompt[index]) - first  # from a position to the length of the sequence before it
        end = first + 1 + wanted
        begun = not self._reference and not self._doubts[first]
        at, missing = first + 1, 1
        mark = first if begun else at
        self._last_is_large = True
        while at < end:
            at, missing = self._stint(index, (mark, at, end), missing, shift)
            self._pass(index, at - mark + 1, shift + mark - 1, large=True)
            kept = self._review(mark, at)
            self._gained[kept + 1 - max(mark, first + 1)] += 1
            missing = max(0, missing - (at - kept)) + 1
            again = self._reference and kept < at and kept + 1 < end
            if again:
                self._pass(index, 1, shift + kept, large=True)
                self._gained[1] += 1
                missing += 1
            at = mark = kept + 1 + again

    def _stint(self, index: int, span: tuple[int, int, int], missing: int, shift: int) -> tuple[int, int]:
        """Let the small model write until it is unsure; return the next position and what its cache is missing."""
        mark, at, end = span
        stop = min(mark + self._longest, end - 1)
        while at < stop:
            fed = max(1, missing)
            self._pass(index, fed, shift + at - fed, large=False)
            if self._doubts[at]:
                self._fallbacks += 1
                return at, 0
            at, missing = at + 1, 1
        return at, missing

    def _pass(self, index: int, fed: int, cached: int, *, large: bool) -> None:
        (self._large if large else self._small).append((index, fed, cached, large != self._last_is_large))
        self._last_is_large = large

    def _review(self, mark: int, at: int) -> int:
        """Return the position up to which the large model lets the small one's tokens stand."""
        kept = at
        for place in range(mark, at):
            if self._exceeds[place]:
                kept = at if self._reference and self._agrees[place] else place
                break
        self._drafted += at - mark
        self._accepted += kept - mark
        self._rollbacks += kept < at
        self._deviations += self._agrees[mark:kept].count(False)
        return kept

    def _seconds(self, model: str, passes: list[tuple[int, int, int, bool]]) -> Floats:
        """Return the seconds that `passes` take per prompt."""
        prompts = len(self._script.first)
        if not passes:
            return np.zeros(prompts)
        index, fed, cached, switched = np.array(passes, dtype=np.int64).T
        costs = self._script.costs(model)
        seconds = costs.passes(fed, cached) + costs.switch * switched
        return np.bincount(index, weights=seconds, minlength=prompts).astype(float)


def _doubts(plan: Bild, traces: Traces) -> list[bool]:
    """Return at which positions the small model is unsure; with a fixed stride it is never asked."""
    if plan.stride is not None:
        return [False] * len(traces)
    return [bool(top < plan.fallback) for top in traces.top[plan.small].tolist()]
