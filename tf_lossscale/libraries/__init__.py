"""Access to other libraries: optional imports, the versions of Keras, and import hooks."""
