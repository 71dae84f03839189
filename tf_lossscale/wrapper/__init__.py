"""LossScaleOptimizer, whose public API is the same for every optimizer family."""
