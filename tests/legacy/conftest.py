"""What the tests of the old names share."""

import pytest
import tensorflow as tf

from tests.families import tf_keras
from tf_lossscale.legacy.policy import policies_of


@pytest.fixture(params=["keras", "tf_keras"])
def library(request):
    """The name of one of the two Keras libraries, whose global policy is float32 again at the end."""
    yield request.param
    policies_of(request.param).set_policy("float32")


@pytest.fixture
def keras(library):
    """This library."""
    return {"keras": tf.keras, "tf_keras": tf_keras}[library]


@pytest.fixture
def policies(library):
    """Its policies with a loss scale."""
    return policies_of(library)
