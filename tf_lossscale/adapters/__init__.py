"""Adapters between LossScaleOptimizer and optimizer libraries. Each one derives from `wrapper.family.Family`."""
