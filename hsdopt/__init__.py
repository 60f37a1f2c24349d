"""Decide how to speed up a language model by speculative decoding."""

__version__ = "0.1.0"
