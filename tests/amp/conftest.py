"""What the tests of this folder share."""

import pytest
import tensorflow as tf
import tf_keras

LIBRARIES = {"keras3": tf.keras, "tf_keras": tf_keras}


@pytest.fixture(params=LIBRARIES)
def keras(request):
    """One of the two Keras libraries."""
    return LIBRARIES[request.param]
