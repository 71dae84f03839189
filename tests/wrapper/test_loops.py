"""A table of ordinary training loops: each one moves the weights as the bare optimizer does, and none raises."""

import threading

import pytest
import tensorflow as tf

from tests.families import ALL_FAMILIES
from tf_lossscale import LossScaleOptimizer

RATE, STEPS, SHARES = 0.5, 3, [[0.25, 0.5], [0.25]]
WAYS = {"eager": lambda step: step, "function": tf.function}


class Loop:
    """One optimizer and two weights. Each method takes a step; its loss has the gradients (1, 2) in every step."""

    def __init__(self, family, run):
        self.run = run
        self.weights = [tf.Variable(4.0), tf.Variable(4.0)]
        settings = {"initial_scale": 64.0, "dynamic_growth_steps": 2}
        self.optimizer, self.other = (LossScaleOptimizer(family.sgd(), **settings) for _ in range(2))
        self.optimizer.build(self.weights)
        self.totals = [tf.Variable(0.0), tf.Variable(0.0)]
        self.functions, self.taken = {}, 0

    def function(self, name, method):
        return self.functions.setdefault(name, self.run(method))

    def take(self, name):
        if name in ONE_FUNCTION:
            self.function(name, lambda: ONE_FUNCTION[name](self))()
        else:
            getattr(self, name)()
        self.taken += 1

    def loss(self, share=1.0):
        return share * (self.weights[0] + 2.0 * self.weights[1])

    def scaled_gradients(self, method, share=1.0):
        with tf.GradientTape() as tape:
            loss = getattr(self.optimizer, method)(self.loss(share))
        return tape.gradient(loss, self.weights)

    def unscaled(self, share=1.0):
        return self.optimizer.get_unscaled_gradients(self.scaled_gradients("get_scaled_loss", share))

    def update(self, gradients):
        self.optimizer.apply_gradients(zip(gradients, self.weights))

    def accumulated(self, gradients):
        return [sum(parts) for parts in zip(*(gradients() for _ in range(2)))]

    # The loops of several functions. ----------------------------------------------------------------------------

    def micro_step_and_update_in_two_functions(self):
        def micro_step():
            for total, gradient in zip(self.totals, self.unscaled(0.5)):
                total.assign_add(gradient)

        def update():
            self.update([total.read_value() for total in self.totals])
            for total in self.totals:
                total.assign(0.0)

        for _ in range(2):
            self.function("micro_step", micro_step)()
        self.function("update", update)()

    def scaled_gradients_and_update_in_two_functions(self):
        gradients = self.function("gradients", lambda: self.scaled_gradients("scale_loss"))()
        self.function("update", lambda *given: self.optimizer.apply(given, self.weights))(*gradients)

    def scaled_gradients_in_a_function_and_update_outside(self):
        self.update(self.function("gradients", lambda: self.scaled_gradients("scale_loss"))())

    def nested_functions(self):
        inner = self.function("inner", self.unscaled)
        self.function("step", lambda: self.update(inner()))()

    def gradients_in_a_thread(self):
        found = []
        thread = threading.Thread(target=lambda: found.extend(self.function("gradients", self.unscaled)()))
        thread.start(), thread.join()
        self.function("update", lambda *given: self.update(given))(*found)

    def both_ways_in_turn(self):
        name = "keras_3_apply" if self.taken % 2 else "tensorflow_2"
        self.function(name, lambda: ONE_FUNCTION[name](self))()

    def a_function_that_unscales_and_a_keras_3_step_in_turn(self):
        if self.taken % 2:
            self.update(self.scaled_gradients("scale_loss"))
        else:
            update = self.function("update", lambda *scaled: self.update(self.optimizer.get_unscaled_gradients(scaled)))
            update(*self.scaled_gradients("get_scaled_loss"))

    def scale_inside_and_a_keras_3_step_in_turn(self):
        inside(self) if self.taken % 2 else self.update(self.scaled_gradients("scale_loss"))

    def a_function_that_unscales_in_a_new_function_of_each_step(self):
        unscale = self.function("unscale", lambda *scaled: self.optimizer.get_unscaled_gradients(scaled))
        unscaled = self.run(lambda: unscale(*self.scaled_gradients("get_scaled_loss")))()
        self.function("update", lambda *given: self.update(given))(*unscaled)


def look_at_the_norm(loop):
    gradients = loop.scaled_gradients("scale_loss")
    tf.linalg.global_norm(loop.optimizer.get_unscaled_gradients(gradients))
    loop.optimizer.apply(gradients, loop.weights)


