"""Compares random training programs with a model (`python -m tools.fuzz`) and with other libraries
(`python -m tools.fuzz.differential`)."""
