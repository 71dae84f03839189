"""The cost of a loss scale, next to the bare optimizer and the libraries' own wrappers: `python -m benchmarks`."""
