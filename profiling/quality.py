"""Quality of lossy decoding: how near an output is to the target's own, and to a right answer.

Outputs are compared as texts, with BLEU (Papineni et al. 2002, by sacrebleu) and ROUGE-L (Lin 2004), and as tokens.
Timed runs go on behind an end of text, so every output is cut at its first one before it is judged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, TypeVar

import numpy as np
from sacrebleu.metrics.bleu import BLEU

from hsdopt.errors import InvalidArgumentError, ModelError, PredictionError
from hsdopt.latency import expected_latency
from hsdopt.plan import Bild, Level, Segment, Semantics
from hsdopt.profiles import Profile, Setting
from hsdopt.profiling.validate import MeasuredRun
from hsdopt.runtime.model import Model
from hsdopt.runtime.sampling import Sampling

__all__ = [
    "MEASURES",
    "Judge",
    "Judgement",
    "Measure",
    "Point",
    "Quality",
    "Verdict",
    "rejection_plans",
    "rouge_l",
    "score",
    "threshold_grid",
    "undominated",
    "verdict",
]

Measure = Literal["rouge-l", "bleu"]
MEASURES: tuple[Measure, ...] = ("rouge-l", "bleu")
"""What can rank lossy plans."""

_WORD = re.compile(r"[^\W_]+")
_LONGEST = 16  # the longest draft tried when the best length is looked for
_ROUNDING = 1e-9
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Quality:
    """How near outputs are to references.

    Attributes
    ----------
    bleu : float
        BLEU of the whole corpus, 0 to 100.
    rouge_l : float
        Mean ROUGE-L F-measure, 0 to 100.
    exact : float
        Share of the outputs that equal their reference.
    agreement : float or None
        Share of the positions of the longer one of output and reference that hold the same token, pooled. One
        token too many at the start leaves nothing of it.
    first_difference : float or None
        Mean number of tokens before the first difference; an output without one counts with its length.
    """

    bleu: float
    rouge_l: float
    exact: float
    agreement: float | None = None
    first_difference: float | None = None

    def by(self, measure: Measure) -> float:
        """Return the value of one of `MEASURES`."""
        return self.bleu if measure == "bleu" else self.rouge_l


def score(
    outputs: Sequence[str],
    references: Sequence[str],
    *,
    tokens: Sequence[tuple[Sequence[int], Sequence[int]]] | None = None,
) -> Quality:
    """Return how near `outputs` are to `references`.

    Parameters
    ----------
    outputs, references : sequence of str
        At least one text each, in the same order.
    tokens : sequence of (output, reference), optional
        The ids of both, where both are known.

    Raises
    ------
    InvalidArgumentError
        If there is no text, or their numbers differ.

    Examples
    --------
    >>> found = score(["the cat sat"], ["the cat sat"], tokens=[((5, 6, 7), (5, 6, 7))])
    >>> found.rouge_l, found.exact, found.agreement, found.first_difference
    (100.0, 1.0, 1.0, 3.0)
    """
    sizes = {len(outputs), len(references), len(outputs if tokens is None else tokens)}
    if len(sizes) > 1 or not outputs:
        raise InvalidArgumentError(
            f"expected as many references as outputs, and at least one; got {len(outputs)} and {len(references)}"
        )
    # the effective order matters only where no output has four words: without it, equal texts would get 0
    bleu = BLEU(effective_order=True, force=True).corpus_score(list(outputs), [list(references)])
    pairs = list(zip(outputs, references, strict=True))
    return Quality(
        bleu=float(min(bleu.score, 100.0)),
        rouge_l=100 * float(np.mean([rouge_l(*pair) for pair in pairs])),
        exact=float(np.mean([output.strip() == reference.strip() for output, reference in pairs])),
        agreement=None if tokens is None else _agreement(tokens),
        first_difference=None if tokens is None else float(np.mean([_first_difference(*pair) for pair in tokens])),
    )


def rouge_l(output: str, reference: str) -> float:
    """Return the F-measure of the longest common subsequence of words, 0 to 1.

    Words are runs of letters and digits in lower case, without stemming; two texts without words are equal.

    Examples
    --------
    >>> round(rouge_l("police killed the gunman", "police kill the gunman"), 4)
    0.75
    """
    ours, theirs = (_WORD.findall(text.lower()) for text in (output, reference))
    if not ours or not theirs:
        return float(ours == theirs)
    return 2 * _common(ours, theirs) / (len(ours) + len(theirs))


def _common(one: Sequence[T], other: Sequence[T]) -> int:
    """Return the length of the longest common subsequence."""
    row = [0] * (len(other) + 1)
    for item in one:
        before = row
        row = [0]
        for place, rival in enumerate(other):
            row.append(before[place] + 1 if item == rival else max(before[place + 1], row[-1]))
    return row[-1]


def _agreement(pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> float:
    same = sum(a == b for pair in pairs for a, b in zip(*pair, strict=False))
    longest = sum(max(map(len, pair)) for pair in pairs)
    return same / longest if longest else 1.0


def _first_difference(output: Sequence[int], reference: Sequence[int]) -> int:
    pairs = enumerate(zip(output, reference, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(output), len(reference)))


@dataclass(frozen=True, slots=True)
class Judgement:
    """What one plan's outputs are worth.

    Attributes
    ----------
    drafted_share : float
        Share of the tokens after the first that were not the target's own: the rest cost a pass of it each.
    own : Quality
        Against the target's outputs.
    reference : Quality or None
        Against the references of those prompts that have one.
    deviation : float or None
        Share of the tokens that the target, given the text before them, would not have chosen; None when sampling.
    """

    drafted_share: float
    own: Quality
    reference: Quality | None
    deviation: float | None


class Judge:
    """Judges the runs of one plan after another against the target's own runs.

    Parameters
    ----------
    target : Model
        With a tokenizer; it also says what it would have written itself.
    own : iterable of MeasuredRun
        The target's own outputs, one per prompt and repeat.
    prompts : sequence of sequence of int
        The rendered prompts.
    references : mapping of int to str
        Right answers, by the number of their prompt.
    setting : Setting
        How tokens were chosen.

    Raises
    ------
    ModelError
        If the target has no tokenizer.
    """

    def __init__(
        self,
        target: Model,
        own: Iterable[MeasuredRun],
        prompts: Sequence[Sequence[int]],
        references: Mapping[int, str],
        setting: Setting,
    ) -> None:
        if target.tokenizer is None:
            raise ModelError(f"expected a tokenizer with {target.name} to compare texts; it has none")
        self._target = target
        self._tokenizer = target.tokenizer
        self._own = {(run.prompt, run.repeat): self._ended(run.output) for run in own}
        self._prompts = prompts
        self._references = references
        self._setting = setting
        self._deviations: dict[tuple[int, tuple[int, ...]], int] = {}

    def __call__(self, runs: Sequence[MeasuredRun]) -> Judgement:
        """Return the judgement of all runs of one plan."""
        outputs = [self._ended(run.output) for run in runs]
        own = [self._own[run.prompt, run.repeat] for run in runs]
        texts = [self._text(output) for output in outputs]
        answers = [(text, self._references.get(run.prompt)) for text, run in zip(texts, runs, strict=True)]
        known = [(text, answer) for text, answer in answers if answer is not None]
        return Judgement(
            drafted_share=self._drafted_share(runs),
            own=score(texts, [self._text(output) for output in own], tokens=list(zip(outputs, own, strict=True))),
            reference=score([text for text, _ in known], [answer for _, answer in known]) if known else None,
            deviation=self._deviation([(run.prompt, output) for run, output in zip(runs, outputs, strict=True)]),
        )

    def _ended(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens up to the first end of text, which is kept."""
        end = next((place for place, token in enumerate(tokens, 1) if token in self._target.eos), len(tokens))
        return tuple(tokens[:end])

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def _drafted_share(self, runs: Sequence[MeasuredRun]) -> float:
        written = sum(len(run.output) - 1 for run in runs)
        own = sum(count for run in runs for name, _, count, _ in run.passes if name == self._target.name)
        return max(0.0, 1 - own / written) if written else 0.0

    def _deviation(self, outputs: Sequence[tuple[int, tuple[int, ...]]]) -> float | None:
        if self._setting.temperature > 0:
            return None
        for key in outputs:
            if key not in self._deviations:
                self._deviations[key] = self._strange(*key)
        return sum(self._deviations[key] for key in outputs) / sum(len(tokens) for _, tokens in outputs)

    def _strange(self, prompt: int, tokens: Sequence[int]) -> int:
        """Return how many of the tokens are not the target's choice behind those before them."""
        opening = self._target.opening(self._prompts[prompt])
        sequence = [*opening, *tokens]
        session = self._target.network_session()
        session.begin(self._prompts[prompt])
        logits = session.forward(sequence[:-1], n_logits=len(tokens))
        sampling = Sampling(**self._setting.model_dump(exclude={"max_new_tokens"}))
        chosen: list[int] = sampling.scores(logits, sequence, len(opening)).argmax(dim=-1).tolist()
        return sum(a != b for a, b in zip(chosen, tokens, strict=True))


