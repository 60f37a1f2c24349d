"""The errors that hsdopt raises on purpose.

::

    HsdoptError
    +-- InvalidArgumentError (also ValueError)   a value outside its domain
    |   +-- PlanError                            a plan that cannot be read or built
    |   +-- GraphError                           a malformed shortest path problem
    +-- UnreachableError                         no path leads to the target
    +-- ProfileError                             a profile file that cannot be used
    +-- WorkloadError                            a prompt file that cannot be used
    +-- ModelError                               a model that cannot be loaded or run
    |   +-- CacheError                           a key-value cache that cannot be rewound
    |   +-- VocabularyError                      two models that do not share a vocabulary
    +-- MissingExtraError                        an optional dependency that is not installed
    +-- PredictionError                          a plan that this profile cannot predict

Every message is one line: what was expected, what came, what to do.
"""

from __future__ import annotations


class HsdoptError(Exception):
    """The base of every error raised on purpose; the command line prints its message alone."""


class InvalidArgumentError(HsdoptError, ValueError):
    """A value outside its domain."""


class PlanError(InvalidArgumentError):
    """A plan that cannot be read or built."""


class GraphError(InvalidArgumentError):
    """A malformed shortest path problem."""


class UnreachableError(HsdoptError):
    """No path leads to the target."""


class ProfileError(HsdoptError):
    """A profile file that cannot be used."""


class WorkloadError(HsdoptError):
    """A prompt file that cannot be used."""


class ModelError(HsdoptError):
    """A model that cannot be loaded or run."""


class CacheError(ModelError):
    """A key-value cache that cannot be rewound."""


class VocabularyError(ModelError):
    """Two models that do not share a vocabulary."""


class MissingExtraError(HsdoptError):
    """An optional dependency that is not installed."""


class PredictionError(HsdoptError):
    """A plan whose speed this profile cannot predict."""
