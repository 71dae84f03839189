"""Compares random training programs with a NumPy model (`python -m tools.fuzz`) and with other libraries
(`python -m tools.fuzz.differential`)."""
