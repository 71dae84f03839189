"""The main job, `tf-lossscale train`: real training in float16, in a loop of its own."""
