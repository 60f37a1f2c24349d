"""hsdopt/cli."""
