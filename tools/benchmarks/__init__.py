"""Benchmarks that compare this package's loss scaling with other libraries' and with no loss scaling at all.

Run the benchmarks with `python -m tools.benchmarks`.
"""
