"""Monitor the loss scale in `fit` and in TensorBoard, and plot it."""
