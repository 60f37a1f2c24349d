"""Big Little Decoder: the small model writes until it is unsure; the large one takes over and may roll back.

Kim et al. 2023 (arXiv 2302.07863). "paper" semantics are the paper's rules, "reference" those of the authors' code,
without its faults: an end of text written by a rollback ends the generation, no token is left unreviewed at the end,
and a token that the large model wrote is never reviewed again, so rollbacks cannot go round in a circle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hsdopt.runtime.events import Event, verifications

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from hsdopt.plan import Bild
    from hsdopt.runtime.sampling import Law, Rule, Sampling
    from hsdopt.runtime.workspace import Workspace


class BildDecoder:
    """A `Bild` plan at work.

    Thresholds are compared with the laws that tokens are drawn from (at temperature 0, with those at temperature 1);
    the rollback of reference semantics with the large model's unprocessed logits.

    Parameters
    ----------
    plan : Bild
        The two models and their thresholds.
    work : Workspace
        The sequence and the sessions.
    sampling : Sampling
        How logits become laws.
    rule : Rule
        How tokens are chosen.
    ends : set of int
        Ids that end a text.
    """

    def __init__(self, plan: Bild, work: Workspace, sampling: Sampling, rule: Rule, ends: AbstractSet[int]) -> None:
        self._plan = plan
        self._work = work
        self._sampling = sampling
        self._rule = rule
        self._ends = ends
        self._reference = plan.semantics == "reference"
        # logits [1, vocab] that a prefill gave for the next token, as long as nothing was written behind the prompt
        self._ahead: dict[str, torch.Tensor | None] = {}

    def start(self) -> int:
        """Feed the prompt to the large model, which gives the first token in reference semantics only."""
        self._ahead[self._plan.large] = self._work.prefill(self._plan.large)
        if not self._reference:
            return 0
        self._write(self._logits(self._plan.large))
        return 1

    def prepare(self) -> None:
        """Feed the prompt to the small model, which gives the first token in paper semantics."""
        ahead = self._work.prefill(self._plan.small)
        if not self._reference:
            self._ahead[self._plan.small] = ahead

    def step(self, wanted: int) -> int:
        """Let the small model write, the large one review and write on; return the tokens gained, at most `wanted`."""
        work, large = self._work, self._plan.large
        base = len(work.tokens)
        self._stint(wanted - 1)
        drafted = len(work.tokens) - base
        logits = self._logits(large, drafted + 1)  # [drafted + 1, vocab]
        accepted = self._review(logits, base)
        if drafted:
            work.events += verifications(large, [(self._plan.small, drafted)], accepted, "rollback")
        work.cut(base + accepted)
        self._write(logits[accepted : accepted + 1])
        if accepted and work.tokens[-2] in self._ends:
            work.trim(large, base + accepted, "end-of-text")
        elif self._reference and accepted < drafted and accepted + 1 < wanted and work.tokens[-1] not in self._ends:
            self._write(work.run(large))
        return len(work.tokens) - base

    def _stint(self, limit: int) -> None:
        """Append the small model's tokens until it is unsure, or has written enough."""
        work, plan = self._work, self._plan
        left = limit if plan.longest_run is None else min(limit, plan.longest_run)
        while left > 0 and work.room(plan.small) >= 0:
            logits = self._logits(plan.small)
            token, law = self._rule.choose(logits, work.tokens)
            if plan.stride is None and self._confidence(logits, law) < plan.fallback:
                work.events.append(Event("cut", plan.small, discarded=1, why="fallback"))
                return
            work.tokens.append(token)
            left -= 1
            if token in self._ends:
                return

    def _confidence(self, logits: torch.Tensor, law: Law) -> float:
        tokens = self._work.tokens
        return float((self._sampling.laws(logits, tokens, len(tokens))[0] if law is None else law).max())

    def _review(self, logits: torch.Tensor, base: int) -> int:
        """Return how many of the tokens from `base` on stand: all, or those before the first unlikely one."""
        tokens = self._work.tokens
        surprise = self._surprise(logits, base)
        for index, nats in enumerate(surprise):
            if nats > self._plan.rollback:
                agreed = self._reference and int(logits[index].argmax()) == tokens[base + index]
                return len(surprise) if agreed else index
        return len(surprise)

    def _surprise(self, logits: torch.Tensor, base: int) -> list[float]:
        """Return the negative log-likelihood (nats) under the large model of the tokens from `base` on."""
        drafted = self._work.tokens[base:]
        if self._reference:
            logs = logits.float().log_softmax(-1) if logits.dtype != torch.float64 else logits.log_softmax(-1)
        else:
            logs = self._sampling.laws(logits, self._work.tokens, base).log()
        return [-float(logs[index, token]) for index, token in enumerate(drafted)]

    def _logits(self, name: str, n_logits: int = 1) -> torch.Tensor:
        """Return logits [n_logits, vocab], of a pass unless those of the prefill serve."""
        ahead = self._ahead.pop(name, None)
        if n_logits == 1 and ahead is not None and len(self._work.tokens) == self._work.prompt_length:
            self._work.credit_prefill(name)
            return ahead
        return self._work.run(name, n_logits)

    def _write(self, logits: torch.Tensor) -> None:
        """Append the large model's token."""
        token, _ = self._rule.choose(logits, self._work.tokens)
        self._work.tokens.append(token)