def two_optimizers(loop):
    with tf.GradientTape(persistent=True) as tape:
        losses = [loop.optimizer.get_scaled_loss(loop.loss()), loop.other.scale_loss(loop.loss())]
    first = tape.gradient(losses[0], loop.weights[:1])
    second = tape.gradient(losses[1], loop.weights[1:])
    loop.optimizer.apply_gradients(zip(loop.optimizer.get_unscaled_gradients(first), loop.weights[:1]))
    loop.other.apply(second, loop.weights[1:])


def one_loss_and_two_updates(loop):
    with tf.GradientTape(persistent=True) as tape:
        loss = loop.optimizer.get_scaled_loss(loop.loss())
    for weight in loop.weights:
        gradients = loop.optimizer.get_unscaled_gradients(tape.gradient(loss, [weight]))
        loop.optimizer.apply_gradients(zip(gradients, [weight]))


def one_loss_and_two_updates_in_keras_3(loop):
    with tf.GradientTape(persistent=True) as tape:
        loss = loop.optimizer.scale_loss(loop.loss())
    for weight in loop.weights:
        loop.optimizer.apply(tape.gradient(loss, [weight]), [weight])


def unscaled_gradients_in_two_updates(loop):
    for gradient, weight in zip(loop.unscaled(), loop.weights):
        loop.optimizer.apply_gradients([(1.0 * gradient, weight)])


def inside(loop):
    with tf.GradientTape() as tape:
        loss = loop.optimizer.scale_inside(loop.loss)()
    loop.update(tape.gradient(loss, loop.weights))


# The loops that take two updates in a step.
TWO_UPDATES = (one_loss_and_two_updates, one_loss_and_two_updates_in_keras_3, unscaled_gradients_in_two_updates)
# The loops whose step is one function.
ONE_FUNCTION = {
    "tensorflow_2": lambda loop: loop.update(loop.unscaled()),
    "tensorflow_2_with_clipping": lambda loop: loop.update(tf.clip_by_global_norm(loop.unscaled(), 100.0)[0]),
    "keras_3_apply": lambda loop: loop.optimizer.apply(loop.scaled_gradients("scale_loss"), loop.weights),
    "keras_3_apply_gradients": lambda loop: loop.update(loop.scaled_gradients("scale_loss")),
    "a_ragged_loss": lambda loop: loop.update(loop.unscaled(tf.ragged.constant(SHARES))),
    "a_ragged_loss_in_keras_3": lambda loop: loop.update(
        loop.scaled_gradients("scale_loss", tf.ragged.constant(SHARES))
    ),
    "minimize": lambda loop: loop.optimizer.minimize(loop.loss, var_list=loop.weights),
    "accumulate_unscaled": lambda loop: loop.update(loop.accumulated(lambda: loop.unscaled(0.5))),
    "accumulate_scaled": lambda loop: loop.update(
        loop.optimizer.get_unscaled_gradients(loop.accumulated(lambda: loop.scaled_gradients("get_scaled_loss", 0.5)))
    ),
    "accumulate_in_keras_3": lambda loop: loop.optimizer.apply(
        loop.accumulated(lambda: loop.scaled_gradients("scale_loss", 0.5)), loop.weights
    ),
    **{each.__name__: each for each in (look_at_the_norm, two_optimizers, inside, *TWO_UPDATES)},
}
SEVERAL = [name for name, value in vars(Loop).items() if callable(value) and not name.startswith("_")]
LOOPS = [*ONE_FUNCTION, *SEVERAL[SEVERAL.index("micro_step_and_update_in_two_functions") :]]

# `make test` runs each loop with two of the families, the next pair in turn, in one of the two ways.
CELLS = [
    pytest.param(
        *(family, way, name),
        id=f"{name}-{way}-{family.name}",
        marks=() if (j - i) % 5 < 2 and (i + j + k) % 2 else pytest.mark.slow,
    )
    for i, name in enumerate(LOOPS)
    for j, family in enumerate(ALL_FAMILIES)
    for k, way in enumerate(WAYS)
]


@pytest.mark.parametrize(("family", "way", "name"), CELLS)
def test_a_loop_moves_the_weights_as_the_bare_optimizer_does_and_warns_of_nothing(family, way, name, caplog):
    if (family.name, name) == ("sonnet", "one_loss_and_two_updates_in_keras_3"):
        pytest.skip("Sonnet's apply takes gradients of both kinds, and those of the second update may be of either")
    loop = Loop(family, WAYS[way])
    for _ in range(STEPS):
        loop.take(name)
    assert [weight.numpy() for weight in loop.weights] == [4.0 - STEPS * RATE, 4.0 - 2 * STEPS * RATE]
    updates = 2 * STEPS if name in [each.__name__ for each in TWO_UPDATES] else STEPS
    assert float(loop.optimizer.loss_scale) == 64.0 * 2 ** (updates // 2)
    assert not [record for record in caplog.records if "LossScaleOptimizer" in record.getMessage()]
