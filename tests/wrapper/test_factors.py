"""A gradient is divided by what multiplied its loss, wherever the loss was scaled and however many updates follow."""

import concurrent.futures
import gc

import numpy as np
import pytest
import tensorflow as tf

from tests.cases import combinations, slow_one_in
from tf_lossscale import DynamicLossScale, LossScaleOptimizer, SharedLossScale

BY = ("get_scaled_loss", "scale_loss", "scaler.scale", "by hand", "another optimizer")


class Training:
    """Two weights, each with an optimizer. The scale moves after every step, so a wrong factor shows in a weight."""

    def __init__(self, shared):
        rules = {"initial_scale": 8.0, "dynamic_growth_steps": 1}
        self.shared = SharedLossScale(**rules) if shared else None
        self.weights = [tf.Variable(100.0), tf.Variable(100.0)]
        options = {"loss_scale": self.shared} if shared else rules
        first = LossScaleOptimizer(tf.keras.optimizers.SGD(1.0), **options)
        second = LossScaleOptimizer(tf.keras.optimizers.SGD(1.0), **options) if shared else first
        self.optimizers = [first, second]
        for optimizer in dict.fromkeys(self.optimizers, None):
            optimizer.build(self.weights)

    def scaled(self, loss, by):
        first, second = self.optimizers
        if by == "by hand":
            return loss * first.loss_scale
        if by == "scaler.scale":
            return first.scaler.scale(loss)
        return (second.get_scaled_loss if by == "another optimizer" else getattr(first, by))(loss)

    def gradients(self, x, by):
        """The scaled gradients of both weights, which are x."""
        with tf.GradientTape() as tape:
            loss = self.scaled(self.weights[0] * x + self.weights[1] * x, by)
        return tf.stack(tape.gradient(loss, self.weights))

    def update(self, gradients, one_by_one):
        """Update each weight; or both in one step, if the optimizers share their scale."""
        pairs = list(zip(self.optimizers, tf.unstack(gradients), self.weights))
        if one_by_one and not self.shared:
            for optimizer, gradient, weight in pairs:
                optimizer.apply_gradients([(optimizer.get_unscaled_gradients([gradient])[0], weight)])
            return
        steps = [(o, [(o.get_unscaled_gradients([gradient])[0], weight)]) for o, gradient, weight in pairs]
        if self.shared:
            self.shared.apply_gradients(steps)
        else:
            self.optimizers[0].apply_gradients([pair for _, both in steps for pair in both])

    def values(self):
        return [float(weight) for weight in self.weights]


def in_thread(function):
    def call(x):
        with concurrent.futures.ThreadPoolExecutor(1) as executor:
            return executor.submit(function, x).result()

    return call


def looped(function):
    def loop(x):
        total = tf.zeros(2)
        for _ in tf.range(2):
            total += 0.5 * function(x)
        return total

    return loop


# Where the gradients are computed -> a function of the function that computes them.
PLACES = {
    "eager": lambda f: f,
    "function": tf.function,
    "compiled": lambda f: tf.function(f, jit_compile=True),
    "vectorized_map": lambda f: lambda x: tf.reduce_sum(tf.vectorized_map(f, tf.stack([x / 2, x / 2])), 0),
    "function that is gone": lambda f: lambda x: tf.function(f)(x),
    "thread": in_thread,
    "branch": lambda f: tf.function(lambda x: tf.cond(x > 0, lambda: f(x), lambda: tf.zeros(2))),
    "loop": lambda f: tf.function(looped(f)),
}
# A call of a traced function runs no Python: its caller cannot tell the gradients of the last call from the gradients
# of the call before. They have to be unscaled before the next step.
KNOWN = ("eager", "thread")


@pytest.mark.parametrize(
    ("by", "place", "updates"),
    combinations(BY, PLACES, ["one", "two", "shared"], usual=15, others=slow_one_in(6)),
)
def test_gradients_that_are_unscaled_in_eager_mode(by, place, updates):
    training = Training(updates == "shared")
    training.update(training.gradients(tf.constant(float("inf")), "get_scaled_loss"), False)  # remembers a factor
    compute = PLACES[place](lambda x: training.gradients(x, by))
    total = np.float64(0)
    for x in (1.0, 2.0, 1.0, 4.0):
        gradients = compute(tf.constant(x))
        if place == "function that is gone":
            gc.collect()
        training.update(gradients, updates == "two" and place in KNOWN and by != "by hand")
        total += x
    assert training.values() == [100.0 - total] * 2


@pytest.mark.parametrize(
    ("by", "place", "updates"),
    combinations(
        BY,
        [place for place in PLACES if place not in ("thread", "compiled")],
        ["one", "two", "shared"],
        usual=15,
        others=slow_one_in(6),
    ),
)
def test_gradients_that_are_unscaled_in_a_function(by, place, updates):
    training = Training(updates == "shared")
    where = PLACES["eager" if place == "function that is gone" else place]

    @tf.function
    def train(x):
        training.update(training.gradients(x, "get_scaled_loss"), False)
        early = training.gradients(x, by) if place == "eager" and by not in ("by hand", "scale_loss") else None
        training.update(
            where(lambda x: training.gradients(x, by))(x), updates == "two" and place == "eager" and by != "by hand"
        )
        if early is not None:
            training.update(early, False)  # after another step has moved the scale

    steps = 3 if place == "eager" and by not in ("by hand", "scale_loss") else 2
    train(tf.constant(1.0)), train(tf.constant(2.0))
    assert training.values() == [100.0 - 3.0 * steps] * 2


def test_a_loss_scale_without_an_optimizer_divides_by_the_factor_of_the_loss_as_well():
    scale, weights = DynamicLossScale(8.0, dynamic_growth_steps=1), [tf.Variable(100.0), tf.Variable(100.0)]

    def step():
        with tf.GradientTape() as tape:
            loss = scale.scale(weights[0] + weights[1])
        for gradient, weight in zip(tape.gradient(loss, weights), weights):
            scale.step(scale.unscale([gradient]), lambda gradients, weight=weight: weight.assign_sub(gradients[0]))

    step(), tf.function(step)()
    assert [float(weight) for weight in weights] == [98.0, 98.0]
