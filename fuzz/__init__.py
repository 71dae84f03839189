"""Fuzz tests: compare random training programs with a NumPy model, and inject faults such as killed processes.

Run them with `python -m fuzz`.
"""
