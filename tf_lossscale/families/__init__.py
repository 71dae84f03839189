"""Optimizer families: what each library's optimizers have in common, one module for each family, and their registry."""
