"""Alignment: training drafters on what the target writes, so that it accepts more of what they draft.

The loss is cross-entropy on the target's tokens, the prompt masked (Big Little Decoder, model prediction alignment),
and on request the divergence from the target's distribution beside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import nn

from hsdopt.errors import InvalidArgumentError
from hsdopt.runtime.calibration import Batch, batches
from hsdopt.runtime.checkpoints import Checkpoints, State
from hsdopt.runtime.losses import loss_of, places_in_head
from hsdopt.runtime.students import FULL, Students, agreements

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hsdopt.runtime.calibration import Example, Progress

__all__ = ["Agreement", "Outcome", "Recipe", "align", "measure"]

_TIMED_STEPS = 6
"""Steps that are timed, the first of them left out, before a limit in minutes becomes a number of steps."""
_RESAMPLES = 1000
_SAVE_SECONDS = 300.0
"""Time without a look after which a checkpoint is written all the same."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a student is trained.

    Attributes
    ----------
    steps : int
        Steps of the optimiser.
    minutes : float or None
        Training time; the number of steps then follows from the time of the first, and `steps` is not used.
    batch : int
        Sequences per step.
    learning_rate : float
        At its highest, after `warmup` steps; it falls to a tenth along a cosine.
    warmup : int
        Steps of linear growth.
    weight_decay : float
        Of AdamW.
    soft : float
        Weight of the divergence from the target's distribution, added to the cross-entropy.
    labels : {"argmax", "outputs"}
        Whether the target's most probable token is to be learnt at every place, or the one it wrote; they differ in
        sampled outputs only.
    evaluate_every : int
        Steps between two looks at the held-out sequences; a checkpoint is written at each.
    patience : int
        Looks without a new best after which training ends.
    held_out_tokens : int
        At most so many held-out places are looked at.
    seed : int
        Of the order of sequences, and of dropout.
    """

    steps: int = 1000
    minutes: float | None = None
    batch: int = 8
    learning_rate: float = 5e-4
    warmup: int = 20
    weight_decay: float = 0.01
    soft: float = 0.0
    labels: Literal["argmax", "outputs"] = "argmax"
    evaluate_every: int = 50
    patience: int = 10
    held_out_tokens: int = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be trained."""
        whole = ("steps", "batch", "evaluate_every", "patience", "held_out_tokens")
        low = next((name for name in whole if getattr(self, name) < 1), None)
        if low is not None:
            raise InvalidArgumentError(f"expected {low} of at least 1; got {getattr(self, low)}")
        if not (0 < self.learning_rate < math.inf and 0 <= self.soft < math.inf):
            raise InvalidArgumentError(
                f"expected a learning rate above 0 and a soft weight of at least 0; got {self.learning_rate:g} and"
                f" {self.soft:g}"
            )
        if self.minutes is not None and not 0 < self.minutes < math.inf:
            raise InvalidArgumentError(f"expected minutes above 0; got {self.minutes:g}")

    def rate_at(self, step: int, steps: int) -> float:
        """Return the learning rate of `step` (from 0) of `steps`."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = min(1.0, (step - self.warmup) / max(1, steps - self.warmup))
        return self.learning_rate * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)


@dataclass(frozen=True, slots=True)
class Agreement:
    """How often a drafter's choice is the target's on held-out text, which is its greedy acceptance rate.

    Attributes
    ----------
    accepted, places : int
        Counts.
    low, high : float
        The 95 % interval of the rate, by bootstrap over sequences.
    """

    accepted: int
    places: int
    low: float
    high: float

    @property
    def rate(self) -> float:
        """The rate itself."""
        return self.accepted / self.places

    @classmethod
    def of(cls, pairs: Sequence[tuple[int, int]]) -> Agreement:
        """Pool (accepted, places) of sequences.

        Examples
        --------
        >>> Agreement.of([(3, 4), (3, 4)])
        Agreement(accepted=6, places=8, low=0.75, high=0.75)
        """
        counts = np.array(pairs)
        drawn = counts[np.random.default_rng(0).integers(len(counts), size=(_RESAMPLES, len(counts)))].sum(1)
        low, high = np.quantile(drawn[:, 0] / drawn[:, 1], [0.025, 0.975])
        accepted, places = counts.sum(0).tolist()
        return cls(accepted, places, float(low), float(high))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What training came to; the students hold the best weights found.

    Attributes
    ----------
    before, after : dict of str to Agreement
        Held-out acceptance by student.
    steps, best_step : int
        Steps made, and the one whose weights were kept.
    tokens : int
        Places trained on, every visit counted.
    seconds : float
        Training and looks, over all resumed parts.
    stopped : {"steps", "patience", "time"}
        What ended it.
    log : list of dict
        One row per look: step, tokens, seconds, learning_rate, loss, acceptance.
    """

    before: dict[str, Agreement]
    after: dict[str, Agreement]
    steps: int
    best_step: int
    tokens: int
    seconds: float
    stopped: Literal["steps", "patience", "time"]
    log: list[dict[str, Any]]


