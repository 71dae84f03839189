"""Monitors the loss scale in `fit` and in TensorBoard, and plots it."""
