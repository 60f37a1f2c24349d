"""Running plans on real models."""

from hsdopt.runtime.events import Counters, Edge, Event, Generation, Seconds
from hsdopt.runtime.generate import generate
from hsdopt.runtime.model import Model
from hsdopt.runtime.models import load_models
from hsdopt.runtime.sampling import Sampling, near_tie

__all__ = [
    "Counters",
    "Edge",
    "Event",
    "Generation",
    "Model",
    "Sampling",
    "Seconds",
    "generate",
    "load_models",
    "near_tie",
]
