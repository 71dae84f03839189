"""Loss scaling in TensorFlow alone: no Keras, no optimizer classes."""
