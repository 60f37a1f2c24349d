"""How a token is chosen, and how a draft is reviewed: the rules that keep the target's output law.

Words: a *law* is the distribution [vocab] that a token was drawn from, None where the token was certain (a greedy or
a lookup drafter: one-hot). A verifier accepts each drafted token with probability min(1, p/q), p its own law and q the
token's; at the first rejection it draws a *correction* from norm(max(p - q, 0)), after a draft accepted whole a
*bonus* token from p (Leviathan et al. 2023; Chen et al. 2023).
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch

from hsdopt.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hsdopt.runtime.models import Model
    from hsdopt.runtime.session import Session

    Processor: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

Law: TypeAlias = "torch.Tensor | None"


class Dice(Protocol):
    """The two random acts of a decoder; tests enumerate their outcomes."""

    def accept(self, probability: float) -> bool:
        """Return True with that probability."""

    def draw(self, law: torch.Tensor) -> int:
        """Return a token drawn from a law [vocab]."""


class Chance:
    """Seeded randomness: the same seed gives the same decisions on every device.

    Parameters
    ----------
    seed : int or None
        None for a seed of the operating system.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)  # noqa: S311 -- sampling, no secrets

    def accept(self, probability: float) -> bool:
        """Return True with that probability."""
        return self._random.random() < probability

    def draw(self, law: torch.Tensor) -> int:
        """Return a token drawn from a law [vocab] by inverting its distribution function."""
        reached = law.cumsum(0, dtype=torch.float64)
        # below the total, or a rounding of the sum could pick a token of probability 0
        level = min(self._random.random(), math.nextafter(float(reached[-1]), 0.0))
        return int(torch.searchsorted(reached, level, right=True))


@dataclass(frozen=True, slots=True)
class Sampling:
    """How logits become laws; the same for every model of a plan.

    The order is that of transformers: repetition penalty, processors, temperature, top-k, top-p, min-p.

    Parameters
    ----------
    temperature : float
        0 is greedy: the filters below it change nothing then.
    top_p : float
        Keep the fewest most likely tokens whose probability reaches this; 1 keeps all.
    top_k : int
        Keep so many tokens; 0 keeps all.
    min_p : float
        Keep tokens at least this probable, relative to the most likely one.
    repetition_penalty : float
        Divides the positive logits of tokens that the sequence holds already, multiplies the negative ones.
    processors : tuple of callables
        Logits processors as in transformers, (ids [1, length], scores [1, vocab]) -> scores; each must depend on
        nothing but its arguments.

    Raises
    ------
    InvalidArgumentError
        If a value is outside its domain.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    processors: tuple[Processor, ...] = ()

    def __post_init__(self) -> None:
        """Check every value."""
        demands = (
            (0 <= self.temperature < math.inf, "temperature", "a finite number of at least 0", self.temperature),
            (0 < self.top_p <= 1, "top_p", "a number above 0 and at most 1", self.top_p),
            (self.top_k >= 0 and self.top_k == int(self.top_k), "top_k", "a whole number of at least 0", self.top_k),
            (0 <= self.min_p <= 1, "min_p", "a number from 0 to 1", self.min_p),
            (
                0 < self.repetition_penalty < math.inf,
                "repetition_penalty",
                "a finite number above 0",
                self.repetition_penalty,
            ),
        )
        for fulfilled, name, expected, got in demands:
            if not fulfilled:
                raise InvalidArgumentError(f"expected {name} to be {expected}; got {got}")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature == 0

    def scores(self, logits: torch.Tensor, tokens: Sequence[int], base: int) -> torch.Tensor:
        """Return logits [n, vocab] after penalty and processors.

        Parameters
        ----------
        logits : tensor [n, vocab]
            Row i scores the token after ``tokens[:base + i]``.
        tokens : sequence of int
            At least ``base + n - 1`` ids.
        """
        if self.repetition_penalty == 1 and not self.processors:
            return logits
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()  # as transformers does; a penalty in half precision makes ties
        rows = []
        for index in range(len(logits)):
            prefix = torch.tensor([list(tokens[: base + index])], device=logits.device)
            changed = _penalised(logits[index : index + 1], prefix, self.repetition_penalty)
            for processor in self.processors:
                changed = processor(prefix, changed)
            rows.append(changed)
        return torch.cat(rows)

    def laws(self, logits: torch.Tensor, tokens: Sequence[int], base: int) -> torch.Tensor:
        """Return the laws [n, vocab] that tokens are drawn from; arguments as in `scores`.

        At temperature 0 these are the laws at temperature 1, which thresholds are compared with.
        """
        precise = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        scores = self.scores(precise, tokens, base)
        if self.greedy:
            return scores.softmax(-1)
        scores = scores / self.temperature
        if 0 < self.top_k < scores.shape[-1]:
            scores = scores.masked_fill(scores < scores.topk(self.top_k).values[:, -1:], -math.inf)
        if self.top_p < 1:
            scores = _nucleus(scores, self.top_p)
        laws = scores.softmax(-1)
        if self.min_p > 0:
            scores = scores.masked_fill(laws < self.min_p * laws.amax(-1, keepdim=True), -math.inf)
            laws = scores.softmax(-1)
        return laws


def _penalised(row: torch.Tensor, prefix: torch.Tensor, penalty: float) -> torch.Tensor:
    if penalty == 1:
        return row
    seen = row.gather(1, prefix)
    return row.scatter(1, prefix, torch.where(seen < 0, seen * penalty, seen / penalty))


def _nucleus(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    ordered, order = scores.sort(-1)
    dropped = ordered.softmax(-1).cumsum(-1) <= 1 - top_p
    dropped[:, -1] = False
    return scores.masked_fill(dropped.gather(-1, order.argsort(-1)), -math.inf)


def acceptance(p: float, q: float, lenience: float = 1.0) -> float:
    """Return the probability of accepting a token that has `p` under the verifier and was drawn with `q`.

    Examples
    --------
    >>> acceptance(0.2, 0.8), acceptance(0.2, 0.8, lenience=2.0)
    (0.25, 0.5)
    """
    return min(1.0, lenience * p / q)


def residual(p: torch.Tensor, q: torch.Tensor, lenience: float = 1.0) -> torch.Tensor:
    """Return the law [vocab] of a correction token: norm(max(p - min(q, lenience p), 0)).

    Where nothing is left (p = q, which rejects with probability 0 or rounding) it is p.
    """
    surplus = (p - torch.minimum(q, lenience * p)).clamp(min=0)
    total = surplus.sum()
    return surplus / total if total > 0 else p


def reported_law(p: torch.Tensor, q: torch.Tensor, lenience: float = 1.0) -> torch.Tensor:
    """Return the law [vocab] of a reviewed token, which the verifier reports upward: p unless it is lenient.

    With lenience it is min(q, lenience p) + (1 - sum of that) residual (hsdopt, MATH: lenience).
    """
    if lenience == 1:
        return p
    kept = torch.minimum(q, lenience * p)
    return kept + (1 - kept.sum()) * residual(p, q, lenience)


def one_hot(token: int, like: torch.Tensor) -> torch.Tensor:
    """Return the law [vocab] of a token that is certain."""
    return torch.zeros_like(like).index_fill(0, torch.tensor([token], device=like.device), 1.0)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a review decided.

    Attributes
    ----------
    accepted : int
        Length of the accepted prefix.
    token : int
        The correction or bonus token.
    laws : list of Law
        Of the accepted tokens and of `token`, as reported upward.
    """

    accepted: int
    token: int
    laws: list[Law]


