"""Measures the cost of this package's loss scaling, relative to plain optimizers and to the libraries' own wrappers.

Run the benchmarks with `python -m benchmarks`.
"""
