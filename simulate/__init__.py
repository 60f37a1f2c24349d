"""Simulation of plans: random event simulation, replay of traces, and known distributions."""

from hsdopt.simulate.engine import Counts
from hsdopt.simulate.events import SimulatedRun, simulate

__all__ = ["Counts", "SimulatedRun", "simulate"]
