"""Benchmarks that compare this package's loss scaling with no loss scaling and with other libraries' loss scaling.

Run the benchmarks with `python -m benchmarks`.
"""
