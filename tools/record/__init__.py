"""Programs that record the behavior of the original implementations, on Python 3.7 or newer."""