def threshold_grid(
    large: str,
    small: str,
    fallbacks: Sequence[float],
    rollbacks: Sequence[float],
    *,
    max_draft: int | None = None,
    semantics: Semantics = "paper",
) -> tuple[Bild, ...]:
    """Return one Big Little Decoder plan per pair of thresholds.

    Raises
    ------
    PlanError
        If a threshold is outside its domain.

    Examples
    --------
    >>> print(*threshold_grid("big", "small", [0.5], [1, 2]), sep="; ")
    bild(big, small, fallback=0.5, rollback=1); bild(big, small, fallback=0.5, rollback=2)
    """
    pairs = product(fallbacks, rollbacks)
    return tuple(Bild(large, small, fallback, rollback, max_draft, semantics=semantics) for fallback, rollback in pairs)


def rejection_plans(profile: Profile, small: str) -> tuple[Level, ...]:
    """Return lossless plans with the same small model: its best length by the profile, half and twice that.

    Raises
    ------
    PredictionError
        If the profile cannot speak of `small` as a drafter at all.
    """
    plans = [Level(profile.target, (Segment(Level(small), length),)) for length in range(1, _LONGEST + 1)]
    predicted = _each(plans, lambda plan: expected_latency(plan, profile).seconds_per_token)
    if not predicted:
        raise PredictionError(f"expected the acceptance of {small} under {profile.target}; none in this profile")
    best = plans.index(min(predicted, key=predicted.__getitem__)) + 1
    return tuple(plans[length - 1] for length in sorted({max(1, best // 2), best, min(2 * best, _LONGEST)}))


def _each(plans: Iterable[Level], seconds: Callable[[Level], float]) -> dict[Level, float]:
    found = {}
    for plan in plans:
        try:
            found[plan] = seconds(plan)
        except PredictionError:
            continue
    return found


@dataclass(frozen=True, slots=True)
class Point:
    """A plan between speed and quality.

    Attributes
    ----------
    plan : str
    time : float
        Per token, over the target's own autoregression.
    quality : float
        The more the better.
    """

    plan: str
    time: float
    quality: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Lossy plans against lossless ones.

    Attributes
    ----------
    limit : float
        The quality of lossless decoding.
    lossless : Point or None
        The fastest of the plans that keep the target's law; None if there is none.
    equal_latency : Point or None
        The best lossy plan that is no slower; None if there is none, or nothing to compare with.
    equal_quality : Point or None
        The fastest lossy plan that loses nothing, or, failing that, the one that loses least.
    kept : bool
        Whether it loses nothing.
    fastest : Point or None
        The fastest lossy plan.
    """

    limit: float
    lossless: Point | None
    equal_latency: Point | None
    equal_quality: Point | None
    kept: bool
    fastest: Point | None


def verdict(limit: float, lossless: Sequence[Point], lossy: Sequence[Point]) -> Verdict:
    """Return the lossy plans to hold against lossless ones at equal latency and at equal quality.

    Examples
    --------
    >>> found = verdict(100.0, [Point("t(d:4)", 0.7, 100.0)], [Point("a", 0.6, 90.0), Point("b", 0.9, 100.0)])
    >>> found.equal_latency.plan, found.equal_quality.plan, found.kept
    ('a', 'b', True)
    """
    rival = min(lossless, key=lambda point: point.time, default=None)
    as_fast = [] if rival is None else [point for point in lossy if point.time <= rival.time]
    as_good = [point for point in lossy if point.quality >= limit - _ROUNDING]
    nearest = max(lossy, key=_goodness, default=None)
    return Verdict(
        limit=limit,
        lossless=rival,
        equal_latency=max(as_fast, key=_goodness, default=None),
        equal_quality=min(as_good, key=lambda point: point.time, default=nearest),
        kept=bool(as_good),
        fastest=min(lossy, key=lambda point: point.time, default=None),
    )


def undominated(points: Iterable[Point]) -> tuple[Point, ...]:
    """Return the points that no other beats in both time and quality, fastest first.

    Examples
    --------
    >>> points = [Point("a", 0.9, 100.0), Point("b", 0.8, 90.0), Point("c", 0.85, 80.0)]
    >>> [point.plan for point in undominated(points)]
    ['b', 'a']
    """
    kept: list[Point] = []
    for point in sorted(points, key=lambda point: (point.time, -point.quality)):
        if not kept or point.quality > kept[-1].quality:
            kept.append(point)
    return tuple(kept)


def _goodness(point: Point) -> tuple[float, float]:
    return point.quality, -point.time
