"""Traces: what every model says along the target's own output, from one scoring pass per model and prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hsdopt.acceptance import Ints, Traces
from hsdopt.profiles import Setting
from hsdopt.runtime.lookup import Lookup
from hsdopt.runtime.model import Model
from hsdopt.runtime.sampling import Sampling

__all__ = ["PromptTrace", "assemble", "score_output"]

LONGEST_PROPOSAL = 40
"""Tokens that the lookup drafter is asked for at every position."""


@dataclass(frozen=True, slots=True)
class PromptTrace:
    """What every model said along the output of one prompt; JSON-able through `to_record`.

    Attributes
    ----------
    prompt, tokens : tuple of int
        Token ids of the prompt, and of the target's output.
    choice, probability, top : mapping of str to list
        Per model, see `hsdopt.acceptance.Traces`.
    surprise, overlap, ratio : mapping of "drafter<tab>verifier" to list
        Per pair.
    before : int or None
        Tokens before the output in the sequence that is scored; those of the prompt unless given.
    outside : float or None
        Seconds that the target spent outside its passes while it wrote the output after the prefill; None if another
        run wrote it.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    choice: dict[str, list[int]] = field(default_factory=dict)
    probability: dict[str, list[float]] = field(default_factory=dict)
    top: dict[str, list[float]] = field(default_factory=dict)
    surprise: dict[str, list[float]] = field(default_factory=dict)
    overlap: dict[str, list[float]] = field(default_factory=dict)
    ratio: dict[str, list[float]] = field(default_factory=dict)
    before: int | None = None
    outside: float | None = None

    def to_record(self) -> dict[str, Any]:
        """Return plain JSON values; `from_record` reads them back."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> PromptTrace:
        """Return the trace that `to_record` wrote."""
        fields = {name: record[name] for name in cls.__slots__ if name in record}
        return cls(**{**fields, "prompt": tuple(fields["prompt"]), "tokens": tuple(fields["tokens"])})


def score_output(
    models: Mapping[str, Model], target: str, prompt: Sequence[int], tokens: Sequence[int], *, setting: Setting
) -> PromptTrace:
    """Return what every network says along the target's `tokens`, one scoring pass each.

    Parameters
    ----------
    models : mapping of str to Model
        Networks only; the target among them.
    target : str
        Its name; in a greedy setting its choice is the realised token.
    prompt, tokens : sequence of int
        Token ids.
    setting : Setting
        Temperature and filters, applied to every model with each position's own prefix.
    """
    scores = {name: _Scores.of(model, prompt, tokens, setting) for name, model in models.items()}
    before = next((len(model.opening(prompt)) for model in models.values()), len(prompt))
    trace = PromptTrace(tuple(prompt), tuple(tokens), before=before)
    for name, score in scores.items():
        greedy_target = name == target and setting.temperature == 0
        trace.choice[name] = list(tokens) if greedy_target else score.choice.tolist()
        trace.probability[name] = score.realised(tokens)
        trace.top[name] = score.top.tolist()
    for drafter, mine in scores.items():
        for verifier, theirs in scores.items():
            if drafter not in (verifier, target):
                _add_pair(trace, f"{drafter}\t{verifier}", mine, theirs, setting, exact=verifier == target)
    return trace


@dataclass(frozen=True, slots=True)
class _Scores:
    """One model's laws along an output: raw log-probabilities [n, vocab], and the law it is sampled from."""

    raw: torch.Tensor
    law: torch.Tensor
    choice: torch.Tensor
    top: torch.Tensor

    @classmethod
    def of(cls, model: Model, prompt: Sequence[int], tokens: Sequence[int], setting: Setting) -> _Scores:
        opening = model.opening(prompt)
        sequence = [*opening, *tokens]
        session = model.network_session()
        session.begin(prompt)
        logits = session.forward(sequence[:-1], n_logits=len(tokens)).float()
        sampling = Sampling(**setting.model_dump(exclude={"max_new_tokens"}))
        choice = sampling.scores(logits, sequence, len(opening)).argmax(dim=-1)
        law = sampling.laws(logits, sequence, len(opening))
        raw = torch.log_softmax(logits, dim=-1)
        return cls(raw, law, choice, raw.amax(dim=-1).exp())

    def realised(self, tokens: Sequence[int]) -> list[float]:
        index = torch.tensor(tokens, device=self.law.device)[:, None]
        values: list[float] = self.law.gather(1, index)[:, 0].tolist()
        return values


