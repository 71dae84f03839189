"""Monitoring of the loss scale: in `fit`, in TensorBoard, as a plot."""
