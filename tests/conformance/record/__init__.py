"""Programs that record the behaviour of the original implementations, on Python 3.7 or newer."""
