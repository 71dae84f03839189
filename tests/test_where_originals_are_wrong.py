"""What the originals get wrong: each promise holds here, and is seen to fail on the original that breaks it.

A promise is a function of `wrap`, which makes a wrapper of an inner optimizer, and of the family. It asserts. The
originals are those of Keras 3 and tf_keras, as they are installed; a promise that one of them keeps one day shows up
here as a failure, and its row goes.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests import numerics
from tests.families import FAMILIES, families
from tf_lossscale import LossScaleOptimizer

KERAS3, TF_KERAS, LEGACY = FAMILIES
ORIGINALS = {
    "keras3": keras.optimizers.LossScaleOptimizer,
    "tf_keras": tf_keras.mixed_precision.LossScaleOptimizer,
    "tf_keras_legacy": tf_keras.mixed_precision.LossScaleOptimizer,
}


def keras_step(optimizer, weight, gradient):
    """A step by Keras 3's contract, which Keras's own wrapper and ours have."""
    with tf.GradientTape() as tape:
        loss = optimizer.scale_loss(tf.reduce_sum(weight * gradient))
    optimizer.apply([tape.gradient(loss, weight)], [weight])


def arguments_that_ruin_training_are_refused(wrap, family, **arguments):
    with pytest.raises((TypeError, ValueError)):
        wrap(family.sgd(), **arguments)


def a_scale_of_no_number_is_refused(wrap, family):
    with pytest.raises((TypeError, ValueError)):
        wrap(family.sgd(), initial_scale="dynamic")


def nested_wrapping_is_refused(wrap, family):
    with pytest.raises((TypeError, ValueError)):
        wrap(wrap(family.sgd()))


def a_failed_construction_leaves_the_inner_optimizer_free(wrap, family):
    inner = family.sgd()
    with pytest.raises((TypeError, ValueError)):
        wrap(inner, initial_scale=-1.0, dynamic_growth_steps="no number", dynamic=True)
    wrap(inner)


def code_that_asks_for_get_scaled_loss_moves_as_without_a_wrapper(wrap, family, name="SGD"):
    moved = []
    for make in (lambda inner: inner, wrap):
        optimizer, weight = make(getattr(family.optimizers, name)(0.001)), tf.Variable([1.0])
        for _ in range(5):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weight**2) * 0.1
                scaled = optimizer.get_scaled_loss(loss) if hasattr(optimizer, "get_scaled_loss") else loss
            gradients = tape.gradient(scaled, [weight])
            if hasattr(optimizer, "get_unscaled_gradients"):
                gradients = optimizer.get_unscaled_gradients(gradients)
            optimizer.apply_gradients(zip(gradients, [weight]))
        moved.append(1.0 - weight.numpy().item())
    numerics.assert_close(moved[1], moved[0], 1e-6, [1.0])


def decayed_lr_answers_under_a_schedule(wrap, family):
    schedule = family.keras.optimizers.schedules.ExponentialDecay(0.5, 10, 0.5)
    assert float(wrap(family.optimizers.SGD(schedule))._decayed_lr("float32")) == 0.5


def a_gradient_that_overflows_when_it_is_unscaled_is_not_applied(wrap, family):
    optimizer, weight = wrap(family.sgd(), initial_scale=1e-30), tf.Variable([1.0])
    optimizer.scale_loss(tf.constant(0.0))
    optimizer.apply([tf.constant([1e30])], [weight])
    assert weight.numpy() == 1.0


def an_inner_optimizer_that_makes_its_slots_on_the_first_step_survives_a_skipped_one(wrap, family):
    class Slow(family.optimizers.SGD):
        """Keeps slow weights, made on its first step as the weights are then."""

        def build(self, variables):
            super().build(variables)
            self.slow = [tf.Variable(v) for v in variables]

        def apply(self, grads, trainable_variables=None):
            assert self.built
            super().apply(grads, trainable_variables)
            for slow, variable in zip(self.slow, trainable_variables):
                slow.assign(slow + 0.5 * (variable - slow))
                variable.assign(slow)

    inner, weight = Slow(0.5), tf.Variable([8.0])
    optimizer = wrap(inner)
    for _ in range(7):
        keras_step(optimizer, weight, tf.constant([np.inf]))
    np.testing.assert_array_equal(inner.slow[0], [8.0])
    keras_step(optimizer, weight, tf.constant([2.0]))
    np.testing.assert_array_equal(weight, [7.5])


def with_arguments(promise, **arguments):
    return functools.partial(promise, **arguments)


# (promise, the originals that break it)
ROWS = [
    *[
        (with_arguments(arguments_that_ruin_training_are_refused, initial_scale=scale), list(ORIGINALS))
        for scale in (-4.0, float("nan"))
    ],
    *[
        (with_arguments(arguments_that_ruin_training_are_refused, dynamic_growth_steps=steps), list(ORIGINALS))
        for steps in (0, 2.5)
    ],
    (a_scale_of_no_number_is_refused, ["keras3"]),
    (nested_wrapping_is_refused, ["keras3"]),
    (a_failed_construction_leaves_the_inner_optimizer_free, ["tf_keras", "tf_keras_legacy"]),
    (code_that_asks_for_get_scaled_loss_moves_as_without_a_wrapper, ["keras3"]),
    (with_arguments(code_that_asks_for_get_scaled_loss_moves_as_without_a_wrapper, name="Adam"), ["keras3"]),
    (with_arguments(code_that_asks_for_get_scaled_loss_moves_as_without_a_wrapper, name="RMSprop"), ["keras3"]),
    (decayed_lr_answers_under_a_schedule, ["keras3", "tf_keras", "tf_keras_legacy"]),
    (a_gradient_that_overflows_when_it_is_unscaled_is_not_applied, ["keras3"]),
]


def name_of(promise):
    function = getattr(promise, "func", promise)
    arguments = ", ".join(f"{k}={v}" for k, v in getattr(promise, "keywords", {}).items())
    return function.__name__ + (f"({arguments})" if arguments else "")


NAMES = [name_of(promise) for promise, _ in ROWS]
BROKEN = [
    pytest.param(promise, family, id=f"{name}-{family.name}")
    for name, (promise, originals) in zip(NAMES, ROWS)
    for family in FAMILIES
    if family.name in originals
]


@pytest.mark.parametrize("promise", [promise for promise, _ in ROWS], ids=NAMES)
@families
def test_the_promise_is_kept_here(promise, family):
    promise(LossScaleOptimizer, family)


@pytest.mark.parametrize(("promise", "family"), BROKEN)
def test_the_promise_is_broken_by_the_original(promise, family):
    def kept():
        try:
            promise(ORIGINALS[family.name], family)
        except (Exception, pytest.fail.Exception):
            return False
        return True

    assert not kept(), "the original keeps this promise now: take its name out of the row"


@families
def test_a_step_in_keras_3s_contract_without_scale_loss_warns_once(family, monkeypatch):
    seen = []
    monkeypatch.setattr("absl.logging.warning", lambda message, *values: seen.append(message % values))
    optimizer, weight = LossScaleOptimizer(family.sgd()), tf.Variable([1.0])
    for _ in range(3):
        optimizer.apply([tf.constant([1.0])], [weight])
    assert len(seen) == 1
    assert "scale_loss() was never called: training will stall" in seen[0]


# Today's originals make the slots in time as well; those of TensorFlow 2.3 did not.
def test_slow_weights_are_made_before_a_skipped_first_step():
    an_inner_optimizer_that_makes_its_slots_on_the_first_step_survives_a_skipped_one(LossScaleOptimizer, KERAS3)