class Rule(Protocol):
    """How tokens are chosen and drafts reviewed."""

    def choose(self, logits: torch.Tensor, tokens: Sequence[int]) -> tuple[int, Law]:
        """Return the token after `tokens`, and its law, from logits [1, vocab]."""

    def review(
        self, logits: torch.Tensor, tokens: Sequence[int], laws: Sequence[Law], lenience: float = 1.0
    ) -> Verdict:
        """Judge the last ``len(laws)`` of `tokens` by logits [len(laws) + 1, vocab]."""


@dataclass(frozen=True, slots=True)
class Greedy:
    """Every token is the most likely one; drafted tokens are accepted where they are."""

    sampling: Sampling

    def choose(self, logits: torch.Tensor, tokens: Sequence[int]) -> tuple[int, Law]:
        """Return the most likely token."""
        return int(self.sampling.scores(logits, tokens, len(tokens)).argmax()), None

    def review(
        self, logits: torch.Tensor, tokens: Sequence[int], laws: Sequence[Law], lenience: float = 1.0
    ) -> Verdict:
        """Accept drafted tokens as long as they are the most likely ones; lenience is that of `LenientGreedy`."""
        del lenience
        base = len(tokens) - len(laws)
        best = self.sampling.scores(logits, tokens, base).argmax(-1).tolist()
        accepted = 0
        while accepted < len(laws) and best[accepted] == tokens[base + accepted]:
            accepted += 1
        return Verdict(accepted, best[accepted], [None] * (accepted + 1))


