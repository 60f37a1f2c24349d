"""How far replayed passes are from those made, with and without counts from short runs; no clock is read.

Traces the target and its drafters on prompts of a workload, runs plans with middle models on the same prompts, and
holds what every predictor foresees against the passes that were made, all priced by one table of costs.
Off-trajectory counts come from few runs on profiled prompts, the errors from others.
Stopped, it goes on where it was.

Usage: python scripts/dependence.py FOLDER [--prompts 8] [--tokens 32] [--workload mixed] [--runs 4]
       [--middle smollm2-int8] [--small smollm2-int4]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from hsdopt.acceptance import Strays
from hsdopt.costs import CostCurve
from hsdopt.files import parse_json
from hsdopt.latency import expected_latency
from hsdopt.plan import LOOKUP, Plan, parse_plan
from hsdopt.profiles import Profile, Setting
from hsdopt.simulate import replay

TARGET = "smollm2"
MEASURED = ("{t}({m}:8(lookup:4))", "{t}({s}:8(lookup:6))", "{t}({m}:6({s}:3))")
"""Plans whose runs are counted; m and s are the drafters."""
OTHERS = ("{t}({m}:12(lookup:8))", "{t}({m}:8({s}:4(lookup:4)))", "{t}({s}:6+(lookup:4))")
"""Plans that are predicted only."""
EMPTY: Mapping[Any, Any] = MappingProxyType({})
TOKENS = (1, 2, 4, 5, 8, 16, 32, 64)
MILLISECONDS = {
    TARGET: (40, 47, 50, 54, 63, 85, 121, 200),
    "m": (29, 33, 39, 58, 64, 95, 160, 300),
    "s": (27, 30, 36, 52, 60, 90, 150, 290),
}
"""Of a pass over so many new tokens: those of the target, int8 and int4 on two cores of a CPU."""
CLOSE = 0.02
"""Plans whose times differ by less are not ranked."""


@dataclass(frozen=True, slots=True)
class Study:
    """What is run: the two drafters, and the plans by what becomes of their runs."""

    middle: str
    small: str
    setting: Setting

    @property
    def models(self) -> tuple[str, ...]:
        """Every model that is loaded."""
        return (TARGET, self.middle, self.small, LOOKUP)

    @property
    def measured(self) -> tuple[str, ...]:
        """Plans whose runs are counted."""
        return self._plans(MEASURED)

    @property
    def plans(self) -> tuple[str, ...]:
        """Plans that are predicted."""
        return self._plans(MEASURED + OTHERS)

    def _plans(self, texts: Sequence[str]) -> tuple[str, ...]:
        return tuple(text.format(t=TARGET, m=self.middle, s=self.small) for text in texts)


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt: its id, tokens, the traces along the target's output, and the lookup drafter that may be used."""

    name: str
    prompt: tuple[int, ...]
    trace: Any
    lookup: Any
    held_out: bool


