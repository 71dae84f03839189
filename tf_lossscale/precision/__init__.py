"""Exponent counts of gradients, and reports on how much of the gradients is lost in float16.

This subpackage does not use TensorFlow.
"""
