"""Other libraries: the optional ones, the versions of Keras, what happens when one is imported."""
