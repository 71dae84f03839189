"""Networks that the tests of this folder share."""

import numpy as np


def of_tokens(keras, layer):
    """Returns a network for four tokens each, which masks tokens of zero, with a layer (a function) after the mask."""
    tokens = keras.Input((4,), dtype="int32")
    model = keras.Model(tokens, layer(keras.layers.Embedding(5, 4, mask_zero=True)(tokens)))
    random = np.random.RandomState(0)
    model.set_weights([random.normal(0, 0.5, weight.shape) for weight in model.get_weights()])
    return model
