"""Loss scaling in pure TensorFlow, without Keras or optimizer classes."""