def measure(students: Students, held_out: Sequence[Example], *, batch: int = 8) -> dict[str, Agreement]:
    """Return the greedy acceptance rate of every student on held-out examples."""
    return {name: Agreement.of(pairs) for name, pairs in agreements(students, held_out, batch=batch).items()}


def align(
    students: Students,
    train: Sequence[Example],
    held_out: Sequence[Example],
    recipe: Recipe,
    *,
    folder: Path,
    resume: bool = False,
    progress: Progress | None = None,
) -> Outcome:
    """Train students in place and return how their acceptance changed.

    A training that broke off and is resumed ends with the same bits as one that did not, on the same machine and
    number of threads: weights, optimiser, random numbers and the order of sequences continue where they were.

    Parameters
    ----------
    students : Students
        Networks to train; they are left with the best weights found.
    train, held_out : sequence of Example
        Calibration data of different prompts. Greedy outputs only are held out, if there are any.
    recipe : Recipe
        How to train.
    folder : Path
        Where checkpoints and log.csv go; one checkpoint is there at any time, and each is written whole.
    resume : bool
        Continue from the checkpoint in the folder, if there is one.
    progress : callable, optional
        Called with (stage, done, total).

    Raises
    ------
    InvalidArgumentError
        If soft labels are asked for and the examples have none, or no label is within a small head.
    HsdoptError
        If a checkpoint cannot be written, or does not fit.
    """
    if recipe.soft and any(example.top is None for example in train):
        raise InvalidArgumentError("expected calibration data with probabilities for soft labels; write it with --soft")
    training = _Training(students, list(train), _looked_at(held_out, recipe.held_out_tokens), recipe, folder)
    with torch.random.fork_rng(devices=[students.device] if students.device.type == "cuda" else []):
        torch.manual_seed(recipe.seed)
        return training.run(resume=resume, progress=progress or (lambda *_: None))


def _looked_at(held_out: Sequence[Example], places: int) -> list[Example]:
    """Return greedy examples of at most so many places, in turn over the prompts."""
    greedy = [example for example in held_out if example.kind == "greedy"] or list(held_out)
    turns: dict[int, int] = {}
    ranked = []
    for example in greedy:
        turns[example.group] = turns.get(example.group, 0) + 1
        ranked.append((turns[example.group], example))
    chosen: list[Example] = []
    for _, example in sorted(ranked, key=lambda item: item[0]):
        if not chosen or sum(e.outputs for e in chosen) + example.outputs <= places:
            chosen.append(example)
    return sorted(chosen, key=lambda example: len(example.tokens))


def _multiplies_bfloat16(device: torch.device) -> bool:
    """Whether bfloat16 is faster than float32: on a GPU, and on CPUs with matrix instructions for it."""
    known: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # not in every release of PyTorch
    return device.type == "cuda" or bool(known.get("amx_bf16"))


