"""Counts of gradients by exponent, and reports of what float16 loses of them. This package does not use TensorFlow."""
