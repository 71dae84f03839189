"""Gradients counted by exponent, and what float16 loses of them: plain data, without TensorFlow."""
