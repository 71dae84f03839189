"""A loss scale without an optimizer says so if a loss or its gradients are scaled or unscaled in the wrong place."""

import pytest
import tensorflow as tf

from tests.cases import MODES, named
from tf_lossscale import DynamicLossScale, FixedLossScale


class Loop:
    """A weight of 1, whose gradient is 2, and two loss scales. A right step with the rate 0.5 makes it 0."""

    def __init__(self):
        self.weight, self.total = tf.Variable(1.0), tf.Variable(0.0, trainable=False)
        self.scale, self.other = DynamicLossScale(8.0), DynamicLossScale(16.0)

    def gradient(self, scaled):
        with tf.GradientTape() as tape:
            loss = scaled(2.0 * self.weight)
        return tape.gradient(loss, self.weight)

    def unscaled(self):
        return self.scale.unscale([self.gradient(self.scale.scale)])[0]

    def step(self, gradient):
        self.scale.step([gradient], lambda gradients: self.weight.assign_sub(0.5 * gradients[0]))

    def divide_by_a_scale_that_was_read_before(self):
        scale = self.scale()
        self.step(self.gradient(self.scale.scale) / scale)

    def add_up_in_a_variable(self):
        for _ in range(2):
            self.total.assign_add(0.5 * self.unscaled())
        self.step(1.0 * self.total)

    def add_up_scaled_gradients(self):
        total = sum(0.5 * self.gradient(self.scale.scale) for _ in range(2))
        self.step(self.scale.unscale([total])[0])

    def scale_the_next_loss_before_the_step(self):
        unscaled = self.unscaled()
        self.gradient(self.scale.scale)
        self.step(1.0 * unscaled)

    def scale_another_loss_with_another_scale(self):
        of_other = self.other.unscale([self.gradient(self.other.scale)])
        self.step(self.unscaled())
        self.other.step(of_other, lambda gradients: None)


def clipped(gradient):
    return tf.clip_by_value(gradient, -100.0, 100.0)


RIGHT = {
    "unscale": lambda loop: loop.step(loop.unscaled()),
    "clip the unscaled": lambda loop: loop.step(clipped(loop.unscaled())),
    "divide by hand": Loop.divide_by_a_scale_that_was_read_before,
    "multiply by hand": lambda loop: loop.step(
        loop.scale.unscale([loop.gradient(lambda loss: loss * loop.scale())])[0]
    ),
    "leave the loss as it is": lambda loop: loop.step(loop.gradient(lambda loss: loss)),
    "add up in a variable": Loop.add_up_in_a_variable,
    "add up scaled gradients": Loop.add_up_scaled_gradients,
    "scale the next loss before the step": Loop.scale_the_next_loss_before_the_step,
    "scale another loss with another scale": Loop.scale_another_loss_with_another_scale,
}


@pytest.mark.parametrize("compiled", MODES)
@pytest.mark.parametrize("take", named(RIGHT))
def test_a_right_step_is_taken_without_a_word(take, compiled, warnings):
    loop = Loop()
    (tf.function(take) if compiled else take)(loop)
    assert loop.weight.numpy() == 0.0 and not warnings


WRONG = {
    "scale twice": (
        lambda loop: loop.gradient(lambda loss: loop.scale.scale(loop.scale.scale(loss))),
        "scaled already",
    ),
    "unscale twice": (lambda loop: loop.scale.unscale([loop.unscaled()]), "already unscaled"),
    "unscale with another scale": (
        lambda loop: loop.scale.unscale([loop.gradient(loop.other.scale)]),
        "another loss scale multiplied",
    ),
}


@pytest.mark.parametrize("compiled", MODES)
@pytest.mark.parametrize(("take", "words"), [pytest.param(*case, id=name) for name, case in WRONG.items()])
def test_a_wrong_call_is_refused(take, words, compiled):
    with pytest.raises(RuntimeError, match=words):
        (tf.function(take) if compiled else take)(Loop())


@pytest.mark.parametrize("compiled", MODES)
def test_scaled_gradients_are_applied_as_they_are_and_warned_of(compiled, warnings):
    def take(loop):
        loop.step(loop.gradient(loop.scale.scale))

    loop = Loop()
    (tf.function(take) if compiled else take)(loop)
    (warning,) = warnings
    assert "a loss scale still multiplies these gradients" in warning
    assert loop.weight.numpy() == 1.0 - 0.5 * 8.0 * 2.0


def test_each_mistake_with_each_loss_scale_is_warned_of_once(warnings):
    def clip_and_unscale(loop):
        loop.step(loop.scale.unscale([clipped(loop.gradient(loop.scale.scale))])[0])

    def leave_scaled(loop):
        loop.step(loop.gradient(loop.scale.scale))

    for _ in range(2):
        loop = Loop()
        for take in (clip_and_unscale, leave_scaled, clip_and_unscale, leave_scaled):
            tf.function(take)(loop)
    clipping, leaving = "while the loss scale multiplied it", "still multiplies these gradients"
    assert [clipping in text for text in warnings] == [True, False] * 2
    assert [leaving in text for text in warnings] == [False, True] * 2


@pytest.mark.parametrize("compiled", MODES)
def test_at_a_scale_of_one_scaled_gradients_are_unscaled_ones(compiled, warnings):
    loop, scale = Loop(), FixedLossScale(1.0)

    def take():
        gradient = loop.gradient(scale.scale)
        scale.step([gradient], lambda gradients: loop.weight.assign_sub(0.25 * gradients[0]))
        scale.step([clipped(gradient)], lambda gradients: loop.weight.assign_sub(0.25 * gradients[0]))

    (tf.function(take) if compiled else take)()
    assert loop.weight.numpy() == 0.0 and not warnings
