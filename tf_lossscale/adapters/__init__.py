"""Adapters: the implementations of `Family`, one file for each optimizer family."""
