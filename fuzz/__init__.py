"""Fuzzer: compares random training programs with a NumPy model, and injects faults such as kills: `python -m fuzz`."""
