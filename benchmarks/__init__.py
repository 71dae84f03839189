"""Compares this package's loss scaling with optimizers without loss scaling and with other libraries' loss scaling.

Run the benchmarks with `python -m benchmarks`.
"""
