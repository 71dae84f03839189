"""LossScaleOptimizer: the documented API, for every optimizer family."""
