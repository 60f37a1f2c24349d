"""hsdopt/latency."""
