"""LossScaleOptimizer and its public API, which is the same for every optimizer family."""
