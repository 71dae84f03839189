"""Programs that record the originals; they run in the originals' environments, on Python 3.7 or newer."""
