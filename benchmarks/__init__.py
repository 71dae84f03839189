"""What a loss scale costs, next to the bare optimizer and to the libraries' own wrappers: `python -m benchmarks`."""
