"""Control passes: timed between the runs of a validation, so that the machine's speed then is known."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hsdopt.plan import LOOKUP
from hsdopt.profiles import Profile
from hsdopt.profiling.cost import CostRecord, measure_costs
from hsdopt.profiling.journal import Journal
from hsdopt.runtime.model import Model

__all__ = ["ControlCosts"]

_SLOWEST = 3.0
"""A single timing counts at most this many times what is typical."""

_BLOCKS = 12
_FEWEST_BLOCKS = 4


class ControlCosts:
    """The cells of a profile, timed again a few at a time.

    Parameters
    ----------
    profiled : Profile
        Its token counts and contexts are timed.
    models : mapping of str to Model
        Its models, loaded.
    text : sequence of int
        Token ids to fill the caches with.
    journal : str or Path
        Every timing is there before the next is taken.
    turns : int
        How often `take` will be called; each call times its share.
    repeats : int
        Timings of every cell, in all.
    resume : bool
        Continue the journal.

    Raises
    ------
    ProfileError
        If the journal cannot be continued or written.
    """

    def __init__(
        self,
        profiled: Profile,
        models: Mapping[str, Model],
        *,
        text: Sequence[int],
        journal: str | Path,
        turns: int,
        repeats: int = 4,
        resume: bool = False,
    ) -> None:
        networks = {name: model for name, model in models.items() if model.kind != LOOKUP}
        samples = [sample for name in networks for sample in profiled.samples[name]]
        tokens = sorted({sample.tokens for sample in samples})
        contexts = sorted({sample.context for sample in samples})
        self._networks = tuple(networks)
        self._curves = {name: profiled.costs[name] for name in networks}
        header = {"tokens": tokens, "contexts": contexts, "models": sorted(networks), "repeats": repeats}
        self._journal = Journal(Path(journal), header, resume=resume)
        self._records = self._journal.read(lambda entry: CostRecord(**entry))
        self._wanted = repeats * len(samples)
        self._share = self._wanted / turns
        self._owed = 0.0
        self._stream = iter(
            measure_costs(
                networks,
                tokens=tokens,
                contexts=contexts,
                repeats=repeats,
                text=text,
                done=[(r.model, r.tokens, r.context, r.repeat) for r in self._records],
            )
        )

    def take(self) -> None:
        """Time one turn's share of the cells."""
        self._owed += self._share
        count = math.floor(self._owed)
        self._owed -= count
        self._add(count)

    def finish(self, progress: Callable[[str, int, int], None] | None = None) -> None:
        """Time what is left: much of it, if there were fewer turns than expected.

        Parameters
        ----------
        progress : callable, optional
            Called with (stage, done, total).
        """
        before = len(self._records)
        total = max(self._wanted - before, 1)
        while self._one():
            if progress is not None:
                progress("control passes", min(len(self._records) - before, total - 1), total)
        if progress is not None:
            progress("control passes", total, total)

    def changes(self) -> dict[str, float]:
        """Time what is left, and return per network how long its passes take now, relative to its profiled costs.

        Time over profiled time, summed over all kinds of passes: one number for a model, since a few timings spread
        over many cells say how fast it runs now, but not how one cell has changed. A single timing counts at most
        three times what is typical, as in the profile.

        What changes is mostly the machine, for all models alike, and slow spells hit the timings of some models more
        than those of others; so a model's own number is drawn towards the common one, the more, the less the models
        differ beyond what their noise explains.
        """
        self.finish()
        own = np.log([self._change(name) for name in self._networks])
        apart = own - own.mean()
        noise = self._scatter() ** 2
        real = max(float(np.mean(apart**2) - np.mean(noise)), 0.0)
        weight = np.divide(real, real + noise, out=np.ones_like(noise), where=noise > 0)
        return dict(zip(self._networks, np.exp(own.mean() + weight * apart).tolist(), strict=True))

    def applied(self, profiled: Profile) -> Profile:
        """Return the profile with the costs of its networks scaled by `changes`, and overhead like the target's."""
        changes = self.changes()
        scaled = {name: profiled.costs[name].scaled(factor) for name, factor in changes.items()}
        overhead = {name: seconds * changes[profiled.target] for name, seconds in profiled.overhead.items()}
        return replace(profiled, costs={**profiled.costs, **scaled}, samples={}, overhead=overhead)

    def noise(self) -> float:
        """Return the relative standard error of `changes` for all models together, as blocks of time tell it.

        A machine is slow for seconds on end, so that timings taken one after the other are no independent draws.
        """
        changes = self.changes()
        known = self._known()
        expected = np.array([changes[r.model] * self._curves[r.model](r.tokens, r.context) for r in known])
        blocks = np.array_split(np.arange(len(known)), min(_BLOCKS, len(known)))
        if len(blocks) < 2:
            return 0.0
        seconds = np.minimum([r.seconds for r in known], _SLOWEST * expected)
        ratios = [seconds[block].sum() / expected[block].sum() for block in blocks]
        return float(np.std(ratios, ddof=1) / math.sqrt(len(blocks)))

    def _known(self) -> list[CostRecord]:
        return [r for r in self._records if r.tokens in self._curves[r.model].tokens]

    def _change(self, name: str) -> float:
        return self._ratio([r for r in self._known() if r.model == name])

    def _ratio(self, timed: Sequence[CostRecord]) -> float:
        """Return time over profiled time of some passes of one model; nan if there are none."""
        if not timed:
            return math.nan
        expected = np.array([self._curves[r.model](r.tokens, r.context) for r in timed])
        ratios = np.array([r.seconds for r in timed]) / expected
        return float(np.sum(expected * np.minimum(ratios, _SLOWEST * np.median(ratios))) / np.sum(expected))

    def _scatter(self) -> NDArray[np.float64]:
        """Return the standard error of how far the logarithm of each model's number is from their mean.

        From blocks of time: within one, all models have the same machine. Zero where too few blocks hold all models.
        """
        known = self._known()
        blocks = np.array_split(np.arange(len(known)), min(_BLOCKS, len(known)))
        logs = np.log(
            [
                [self._ratio([known[i] for i in block if known[i].model == m]) for m in self._networks]
                for block in blocks
            ]
        )
        whole = logs[np.isfinite(logs).all(axis=1)]
        if len(whole) < _FEWEST_BLOCKS:
            return np.zeros(len(self._networks))
        apart = whole - whole.mean(axis=1, keepdims=True)
        return np.asarray(apart.std(axis=0, ddof=1) / math.sqrt(len(whole)))

    def _add(self, count: int) -> None:
        for _ in range(count):
            self._one()

    def _one(self) -> bool:
        """Time one more cell; return whether there was one left."""
        record = next(self._stream, None)
        if record is None:
            return False
        self._journal.add(**asdict(record))
        self._records.append(record)
        return True
