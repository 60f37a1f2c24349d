"""Acceptance off the target's trajectory, counted in the event logs of short runs.

Traces say what every model says along the target's own output. A middle model that writes a token the
target will refuse goes on from there along a text of its own, and so does whoever drafts for it: what
happens there is in no trace, but it is in the log of any run of a plan with a middle model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hsdopt.acceptance import Strays
from hsdopt.plan import Level
from hsdopt.runtime.events import Event

if TYPE_CHECKING:
    from hsdopt.plan import Plan
    from hsdopt.profiles import Setting
    from hsdopt.runtime.model import Model

__all__ = ["Review", "count_strays", "middle_reviews", "stray_runs"]


@dataclass(frozen=True, slots=True)
class Review:
    """One draft before one verifier below the target.

    Attributes
    ----------
    drafter, verifier : str
    asked, drafted, accepted : int
        Tokens.
    astray : bool
        Whether the text before the draft had left the target's own output.
    """

    drafter: str
    verifier: str
    asked: int
    drafted: int
    accepted: int
    astray: bool


@dataclass(slots=True)
class _Token:
    """A token that stands or stood; `kept` is whether the target wrote it too, None until that is known."""

    kept: bool | None = None


def middle_reviews(events: Sequence[Event], plan: Level) -> list[Review]:
    """Return every review by a model below the target, as the event log of one generation tells it.

    A token counts as the target's own if the target accepted it later; one that a middle model refused counts as
    not, which is wrong only where the middle model itself was. Segments behind a refused one were not reviewed
    and are left out, and so are drafts of which nobody learnt whether the text before them was the target's.

    Examples
    --------
    >>> from hsdopt.plan import parse_plan
    >>> made = [Event("prefill", "t", gained=1), Event("prefill", "m"), Event("lookup", "lookup", gained=1)]
    >>> made += [Event("pass", "m", gained=1), Event("verify", "m", drafter="lookup", drafted=1, accepted=1)]
    >>> made += [Event("pass", "t", gained=1), Event("verify", "t", drafter="m", drafted=2, accepted=2)]
    >>> middle_reviews(made, parse_plan("t(m:2(lookup:3))"))
    [Review(drafter='lookup', verifier='m', asked=3, drafted=1, accepted=1, astray=False)]
    """
    target, asked = plan.target, _asked(plan)
    text = [_Token(kept=True)]
    found: list[tuple[Event, _Token]] = []
    for first, rest in _groups(events):
        if first.kind in ("pass", "lookup"):
            found += _advance(text, first, rest, target)
        elif first.kind == "cut":
            del text[len(text) - first.discarded :]
    return [
        Review(*pair, max(asked[pair], event.drafted), event.drafted, event.accepted, not before.kept)
        for event, before in found
        for pair in [(str(event.drafter), event.model)]
        if event.model != target and event.why != "after a rejection" and before.kept is not None
    ]


def _asked(plan: Level) -> dict[tuple[str, str], int]:
    """Return the draft length of every pair of a plan."""
    return {(segment.level.model, level.model): segment.length for level in plan.walk() for segment in level.row}


def _groups(events: Sequence[Event]) -> Iterator[tuple[Event, list[Event]]]:
    """Yield every event that is no verification, with the verifications that follow it."""
    place = 0
    while place < len(events):
        end = place + 1
        while end < len(events) and events[end].kind == "verify":
            end += 1
        yield events[place], list(events[place + 1 : end])
        place = end


def _advance(text: list[_Token], made: Event, verified: list[Event], target: str) -> list[tuple[Event, _Token]]:
    """Put new tokens on the text and take refused ones off; return reviews with the token before each draft."""
    drafted, accepted = sum(e.drafted for e in verified), sum(e.accepted for e in verified)
    base = len(text) - drafted
    reviews, start = [], base
    for event in verified:
        reviews.append((event, text[start - 1]))
        start += event.drafted
    for token in text[base + accepted :]:
        token.kept = False
    del text[base + accepted :]
    own = made.model == target
    if own:
        for token in text[base:]:
            token.kept = True
    text += [_Token(True if own else None) for _ in range(made.gained)]
    return reviews


def count_strays(reviews: Iterable[Review]) -> dict[tuple[str, str], Strays]:
    """Return the counts of the reviews off the target's trajectory, by (drafter, verifier)."""
    counts: dict[tuple[str, str], Counter[tuple[int, int, int]]] = {}
    for review in reviews:
        if review.astray:
            pair = counts.setdefault((review.drafter, review.verifier), Counter())
            pair[review.asked, review.drafted, review.accepted] += 1
    return {pair: Strays(dict(count)) for pair, count in counts.items()}


def stray_runs(
    plans: Iterable[Plan],
    models: Mapping[str, Model],
    prompts: Sequence[Sequence[int]],
    *,
    setting: Setting,
    seed: int = 0,
) -> dict[tuple[str, str], Strays]:
    """Return what short runs of plans with middle models say about acceptance off the target's trajectory.

    Parameters
    ----------
    plans : iterable of Plan
        Those without a middle model are passed over: they never leave the trajectory.
    models : mapping of str to Model
        Every model that a plan names.
    prompts : sequence of sequence of int
        Rendered prompts.
    setting : Setting
        Temperature, filters and the length of the runs.
    seed : int
        Of sampling.
    """
    from hsdopt.runtime import generate  # noqa: PLC0415 -- counting logs needs no model

    reviews: list[Review] = []
    for plan in plans:
        if plan.stack is None or plan.depth < 2:
            continue
        for prompt in prompts:
            made = generate(plan, models, list(prompt), ignore_eos=True, seed=seed, **setting.model_dump())
            reviews += middle_reviews(made.events, plan.stack)
    return count_strays(reviews)
