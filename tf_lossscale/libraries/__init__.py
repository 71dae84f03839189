"""Access to other libraries: optional imports, Keras 2 and Keras 3, and import hooks."""