@dataclass(frozen=True, slots=True)
class LenientGreedy:
    """Greedy decoding where some level is lenient: a token passes there if it is likely enough, p > q / lenience.

    The laws compared are those at temperature 1 (the authors' rule in Cascade Speculative Drafting); the target is
    not lenient and still takes the most likely tokens alone.
    """

    sampling: Sampling

    def choose(self, logits: torch.Tensor, tokens: Sequence[int]) -> tuple[int, Law]:
        """Return the most likely token and its law at temperature 1."""
        law = self.sampling.laws(logits, tokens, len(tokens))[0]
        return int(law.argmax()), law

    def review(
        self, logits: torch.Tensor, tokens: Sequence[int], laws: Sequence[Law], lenience: float = 1.0
    ) -> Verdict:
        """Accept drafted tokens as long as they are the most likely ones or p > q / lenience."""
        base = len(tokens) - len(laws)
        own = self.sampling.laws(logits, tokens, base)
        best = own.argmax(-1).tolist()
        accepted = 0
        while accepted < len(laws) and (
            best[accepted] == tokens[base + accepted]
            or _likely_enough(own[accepted], laws[accepted], tokens[base + accepted], lenience)
        ):
            accepted += 1
        return Verdict(accepted, best[accepted], list(own[: accepted + 1]))


def _likely_enough(p: torch.Tensor, q: Law, token: int, lenience: float) -> bool:
    return lenience != 1 and q is not None and float(p[token]) > float(q[token]) / lenience


@dataclass(frozen=True, slots=True)
class Sampled:
    """Speculative sampling: whatever drafted, tokens follow the verifier's law."""

    sampling: Sampling
    dice: Dice

    def choose(self, logits: torch.Tensor, tokens: Sequence[int]) -> tuple[int, Law]:
        """Draw a token; return it with its law."""
        law = self.sampling.laws(logits, tokens, len(tokens))[0]
        return self.dice.draw(law), law

    def review(
        self, logits: torch.Tensor, tokens: Sequence[int], laws: Sequence[Law], lenience: float = 1.0
    ) -> Verdict:
        """Accept each token with probability min(1, lenience p/q); at a rejection draw from the residual.

        Tokens that were certain (a lookup drafter's) are reviewed without lenience.
        """
        base = len(tokens) - len(laws)
        own = self.sampling.laws(logits, tokens, base)
        reported: list[Law] = []
        for index, law in enumerate(laws):
            p, token = own[index], tokens[base + index]
            q = one_hot(token, p) if law is None else law.to(p.device)
            slack = 1.0 if law is None else lenience
            reported.append(reported_law(p, q, slack))
            if not self.dice.accept(acceptance(float(p[token]), float(q[token]), slack)):
                return Verdict(index, self.dice.draw(residual(p, q, slack)), reported)
        return Verdict(len(laws), self.dice.draw(own[-1]), [*reported, own[-1]])


def rule_for(sampling: Sampling, dice: Dice, *, lenient: bool) -> Rule:
    """Return the rule of `sampling`; `lenient` if some level of the plan has a lenience."""
    if not sampling.greedy:
        return Sampled(sampling, dice)
    return LenientGreedy(sampling) if lenient else Greedy(sampling)


@dataclass(frozen=True, slots=True)
class Tie:
    """How close a model's two best tokens are, beside what rounding does at that prefix.

    Attributes
    ----------
    gap : float
        Difference of the two largest logits of a one-token pass.
    difference : float
        The largest difference between the logits of a one-token and of an n-token pass.
    """

    gap: float
    difference: float

    @property
    def near(self) -> bool:
        """Whether rounding may choose between the two: gap <= 4 difference."""
        return self.gap <= 4 * self.difference

    def __bool__(self) -> bool:
        """Return `near`."""
        return self.near


def near_tie(
    model: Model,
    prefix: Sequence[int],
    *,
    prompt: Sequence[int] = (),
    new_tokens: Sequence[int] = (2, 3, 4, 5, 6, 8, 12, 16),
) -> Tie:
    """Return whether the greedy token after `prefix` is a near tie, where outputs may differ by rounding alone.

    Parameters
    ----------
    model : Model
        A language model.
    prefix : sequence of int
        All ids up to the token in question; those of the decoder, if there is an encoder.
    prompt : sequence of int
        What the encoder reads; without effect where there is none.
    new_tokens : sequence of int
        Sizes of the passes compared with a pass over one token; those longer than the prefix are cut to it.
    """
    session = model.network_session()
    session.begin(prompt)
    single = _last_logits(session, prefix, 1)
    best = single.topk(2).values
    others = [_last_logits(session, prefix, min(n, len(prefix))) for n in new_tokens]
    difference = max((float((single - other).abs().max()) for other in others), default=0.0)
    return Tie(gap=float(best[0] - best[1]), difference=difference)


def _last_logits(session: Session, prefix: Sequence[int], fed: int) -> torch.Tensor:
    session.crop(0)
    if fed < len(prefix):
        session.forward(prefix[:-fed])
    return session.forward(prefix)[0].double()
