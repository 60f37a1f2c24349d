"""Damaged plans, profiles, traces, journals and prompts: clean errors, in little memory and little time.

``HSDOPT_FUZZ`` is the number of inputs in all, ``HSDOPT_FUZZ_SEED`` what they are drawn from; see ``make fuzz``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz import MOST_MEMORY, SLOWEST

INPUTS = int(os.environ.get("HSDOPT_FUZZ", "300"))
SEED = int(os.environ.get("HSDOPT_FUZZ_SEED", "0"))
SHARES = {"notation": 0.2, "plan_json": 0.2, "profile_json": 0.15, "traces": 0.15, "journal": 0.15, "prompts": 0.13}
SHARES["cli"] = 1 - sum(SHARES.values())


@pytest.mark.parametrize("kind", SHARES)
def test_damaged_inputs_are_refused_cleanly(kind: str) -> None:
    count = max(20, round(INPUTS * SHARES[kind]))
    here = Path(__file__).parent
    command = [sys.executable, str(here / "fuzz.py"), kind, str(count), str(SEED)]
    environment = {**os.environ, "PYTHONPATH": str(here), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)  # noqa: S603 - our own
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    print(  # noqa: T201 - make fuzz shows it
        f"{kind}: {found['count']} inputs, {found['taken']} taken, {found['refused']} refused; "
        f"slowest {found['slowest']:.2f} s (input {found['slowest_index']}), "
        f"{found['memory'] / 2**20:.0f} MiB more (input {found['memory_index']})"
    )
    said = [
        f"{failure['count']} x {signature}: {failure['said']}\n    first: input {failure['index']}, {failure['input']}"
        for signature, failure in found["failures"].items()
    ]
    again = f"again: PYTHONPATH=tests {sys.executable} tests/fuzz.py {kind} {count} {SEED} INDEX"
    assert not said, "\n".join((*said, again))
    assert found["count"] == count
    assert found["taken"] > 0
    assert found["refused"] > 0
    assert found["slowest"] <= SLOWEST
    assert found["memory"] <= MOST_MEMORY
