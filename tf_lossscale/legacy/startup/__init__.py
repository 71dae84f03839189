"""The folder that `tf-lossscale run` puts on PYTHONPATH."""
