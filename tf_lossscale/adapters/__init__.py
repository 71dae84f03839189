"""Adapters between LossScaleOptimizer and optimizer libraries. Each module subclasses `wrapper.family.Family`."""
