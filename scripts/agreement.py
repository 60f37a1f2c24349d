"""Print, as a table in Markdown, how often drafters choose the target's token on what it wrote for a profile.

That is their acceptance by the target when it decodes greedily; nothing is timed. Intervals are of 95 %, by bootstrap
over prompts.

Usage: python scripts/agreement.py PROFILE[,PROFILE ...] DRAFTER [DRAFTER ...]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from hsdopt import Profile
from hsdopt.profiling import load_workload, render_prompts
from hsdopt.runtime import Model, load_models
from hsdopt.runtime.alignment import Agreement, measure
from hsdopt.runtime.calibration import Example
from hsdopt.runtime.students import drafter


def written(profile: Profile, target: Model) -> Iterator[Example]:
    """Yield the target's outputs that a profile holds, each with its prompt."""
    traces = profile.traces
    assert traces is not None  # noqa: S101 -- profiles of two models or more have them
    prompts = render_prompts(load_workload(profile.provenance["workload"]).profiling.take(traces.prompts), target)
    for number, prompt in enumerate(prompts.values()):
        here = traces.prompt == number
        if traces.context[here][0] != len(prompt):
            sys.exit(f"expected prompts as {profile.target} read them when profiled; they have changed")
        output = tuple(traces.tokens[here].tolist())
        yield Example(number, (*prompt, *output), len(prompt), output)


def cell(found: Agreement) -> str:
    """Return a rate and its interval."""
    return f"{found.rate:.3f} ({found.low:.3f} to {found.high:.3f})"


def main(profiles: list[Profile], sources: list[str]) -> None:
    """Print a row per drafter and a column per profile."""
    target = load_models({"target": profiles[0].models[profiles[0].target].source})["target"]
    texts = [list(written(profile, target)) for profile in profiles]
    names = [
        f"{profile.provenance['workload']}, {len(outputs)} prompts"
        for profile, outputs in zip(profiles, texts, strict=True)
    ]
    say = sys.stdout.write
    say(f"| drafter | {' | '.join(names)} |\n")
    say(f"|{' --- |' * (1 + len(texts))}\n")
    for source in sources:
        model = load_models({"drafter": source})["drafter"]
        if model.network is None:
            sys.exit(f"expected networks as drafters; {source} only proposes")
        rates = [measure(drafter(model.network), outputs)["drafter"] for outputs in texts]
        say(f"| `{source}` | {' | '.join(map(cell, rates))} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("\n".join(__doc__.splitlines()[-1:]))
    main([Profile.load(path) for path in sys.argv[1].split(",")], sys.argv[2:])