def main(arguments: Sequence[str] | None = None) -> None:
    """Collect what is missing in the folder and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompts", type=int, default=8, help="held-out prompts")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--workload", default="mixed")
    parser.add_argument("--runs", type=int, default=4, help="profiled prompts whose runs are counted")
    parser.add_argument("--middle", default="smollm2-int8", help="the larger drafter")
    parser.add_argument("--small", default="smollm2-int4", help="the smaller drafter")
    asked = parser.parse_args(arguments)
    asked.folder.mkdir(parents=True, exist_ok=True)
    study = Study(asked.middle, asked.small, Setting(max_new_tokens=asked.tokens))
    cases, runs = collect(asked.folder, study, asked.workload, (asked.runs, asked.prompts))
    sys.stdout.write("\n".join(report(cases, runs, study)) + "\n")


def collect(
    folder: Path, study: Study, workload: str, counts: tuple[int, int]
) -> tuple[list[Case], dict[tuple[str, str], Any]]:
    """Return the traced prompts, and what every run logged, by plan and prompt."""
    import torch

    from hsdopt.profiling import load_workload, render_prompts, trace_prompts  # noqa: PLC0415
    from hsdopt.runtime import load_models  # noqa: PLC0415

    torch.set_num_threads(1)
    models = load_models(study.models)
    halves = load_workload(workload)
    profiled = render_prompts(halves.profiling.take(counts[0]), models[TARGET])
    rendered = profiled | render_prompts(halves.validation.take(counts[1]), models[TARGET])
    journal = folder / "traces.journal"
    traced = trace_prompts(models, TARGET, rendered, setting=study.setting, journal=journal, resume=journal.exists())
    cases = _cases(rendered, traced, len(profiled))
    return cases, _runs(folder / "runs.jsonl", cases, models, study)


def _cases(rendered: Mapping[str, tuple[int, ...]], traced: Sequence[Any], profiled: int) -> list[Case]:
    """Give every prompt a lookup drafter that has not seen it."""
    from hsdopt.profiling.measure import leave_one_out, lookup_table  # noqa: PLC0415
    from hsdopt.runtime.lookup import Lookup  # noqa: PLC0415

    own = leave_one_out(traced[:profiled])
    whole = Lookup(lookup_table(traced[:profiled]))
    return [
        Case(name, prompt, trace, own(index) if index < profiled else whole, held_out=index >= profiled)
        for index, ((name, prompt), trace) in enumerate(zip(rendered.items(), traced, strict=True))
    ]


def _runs(path: Path, cases: Sequence[Case], models: Mapping[str, Any], study: Study) -> dict[tuple[str, str], Any]:
    """Make the runs that are missing; return the event log of each."""
    from hsdopt.runtime import generate  # noqa: PLC0415
    from hsdopt.runtime.events import Event  # noqa: PLC0415
    from hsdopt.runtime.model import Model  # noqa: PLC0415

    path.touch()
    lines = [parse_json(line, str(path)) for line in path.read_text(encoding="utf-8").splitlines()]
    logs = {(line["plan"], line["prompt"]): [Event(**event) for event in line["events"]] for line in lines}
    wanted = [(text, case) for case in cases for text in (study.plans if case.held_out else study.measured)]
    for text, case in wanted:
        if (text, case.name) in logs:
            continue
        chosen = {**models, LOOKUP: Model.of_lookup(case.lookup, models[TARGET])}
        plan = parse_plan(text)
        made = generate(plan, chosen, list(case.prompt), ignore_eos=True, seed=0, **study.setting.model_dump())
        logs[text, case.name] = list(made.events)
        with path.open("a", encoding="utf-8") as stream:
            entry = {"plan": text, "prompt": case.name, "events": [asdict(event) for event in made.events]}
            stream.write(json.dumps(entry) + "\n")
    return logs


def profile_of(cases: Sequence[Case], study: Study, strays: Mapping[tuple[str, str], Strays] = EMPTY) -> Profile:
    """Return a profile of the traces, priced by the table."""
    from hsdopt.profiling.acceptance import assemble  # noqa: PLC0415

    traces = assemble([case.trace for case in cases], lookup=lambda index: cases[index].lookup)
    names = (TARGET, study.middle, study.small)
    costs = {
        name: CostCurve.from_function(_cost(row), TOKENS[-1])
        for name, row in zip(names, MILLISECONDS.values(), strict=True)
    }
    costs[LOOKUP] = CostCurve.fixed(1e-4)
    return Profile(TARGET, costs, traces=traces, setting=study.setting, strays=strays)


def _cost(row: Sequence[float]) -> Callable[[int], float]:
    return lambda tokens: float(np.interp(tokens, TOKENS, row)) / 1e3


def price(events: Iterable[Any], profile: Profile) -> tuple[float, Counter[str]]:
    """Return the seconds of all passes of a run at the profile's costs, and the passes by model."""
    made = [(e.model, max(1, e.new_tokens)) for e in events if e.kind in ("pass", "lookup")]
    return sum(profile.cost(name)(fed) for name, fed in made), Counter(name for name, _ in made)


