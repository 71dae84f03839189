"""Support for Keras training loops: a callback for `fit`, and the restoring of state after a skipped step."""