class _Training:
    def __init__(
        self, students: Students, train: list[Example], held_out: list[Example], recipe: Recipe, folder: Path
    ) -> None:
        self.students = students
        self.train = train
        self.held_out = held_out
        self.recipe = recipe
        self.checkpoints = Checkpoints(folder)
        self.weights = students.weights()
        if not self.weights:
            raise InvalidArgumentError("expected a network with weights to train; all of these are frozen or quantised")
        self.optimiser: torch.optim.Optimizer = torch.optim.AdamW(
            self.weights.values(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay
        )
        self.state = State(steps=recipe.steps if recipe.minutes is None else None)
        self.best = self._copies()
        self.device = students.device
        self.places = places_in_head(students)

    def run(self, *, resume: bool, progress: Progress) -> Outcome:
        recipe = self.recipe
        before = measure(self.students, self.held_out)
        if resume:
            self.checkpoints.load(self)
        started = perf_counter() - self.state.seconds
        if self.state.step == 0:
            self._look(before)
        times: list[float] = []
        saved = perf_counter()
        while (stopped := self._stopped()) is None:
            began = perf_counter()
            self._step()
            times.append(perf_counter() - began)
            self.state.seconds = perf_counter() - started
            if self.state.steps is None and recipe.minutes is not None and len(times) >= _TIMED_STEPS:
                self.state.steps = self._affordable(times, 60 * recipe.minutes)
            if self.state.step % recipe.evaluate_every == 0 or self._stopped() is not None:
                self._look(measure(self.students, self.held_out))
                self.state.seconds = perf_counter() - started
                saved = -math.inf
            if perf_counter() - saved > _SAVE_SECONDS:
                self.checkpoints.save(self)
                saved = perf_counter()
            done, total = self._progress
            progress("training", min(done, total - 1), total)
        outcome = self._outcome(before, stopped)
        progress("training", total := self._progress[1], total)  # patience may have ended it earlier
        return outcome

    @property
    def _progress(self) -> tuple[int, int]:
        """How far it is: steps out of all, or seconds where time is what limits it."""
        if self.recipe.minutes is None:
            return self.state.step, self.recipe.steps
        return math.floor(self.state.seconds), max(round(60 * self.recipe.minutes), 1)

    def _outcome(self, before: dict[str, Agreement], stopped: Literal["steps", "patience", "time"]) -> Outcome:
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(self.best[name])
        self.students.train(mode=False)
        state = self.state
        after = measure(self.students, self.held_out)
        return Outcome(before, after, state.step, state.best_step, state.tokens, state.seconds, stopped, state.log)

    def _stopped(self) -> Literal["steps", "patience", "time"] | None:
        state, recipe = self.state, self.recipe
        if state.steps is not None and state.step >= state.steps:
            return "steps" if recipe.minutes is None else "time"
        if recipe.minutes is not None and state.seconds > 60 * recipe.minutes:
            return "time"
        return "patience" if state.step - state.best_step >= recipe.patience * recipe.evaluate_every else None

    def _affordable(self, times: list[float], seconds: float) -> int:
        """Return the steps that fit into so much time, looks included."""
        step = float(np.median(times[1:]))
        began = perf_counter()
        measure(self.students, self.held_out)
        look = perf_counter() - began
        left = seconds - self.state.seconds - look
        return self.state.step + max(1, int(left / (step + look / self.recipe.evaluate_every)))

    def _step(self) -> None:
        """Make one step of the optimiser."""
        state, recipe = self.state, self.recipe
        batch = Batch.of(batches(self.train, recipe.batch, seed=recipe.seed, step=state.step), self.device)
        for group in self.optimiser.param_groups:
            group["lr"] = recipe.rate_at(state.step, state.steps or recipe.steps)
        self.students.train(mode=True)
        self.optimiser.zero_grad(set_to_none=True)
        loss = self._loss(batch)
        loss.backward()  # type: ignore[no-untyped-call] # PyTorch's is not typed
        nn.utils.clip_grad_norm_(self.weights.values(), 1.0)
        self.optimiser.step()
        state.step += 1
        state.tokens += len(batch.best)
        state.loss += float(loss.detach())
        state.losses += 1

    def _loss(self, batch: Batch) -> torch.Tensor:
        """Return the mean of the students' losses; with their whole network, (mean of exits + whole) / 2."""
        heads = self.students.heads()
        for head in heads:
            head.spread = False
        try:
            # bfloat16 only here: its logits have ties, so that choices are measured in full
            with torch.autocast(self.device.type, torch.bfloat16, enabled=_multiplies_bfloat16(self.device)):
                scored = self.students.logits(batch)
        finally:
            for head in heads:
                head.spread = True
        losses = {name: loss_of(logits, batch, self.recipe, self.places) for name, logits in scored.items()}
        whole = losses.pop(FULL, None)
        exits = torch.stack(list(losses.values())).mean()
        return exits if whole is None else (exits + whole) / 2

    def _look(self, found: dict[str, Agreement]) -> None:
        """Note the held-out acceptance; keep the weights if it is the best so far."""
        state = self.state
        drafters = [agreement.rate for name, agreement in found.items() if name != FULL]
        rate = sum(drafters) / len(drafters)
        row = {
            "step": state.step,
            "tokens": state.tokens,
            "seconds": round(state.seconds, 3),
            "learning_rate": self.recipe.rate_at(state.step, state.steps or self.recipe.steps),
            "loss": state.loss / state.losses if state.losses else None,
            "acceptance": rate,
        }
        if len(found) > 1:
            row |= {f"acceptance ({name})": agreement.rate for name, agreement in found.items()}
        state.log.append(row)
        state.loss, state.losses = 0.0, 0
        if rate > state.best:
            state.best, state.best_step = rate, state.step
            self.best = self._copies()

    def _copies(self) -> dict[str, torch.Tensor]:
        return {name: weight.detach().clone() for name, weight in self.weights.items()}
