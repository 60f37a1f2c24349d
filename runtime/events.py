"""What a generation did: one event per pass, verification and cut, and the counts that follow from them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Kind = Literal["encode", "prefill", "pass", "lookup", "verify", "cut"]
FinishReason = Literal["length", "eos", "stop", "cancelled"]


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened during a generation.

    Attributes
    ----------
    kind : {"encode", "prefill", "pass", "lookup", "verify", "cut"}
        The encoder's pass over the prompt; the first pass, over a prompt or a decoder's first token; any later
        pass; one request to a lookup drafter; what a verify pass made of one drafter's tokens (it follows the pass,
        one per segment of the row); tokens taken back though they were held.
    model : str
        Who made the pass, verified, or held the tokens.
    new_tokens, context : int
        Tokens fed by a pass, and tokens that were in the cache already.
    seconds : float
        Wall-clock time of a pass or of a request to a lookup drafter.
    gained : int
        Tokens that a pass gave by itself: 1, or 0 for a prefill that only fills the cache; for "lookup" the
        tokens proposed.
    drafter : str or None
        Whose tokens were verified.
    drafted, accepted : int
        Tokens of that drafter in the draft, and those accepted.
    discarded : int
        Tokens of a draft not accepted, or tokens cut.
    why : str or None
        "rejected" (the first token discarded was), "after a rejection" (of an earlier segment's token) or "rollback";
        for a cut "truncate", "limit", "end-of-text", "stop" or "fallback".
    """

    kind: Kind
    model: str
    new_tokens: int = 0
    context: int = 0
    seconds: float = 0.0
    gained: int = 0
    drafter: str | None = None
    drafted: int = 0
    accepted: int = 0
    discarded: int = 0
    why: str | None = None


def verifications(verifier: str, segments: Iterable[tuple[str, int]], accepted: int, why: str) -> list[Event]:
    """Return one "verify" event per segment (drafter, tokens) of a draft of which `accepted` tokens were accepted.

    Parameters
    ----------
    why : str
        What happened to the first token that was not accepted.

    Examples
    --------
    >>> [(e.drafter, e.accepted, e.why) for e in verifications("t", [("a", 2), ("b", 3)], 1, "rejected")]
    [('a', 1, 'rejected'), ('b', 0, 'after a rejection')]
    """
    events = []
    reached = True
    for drafter, drafted in segments:
        kept = min(accepted, drafted) if reached else 0
        accepted -= kept
        lost = None if reached and kept == drafted else why if reached else "after a rejection"
        reached = reached and kept == drafted
        events.append(
            Event(
                "verify", verifier, drafter=drafter, drafted=drafted, accepted=kept, discarded=drafted - kept, why=lost
            )
        )
    return events


@dataclass(frozen=True, slots=True)
class Edge:
    """What one verifier made of one drafter's tokens.

    Attributes
    ----------
    drafts : int
        Drafts reviewed from their first token on (those behind a rejected segment of a row are not).
    drafted, accepted : int
        Tokens, of all drafts.
    accepted_at : tuple of int
        Drafts of which at least 1, 2, ... tokens were accepted; never rising.
    """

    drafts: int
    drafted: int
    accepted: int
    accepted_at: tuple[int, ...]

    @property
    def acceptance(self) -> float:
        """Accepted over drafted tokens, nan without drafts; not the rate that EWIF needs (the manual says why)."""
        return self.accepted / self.drafted if self.drafted else float("nan")

    @classmethod
    def of(cls, verified: Sequence[Event]) -> Edge:
        """Count the "verify" events of one pair of models."""
        longest = max((event.accepted for event in verified), default=0)
        return cls(
            drafts=sum(event.why != "after a rejection" for event in verified),
            drafted=sum(event.drafted for event in verified),
            accepted=sum(event.accepted for event in verified),
            accepted_at=tuple(sum(event.accepted >= m for event in verified) for m in range(1, longest + 1)),
        )


