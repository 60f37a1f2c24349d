"""Running plans on real models."""

from hsdopt.runtime.events import Counters, Edge, Event, Generation, Seconds
from hsdopt.runtime.generate import generate
from hsdopt.runtime.models import Model
from hsdopt.runtime.sampling import Sampling, near_tie

__all__ = ["Counters", "Edge", "Event", "Generation", "Model", "Sampling", "Seconds", "generate", "near_tie"]
