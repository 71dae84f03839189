"""Compares random training programs with a NumPy model, and injects faults such as a kill: `python -m fuzz`."""
