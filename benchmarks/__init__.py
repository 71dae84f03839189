"""Measures what loss scaling costs, compared with optimizers without it and with the libraries' own wrappers.

Run the benchmarks with `python -m benchmarks`.
"""
