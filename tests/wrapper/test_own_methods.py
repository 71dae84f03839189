"""A method of the user's own is looked up where Python looks it up, and gets unscaled gradients in every loop."""

import types

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.cases import combinations
from tf_lossscale import LossScaleOptimizer

# Library -> its Keras, its SGD, and the methods that its `apply_gradients` passes (gradient, variable) pairs to.
LIBRARIES = {
    "keras3": (tf.keras, tf.keras.optimizers.SGD, ("apply_gradients", "_all_reduce_sum_gradients")),
    "tf_keras": (tf_keras, tf_keras.optimizers.SGD, ("apply_gradients", "aggregate_gradients")),
    "legacy": (
        tf_keras,
        tf_keras.optimizers.legacy.SGD,
        ("apply_gradients", "_aggregate_gradients", "_transform_unaggregated_gradients"),
    ),
    "tf1": (None, tf.compat.v1.train.GradientDescentOptimizer, ("apply_gradients",)),
}


PLACES = ("subclass", "mixin before", "mixin after", "instance")


def clipped(pairs, *args, **kwargs):
    """Clip each gradient to a norm of 1. The gradient of this test is 2, and 16 if it is not unscaled."""
    return [(tf.clip_by_norm(gradient, 1.0), variable) for gradient, variable in pairs]


def clipping(create, cls, method, place, *args, **options):
    """Create an optimizer whose method clips the gradients, and then does what it did before."""

    def clip(self, pairs, *args, **kwargs):
        return getattr(super(own, self), method)(clipped(pairs), *args, **kwargs)

    if place == "instance":
        optimizer = create(cls, *args, **options)
        original = getattr(optimizer, method)
        clip = types.MethodType(lambda self, pairs, *a, **k: original(clipped(pairs), *a, **k), optimizer)
        setattr(optimizer, method, clip)
        return optimizer
    if place == "subclass":
        own = type("Own", (cls,), {method: clip})
        return create(own, *args, **options)
    own = type("Clip", (), {method: clip})
    bases = (own, cls) if place == "mixin before" else (cls, own)
    return create(type("Own", bases, {}), *args, **options)


def trained(keras, optimizer, loop):
    """Train a weight of 1 for one step, whose gradient is 2, at a learning rate of 0.25."""
    if loop == "fit":
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")])
        model.compile(optimizer, "mse")
        model.fit(np.ones((1, 1)), np.zeros((1, 1)))
        return model.get_weights()[0].item()
    weight = tf.Variable(1.0)
    with tf.GradientTape() as tape:
        loss = weight * weight
        if isinstance(optimizer, LossScaleOptimizer):
            loss = optimizer.get_scaled_loss(loss)
    gradients = tape.gradient(loss, [weight])
    if isinstance(optimizer, LossScaleOptimizer):
        gradients = optimizer.get_unscaled_gradients(gradients)
    optimizer.apply_gradients(zip(gradients, [weight]))
    return float(weight)


def create(cls, *args, **options):
    return cls(*args, **options)


WAYS = [(library, loop) for library in LIBRARIES for loop in ("own", "fit") if (library, loop) != ("tf1", "fit")]


@pytest.mark.parametrize(
    ("place", "library", "loop"),
    combinations(PLACES, WAYS, usual=["mixin before-keras3-fit", "instance-keras3-fit", "subclass-tf1-own"]),
)
def test_apply_gradients_of_the_wrapper(library, loop, place):
    keras, inner, _ = LIBRARIES[library]
    cls = type(LossScaleOptimizer(inner(0.25)))
    optimizer = clipping(create, cls, "apply_gradients", place, inner(0.25), initial_scale=8)
    assert trained(keras, optimizer, loop) == (0.5 if place == "mixin after" else 0.75)


@pytest.mark.parametrize(
    ("place", "library", "loop", "method"),
    combinations(
        [*PLACES, "instance, later"],
        [(library, loop, method) for library, loop in WAYS for method in LIBRARIES[library][2]],
        usual=["instance-legacy-own-_aggregate_gradients", "instance, later-tf_keras-fit-apply_gradients"],
    ),
)
def test_methods_of_the_inner_optimizer(library, loop, method, place):
    keras, inner, _ = LIBRARIES[library]
    bare = trained(keras, clipping(create, inner, method, place.removesuffix(", later"), 0.25), loop)
    if place == "instance, later":
        optimizer = LossScaleOptimizer(inner(0.25), initial_scale=8)
        clipping(lambda cls: optimizer.inner_optimizer, inner, method, "instance")
    else:
        optimizer = LossScaleOptimizer(clipping(create, inner, method, place, 0.25), initial_scale=8)
    assert trained(keras, optimizer, loop) == bare
