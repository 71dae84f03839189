"""Adapters for the optimizer families. Each module implements `wrapper.family.Family` for one family."""
