"""Measures the cost of a loss scale against bare optimizers and the libraries' own wrappers: `python -m benchmarks`."""
