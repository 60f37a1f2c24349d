"""hsdopt/gsp."""
