"""Simulation of plans: random event simulation, replay of traces, and known distributions."""

from hsdopt.simulate.categorical import CategoricalRun, categorical
from hsdopt.simulate.engine import Counts
from hsdopt.simulate.events import SimulatedRun, simulate
from hsdopt.simulate.replay import BildCounts, ReplayedRun, replay, replay_many

__all__ = [
    "BildCounts",
    "CategoricalRun",
    "Counts",
    "ReplayedRun",
    "SimulatedRun",
    "categorical",
    "replay",
    "replay_many",
    "simulate",
]
