"""hsdopt/solvers."""
