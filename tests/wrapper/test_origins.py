"""Whoever scales a loss and whatever follows, an update applies the right gradient, or raises and changes nothing."""

import pytest
import tensorflow as tf

from tests.cases import combinations, slow_one_in
from tf_lossscale import LossScaleOptimizer, SharedLossScale


class Program:
    """A weight whose right gradient is 1, and optimizers with a learning rate of 1 whose scales grow in every step."""

    def __init__(self, who):
        self.weight, self.second, self.other = (tf.Variable(0.0) for _ in range(3))
        rules = {"initial_scale": 1024.0, "dynamic_growth_steps": 1}
        self.shared = SharedLossScale(**rules) if who == "shared" else None
        options = {"loss_scale": self.shared} if self.shared else rules
        self.optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(1.0), **options)
        self.optimizer.build([self.weight, self.second, self.other])
        self.scales = self.optimizer
        if who != "own":  # with another scale, so that a gradient that is divided by the wrong one shows
            options = options if self.shared else {**rules, "initial_scale": 64.0}
            self.scales = LossScaleOptimizer(tf.keras.optimizers.SGD(1.0), **options)
            self.scales.build([self.weight])
        self.third = LossScaleOptimizer(tf.keras.optimizers.SGD(1.0), initial_scale=8.0)
        self.third.build([self.other])
        self.logged = tf.Variable(0.0)

    def gradients(self, x):
        """The gradients of the weight and of the second weight, of one scaled loss."""
        with tf.GradientTape() as tape:
            loss = self.scales.scale_loss(self.weight * x + self.second * x)
        return tape.gradient(loss, [self.weight, self.second])

    def update(self, gradient, weight, method):
        optimizer = self.optimizer
        if self.shared:
            if method == "apply":
                pytest.skip("optimizers with a shared scale step with its apply_gradients()")
            self.shared.apply_gradients([(optimizer, [(gradient, weight)])])
        elif method == "apply":
            optimizer.apply([gradient], [weight])
        else:
            optimizer.apply_gradients([(gradient, weight)])


def minimize(program, gradients, x, method):
    if program.shared:
        pairs = program.optimizer.compute_gradients(lambda: program.other * x, [program.other])
        program.shared.apply_gradients([(program.optimizer, pairs)])
    else:
        program.optimizer.minimize(lambda: program.other * x, [program.other])


def helper(program, gradients, x, method):
    @tf.function
    def saliency(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = program.optimizer.get_scaled_loss(program.other * x)
        return program.optimizer.get_unscaled_gradients([tape.gradient(loss, x)])

    saliency(x)


def elsewhere(program, gradients, x, method):
    program.third.minimize(lambda: program.other * x, [program.other])


FOLLOWS = {
    "nothing": lambda program, gradients, x, method: None,
    "minimize": minimize,
    "another's minimize": elsewhere,
    "norm": lambda program, gradients, x, method: tf.linalg.global_norm(
        program.optimizer.get_unscaled_gradients(gradients[:1])
    ),
    "helper": helper,
    "log": lambda program, gradients, x, method: program.logged.assign(program.optimizer.loss_scale),
    "update": lambda program, gradients, x, method: program.update(gradients[1], program.second, method),
}
PASSED = {
    "as it is": lambda program, x: program.gradients(x),
    "transformed": lambda program, x: program.gradients(x),
    "from a function": lambda program, x: tf.function(program.gradients)(x),
    "from a branch": lambda program, x: tf.cond(x > 0, lambda: program.gradients(x), lambda: [tf.zeros([])] * 2),
}


def looped(step):
    def loop(x):
        for _ in tf.range(1):
            step(x)

    return tf.function(loop)


def in_a_branch(step):
    def true(x):
        step(x)
        return tf.constant(0)

    return tf.function(lambda x: tf.cond(x > 0, lambda: true(x), lambda: tf.constant(0)))


MODES = {
    "eager": lambda step: step,
    "function": tf.function,
    "compiled": lambda step: tf.function(step, jit_compile=True),
    "loop": looped,
    "branch": in_a_branch,
    "function in a function": lambda step: tf.function(lambda x: tf.function(step)(x)),
}


def moved(who, follows, passed, mode, method):
    """Returns by how much a step moves the weight, or the error."""
    program = Program(who)

    def step(x):
        gradients = PASSED[passed](program, x)
        FOLLOWS[follows](program, gradients, x, method)
        gradient = gradients[0]
        program.update(
            tf.add_n([gradient, gradient]) / 2.0 if passed == "transformed" else gradient, program.weight, method
        )

    for taken in range(1, 3):
        try:
            MODES[mode](step)(tf.constant(1.0))
        except RuntimeError as error:
            return error if program.weight.numpy() == 1.0 - taken else program.weight.numpy()
        if program.weight.numpy() != -taken:
            return program.weight.numpy()
    return None


@pytest.mark.parametrize(
    ("who", "mode", "method", "passed"),
    combinations(
        ["own", "another", "shared"],
        MODES,
        ["apply_gradients", "apply"],
        PASSED,
        usual=[
            "own-eager-apply_gradients-as it is",
            "another-eager-apply_gradients-transformed",
            "another-function-apply_gradients-as it is",
        ],
        others=slow_one_in(8),
    ),
)
def test_an_update_is_right_or_raises_and_then_changes_nothing(who, mode, method, passed):
    wrong, refused = {}, set()
    for follows in FOLLOWS:
        result = moved(who, follows, passed, mode, method)
        if isinstance(result, RuntimeError):
            refused.add(follows)
        elif result is not None:
            wrong[follows] = result
    assert not wrong
    if who == "another":
        # Two gradients are known: that of a minimize() in between is no gradient of the other optimizer.
        assert len(refused) == len(FOLLOWS)
    elif mode != "eager":
        assert not refused