def _add_pair(
    trace: PromptTrace, key: str, drafter: _Scores, verifier: _Scores, setting: Setting, *, exact: bool
) -> None:
    choice = drafter.raw.argmax(dim=-1)[:, None].to(verifier.raw.device)
    trace.surprise[key] = (-verifier.raw.gather(1, choice)[:, 0]).tolist()
    if setting.temperature == 0:
        return
    theirs = verifier.law
    mine = drafter.law.to(theirs.device)
    trace.overlap[key] = torch.minimum(mine, theirs).sum(dim=-1).clamp(max=1.0).tolist()
    if exact:
        q, p = (np.asarray(score.realised(trace.tokens)) for score in (drafter, verifier))
        trace.ratio[key] = np.minimum(1.0, q / np.maximum(p, np.finfo(float).tiny)).tolist()


def assemble(traces: Sequence[PromptTrace], *, lookup: Callable[[int], Lookup] | None = None) -> Traces:
    """Return the traces of several prompts as one.

    Parameters
    ----------
    traces : sequence of PromptTrace
    lookup : callable, optional
        The lookup drafter for the prompt with a given index (so that a profile can leave the prompt's own
        output out of the table); None for no lookup drafter.
    """
    lengths = [len(trace.tokens) for trace in traces]
    before = [len(trace.prompt) if trace.before is None else trace.before for trace in traces]
    context = [start + index for start, length in zip(before, lengths, strict=True) for index in range(length)]
    fields: dict[str, Any] = {
        "tokens": _join([list(trace.tokens) for trace in traces], np.int64),
        "prompt": np.repeat(np.arange(len(traces)), lengths),
        "context": np.asarray(context, dtype=np.int64),
        "choice": {key: _join([t.choice[key] for t in traces], np.int64) for key in traces[0].choice},
    }
    for name in ("probability", "top"):
        fields[name] = {key: _join([getattr(t, name)[key] for t in traces], float) for key in getattr(traces[0], name)}
    for name in ("surprise", "overlap", "ratio"):
        by_pair = getattr(traces[0], name)
        fields[name] = {
            tuple(key.split("\t")): _join([getattr(t, name)[key] for t in traces], float) for key in by_pair
        }
    if lookup is not None:
        fields |= _lookup_fields(traces, lookup)
    return Traces(**fields)


def _join(parts: Sequence[Sequence[Any]], dtype: type) -> Any:  # noqa: ANN401 -- an array of that dtype
    return np.concatenate([np.asarray(part, dtype=dtype) for part in parts])


def _lookup_fields(traces: Sequence[PromptTrace], lookup: Callable[[int], Lookup]) -> dict[str, Any]:
    """Return what the lookup drafter proposes along every output, and how much of it each model would take.

    A model takes the run of tokens that are its own choices along the output; under sampling, the realised
    tokens stand in for every model's choices.
    """
    proposed: list[int] = []
    accepted: dict[str, list[int]] = {name: [] for name in traces[0].choice}
    for index, trace in enumerate(traces):
        session = lookup(index).session()
        session.begin(trace.prompt)
        sampled = bool(trace.ratio)
        said = {name: list(trace.tokens) if sampled else choice for name, choice in trace.choice.items()}
        for position in range(len(trace.tokens)):
            proposal = session.propose(LONGEST_PROPOSAL)
            proposed.append(len(proposal))
            for name, choice in said.items():
                accepted[name].append(_run(proposal, choice[position:]))
            session.extend(trace.tokens[position : position + 1])
    counts: dict[str, Ints] = {name: np.asarray(runs, dtype=np.int64) for name, runs in accepted.items()}
    return {"proposed": np.asarray(proposed, dtype=np.int64), "lookup_accepted": counts}


def _run(proposal: Sequence[int], choice: Sequence[int]) -> int:
    """Return how many leading tokens agree."""
    pairs = zip(proposal, choice, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(proposal), len(choice)))
