"""Adapters: the answers to the questions of `Family`, one file for each optimizer family."""
