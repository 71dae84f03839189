"""The `tf-lossscale train` command, which trains a network in float16 with a custom training loop."""
