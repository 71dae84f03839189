"""The command `tf-lossscale train`, which trains a network in float16 in a custom loop."""
