"""Hold the pick of a profile under a budget against that of an exhaustive one, on the built-in models.

The first is ``hsdopt profile --budget 4m --confidence 0.95`` with four drafters. The second times every pass size on
the full grid, over all profiling prompts, so often that it takes at least ten times as long. Both picks are then read
from the second. Stopped in the middle, the same command continues where it was.

Usage: python scripts/budget_check.py OUTPUT_FOLDER [WORKLOAD] [--budget 4m] [--times 10]
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from hsdopt.cli.predictions import Replayer
from hsdopt.latency import expected_latency
from hsdopt.plan import LOOKUP, plan_from_json
from hsdopt.profiles import Profile
from hsdopt.profiling.cost import NEW_TOKENS
from hsdopt.solvers.solve import solve

DRAFTERS = ("lookup", "smollm2-int8", "smollm2-int4", "smollm2-skip3")
MODELS = ("--target", "smollm2", *(part for name in DRAFTERS for part in ("--draft", name)))
WITHIN = 0.02


def main() -> int:
    """Measure both profiles, compare their picks; 1 if they are over 2 % apart, or the budget was exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("workload", nargs="?", default="mixed")
    parser.add_argument("--budget", default="4m")
    parser.add_argument("--times", type=float, default=10.0, help="how many times as long the exhaustive one takes")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    short, long = asked.folder / "budget.json", asked.folder / "exhaustive.json"
    seconds = profile(asked.workload, short, "--budget", asked.budget, "--confidence", "0.95")
    wanted = asked.times * seconds
    repeats = max(3, math.ceil(wanted / seconds_per_repeat(Profile.load(short))))
    longer = profile(asked.workload, long, "--repeats", str(repeats))
    found = compare(Profile.load(short), Profile.load(long))
    found |= {"seconds": seconds, "exhaustive_seconds": longer, "repeats": repeats, "workload": asked.workload}
    (asked.folder / "budget_check.json").write_text(json.dumps(found, indent=1) + "\n")
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    return 0 if found["regret"] <= WITHIN and found["measuring"] <= found["budget"] else 1


def profile(workload: str, path: Path, *options: str) -> float:
    """Run `hsdopt profile` unless it is complete; return the seconds it took, those of stopped runs included."""
    clock = path.with_suffix(".seconds")
    if not path.exists():
        started = time.monotonic()
        command = [sys.executable, "-c", "from hsdopt.cli import main; main()", "profile", *MODELS]
        where = ["--prompts", workload, "--max-new-tokens", "48", "--resume", "-o", str(path)]
        try:
            subprocess.run([*command, *where, *options], check=True)  # noqa: S603 -- our own command
        finally:
            before = float(clock.read_text()) if clock.exists() else 0.0
            clock.write_text(f"{before + time.monotonic() - started:.1f}\n")
    return float(clock.read_text())


def seconds_per_repeat(profile: Profile) -> float:
    """Return about how long one repeat of the full grid takes."""
    contexts = profile.provenance["contexts"]
    networks = [profile.cost(name) for name in profile.names if name != LOOKUP]
    sizes = [min(tokens, 32) for tokens in NEW_TOKENS]
    return sum(cost(tokens, context) for cost in networks for context in contexts for tokens in sizes)


def compare(short: Profile, long: Profile) -> dict[str, Any]:
    """Return both picks, and what the first costs over the second, as the exhaustive profile sees them."""
    said = short.provenance["budget"]
    pick = plan_from_json(said["plan"])
    judge = Replayer(long)
    best = solve(long, rerank=judge, interval=0).candidate
    closed = solve(long, interval=0).candidate
    return {
        "budget": said["seconds"],
        "measuring": said["spent"],
        "resolved": said["resolved"],
        "stopped": said["stopped"],
        "probability": said["probability"],
        "pick": said["pick"],
        "best": best.plan.description,
        "regret": judge(pick) / best.seconds_per_token - 1,
        "closed_form_best": closed.plan.description,
        "closed_form_regret": expected_latency(pick, long).seconds_per_token / closed.seconds_per_token - 1,
        "prompts": said["prompts"],
        "unresolved": said["unresolved"],
        "dropped": said["dropped"],
    }


if __name__ == "__main__":
    sys.exit(main())