def predictors(profile: Profile, tokens: int) -> dict[str, Callable[[Plan], float]]:
    """Return seconds per token by predictor."""
    blind, iid = replace(profile, strays=EMPTY), profile.as_iid()
    return {
        "replay": lambda plan: replay(plan, blind).seconds_per_token,
        "replay, corrected": lambda plan: replay(plan, profile).seconds_per_token,
        "closed form": lambda plan: expected_latency(plan, profile, tokens=tokens).seconds_per_token,
        "constant-cost iid": lambda plan: expected_latency(plan, iid).seconds_per_token,
    }


def report(cases: Sequence[Case], logs: Mapping[tuple[str, str], Any], study: Study) -> list[str]:
    """Return the figures as lines of Markdown."""
    from hsdopt.profiling.dependence import count_strays, middle_reviews  # noqa: PLC0415

    profiled, held = ([case for case in cases if case.held_out == kind] for kind in (False, True))
    reviews = [
        review
        for text in study.measured
        for case in profiled
        for review in middle_reviews(logs[text, case.name], parse_plan(text))
    ]
    strays = count_strays(reviews)
    lines = [f"Counts from {len(profiled)} profiled prompts, held against runs on {len(held)} others:"]
    lines += [f"- {pair[0]} by {pair[1]}: {of.drafts} drafts astray" for pair, of in strays.items()]
    lines += _passes(held, logs, study, strays)
    for title, source in (("held-out", held), ("profiled", profiled)):
        lines += ["", f"Predicted from traces of the {title} prompts:", ""]
        lines += _scores(profile_of(source, study, strays), held, logs, study)
    return lines


def _passes(
    held: Sequence[Case], logs: Mapping[tuple[str, str], Any], study: Study, strays: Mapping[tuple[str, str], Strays]
) -> list[str]:
    """Return, plan by plan, the passes of every model that were made and foreseen."""
    lines = ["", "| plan | model | made | replay | corrected |", "|---|---|---|---|---|"]
    profile = profile_of(held, study, strays)
    for text in study.plans:
        plan, made = parse_plan(text), Counter[str]()
        for case in held:
            made += price(logs[text, case.name], profile)[1]
        both = [replay(plan, one) for one in (replace(profile, strays=EMPTY), profile)]
        tokens = (study.setting.max_new_tokens - 1) * len(held)
        for model in plan.models:
            shown = [f"{run.passes_per_token[model] * tokens / made[model] - 1:+.1%}" for run in both]
            lines.append(f"| {text} | {model} | {made[model]} | {' | '.join(shown)} |")
    return lines


def _scores(profile: Profile, held: Sequence[Case], logs: Mapping[tuple[str, str], Any], study: Study) -> list[str]:
    """Return one line per predictor: errors, ranks and the regret of its pick."""
    tokens = study.setting.max_new_tokens - 1
    made = {
        text: sum(price(logs[text, case.name], profile)[0] for case in held) / tokens / len(held)
        for text in study.plans
    }
    pairs = [(a, b) for a, b in combinations(made, 2) if abs(made[a] / made[b] - 1) > CLOSE]
    lines = ["| predictor | median error | 95th percentile | largest | ranks | regret |", "|---|---|---|---|---|---|"]
    for name, predict in predictors(profile, tokens).items():
        foreseen = {text: predict(parse_plan(text)) for text in made}
        errors = np.abs([foreseen[text] / made[text] - 1 for text in made])
        right = sum((foreseen[a] - foreseen[b]) * (made[a] - made[b]) > 0 for a, b in pairs)
        regret = made[min(foreseen, key=foreseen.__getitem__)] / min(made.values()) - 1
        figures = (np.median(errors), np.quantile(errors, 0.95), errors.max())
        shown = " | ".join(f"{figure:.1%}" for figure in figures)
        lines.append(f"| {name} | {shown} | {right} of {len(pairs)} | {regret:.1%} |")
    return lines


if __name__ == "__main__":
    main()
