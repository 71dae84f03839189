"""Random programs against a NumPy model, and faults: `python -m fuzz`."""
