"""The command `tf-lossscale train`: training in float16, in a custom loop."""
