"""The command `tf-lossscale train`, which trains a network in float16 with a custom training loop."""
