"""Provenance: on what, with what and when a profile was measured."""

from __future__ import annotations

import datetime as dt
import os
import platform
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil
import torch

from hsdopt.errors import ProfileError

__all__ = ["device_name", "provenance", "require_same_device", "same_device", "use_threads"]

_PACKAGES = ("hsdopt", "torch", "transformers", "numpy")


def provenance(device: str = "cpu") -> dict[str, Any]:
    """Return versions, device, driver, threads, memory, date and command line, as plain JSON values."""
    return {
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "versions": {name: _version(name) for name in _PACKAGES} | {"python": platform.python_version()},
        "system": f"{platform.system()} {platform.machine()}",
        "device": device_name(device),
        "driver": _driver(device),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "command": " ".join(["hsdopt", *sys.argv[1:]]) if sys.argv else "hsdopt",
    }


def device_name(device: str) -> str:
    """Return the name of `device`: the processor's, or the accelerator's."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return _processor() or platform.machine()


def same_device(stored: dict[str, Any], device: str) -> str | None:
    """Return why costs measured under `stored` do not hold here, or None if they do."""
    here = device_name(device)
    if stored.get("device") not in (None, here):
        return f"it was measured on {stored['device']}; this is {here}"
    threads = torch.get_num_threads()
    if device == "cpu" and stored.get("threads") not in (None, threads):
        return f"it was measured with {_threads(stored['threads'])}; this runs {_threads(threads)} (see --threads)"
    return None


def require_same_device(stored: dict[str, Any], device: str) -> None:
    """Raise ProfileError if costs measured under `stored` do not hold here."""
    fault = same_device(stored, device)
    if fault is not None:
        raise ProfileError(f"expected a profile of this machine; {fault}: profile again here")


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def use_threads(threads: int | None, stored: Mapping[str, Any]) -> None:
    """Set PyTorch's threads: those asked for, else those of a stored provenance, else as they are."""
    wanted = stored.get("threads") if threads is None else threads
    if wanted is not None:
        torch.set_num_threads(int(wanted))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _driver(device: str) -> str:
    return f"CUDA {torch.version.cuda}" if device.startswith("cuda") else torch.backends.cpu.get_cpu_capability()


def _processor() -> str:
    """Return the processor's marketing name where the system tells it (Linux), else what Python knows."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as stream:  # noqa: PTH123 -- not a file of ours
            names = [line.partition(":")[2].strip() for line in stream if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor()