@dataclass(frozen=True, slots=True)
class Counters:
    """Counts over the events of one generation; prefills are in no count but `held`.

    Attributes
    ----------
    passes : mapping of str to int
        Passes of every model.
    new_tokens : mapping of (str, int) to int
        Passes by model and number of tokens fed.
    seconds : mapping of str to float
        Time in passes, and in requests to a lookup drafter, by model.
    edges : mapping of (str, str) to Edge
        By drafter and verifier.
    held : mapping of str to int
        Tokens that a model ever had to pass up: accepted + given by its own passes (a lookup drafter: proposed).
    discarded : mapping of str to int
        Held tokens that were taken back before they were passed up. What a model passed up, and the target wrote, is
        held - discarded.
    tokens_per_pass : float
        Tokens that the target held per pass after the prefill (nan without passes).
    """

    passes: Mapping[str, int]
    new_tokens: Mapping[tuple[str, int], int]
    seconds: Mapping[str, float]
    edges: Mapping[tuple[str, str], Edge]
    held: Mapping[str, int]
    discarded: Mapping[str, int]
    tokens_per_pass: float

    @classmethod
    def of(cls, events: Sequence[Event], target: str) -> Counters:
        """Count `events`, whose topmost model is `target`."""
        passes = [event for event in events if event.kind == "pass"]
        seconds: Counter[str] = Counter()
        held: Counter[str] = Counter()
        discarded: Counter[str] = Counter()
        for event in events:
            held[event.model] += event.gained + event.accepted
            if event.kind == "cut":
                discarded[event.model] += event.discarded
            if event.kind in ("pass", "lookup"):
                seconds[event.model] += event.seconds  # type: ignore[assignment] # a Counter adds floats as well
        own = sum(event.model == target for event in passes)
        first = sum(event.gained for event in events if event.kind == "prefill" and event.model == target)
        return cls(
            passes=Counter(event.model for event in passes),
            new_tokens=Counter((event.model, event.new_tokens) for event in passes),
            seconds=dict(seconds),
            edges=_edges(events),
            held=held,
            discarded=discarded,
            tokens_per_pass=(held[target] - first) / own if own else float("nan"),
        )


def _edges(events: Sequence[Event]) -> dict[tuple[str, str], Edge]:
    pairs: dict[tuple[str, str], list[Event]] = {}
    for event in events:
        if event.kind == "verify" and event.drafter is not None:
            pairs.setdefault((event.drafter, event.model), []).append(event)
    return {pair: Edge.of(verified) for pair, verified in pairs.items()}


@dataclass(frozen=True, slots=True)
class Seconds:
    """Wall-clock times of a generation.

    Attributes
    ----------
    prefill : float
        Every model's pass over the prompt.
    decode : float
        From the end of the last prefill to the last token.
    first_token : float
        From the start to the first token.
    total : float
        From the start to the end.
    """

    prefill: float
    decode: float
    first_token: float
    total: float


@dataclass(frozen=True, slots=True)
class Generation:
    """What `generate` returns.

    Attributes
    ----------
    tokens : tuple of int
        The ids written; an end-of-text id and the token that completes a stop string are among them.
    text : str
        The tokens decoded without special tokens; empty if the target has no tokenizer.
    finish_reason : {"length", "eos", "stop", "cancelled"}
        Why it ended.
    events : tuple of Event
        Everything that happened, in order.
    target : str
        The name of the topmost model.
    seconds : Seconds
        Where the time went.
    """

    tokens: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    events: tuple[Event, ...]
    target: str
    seconds: Seconds

    @property
    def counters(self) -> Counters:
        """Counts over the events, made afresh at every call."""
        return Counters.of(self.events, self.target)

    @property
    def seconds_per_token(self) -> float:
        """Decoding time over tokens after the first; nan if there are none."""
        return self.seconds.decode / (len(self.tokens) - 1) if len(self.tokens) > 1 else float("nan")
