"""A table of ordinary training loops: each one moves the weights as the bare optimizer does, and none raises."""

import threading

import pytest
import tensorflow as tf

from tests import strategies
from tests.families import ALL_FAMILIES, families
from tf_lossscale import LossScaleOptimizer

RATE, STEPS = 0.5, 3
WAYS = {"eager": lambda step: step, "function": tf.function}
WIDE = pytest.mark.wide("takes the same loop with another family")


class Loop:
    """One optimizer and two weights. Each method takes a step; its loss has the gradients (1, 2) in every step."""

    def __init__(self, family, run):
        self.run = run
        self.weights = [tf.Variable(4.0), tf.Variable(4.0)]
        self.make = lambda: LossScaleOptimizer(family.sgd(), initial_scale=64.0, dynamic_growth_steps=2)
        self.optimizer, self.other = self.make(), self.make()
        self.optimizer.build(self.weights)
        self.totals = [tf.Variable(0.0), tf.Variable(0.0)]
        self.functions = {}

    def function(self, name, method):
        return self.functions.setdefault(name, self.run(method))

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

    # The loops. -------------------------------------------------------------------------------------------------

    def tensorflow_2(self):
        self.function("step", lambda: self.update(self.unscaled()))()

    def tensorflow_2_with_clipping(self):
        self.function("step", lambda: self.update(tf.clip_by_global_norm(self.unscaled(), 100.0)[0]))()

    def keras_3_apply(self):
        self.function("step", lambda: self.optimizer.apply(self.scaled_gradients("scale_loss"), self.weights))()

    def keras_3_apply_gradients(self):
        self.function("step", lambda: self.update(self.scaled_gradients("scale_loss")))()

    def minimize(self):
        self.function("step", lambda: self.optimizer.minimize(self.loss, var_list=self.weights))()

    def look_at_the_norm(self):
        def step():
            gradients = self.scaled_gradients("scale_loss")
            tf.linalg.global_norm(self.optimizer.get_unscaled_gradients(gradients))
            self.optimizer.apply(gradients, self.weights)

        self.function("step", step)()

    def accumulate_unscaled(self):
        self.function("step", lambda: self.update([sum(parts) for parts in zip(*(self.unscaled(0.5) for _ in "12"))]))()

    def accumulate_scaled(self):
        def step():
            parts = zip(*(self.scaled_gradients("get_scaled_loss", 0.5) for _ in "12"))
            self.update(self.optimizer.get_unscaled_gradients([sum(each) for each in parts]))

        self.function("step", step)()

    def accumulate_in_keras_3(self):
        def step():
            parts = zip(*(self.scaled_gradients("scale_loss", 0.5) for _ in "12"))
            self.optimizer.apply([sum(each) for each in parts], self.weights)

        self.function("step", step)()

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

    def two_optimizers(self):
        def step():
            with tf.GradientTape(persistent=True) as tape:
                losses = [self.optimizer.get_scaled_loss(self.loss()), self.other.scale_loss(self.loss())]
            first = tape.gradient(losses[0], self.weights[:1])
            second = tape.gradient(losses[1], self.weights[1:])
            self.optimizer.apply_gradients(zip(self.optimizer.get_unscaled_gradients(first), self.weights[:1]))
            self.other.apply(second, self.weights[1:])

        self.function("step", step)()

    def one_loss_and_two_updates(self):
        def step():
            with tf.GradientTape(persistent=True) as tape:
                loss = self.optimizer.get_scaled_loss(self.loss())
            for weight in self.weights:
                gradients = self.optimizer.get_unscaled_gradients(tape.gradient(loss, [weight]))
                self.optimizer.apply_gradients(zip(gradients, [weight]))

        self.function("step", step)()

    def inside(self):
        def step():
            with tf.GradientTape() as tape:
                loss = self.optimizer.scale_inside(self.loss)()
            self.update(tape.gradient(loss, self.weights))

        self.function("step", step)()

    def both_ways_in_turn(self):
        self.tensorflow_2() if len(self.functions) % 2 else self.function(
            "other", lambda: self.optimizer.apply(self.scaled_gradients("scale_loss"), self.weights)
        )()


LOOPS = [name for name, value in vars(Loop).items() if callable(value) and not name.startswith("_")]
LOOPS = LOOPS[LOOPS.index("tensorflow_2") :]


# Each loop of the first tier has two of the families, the next pair in turn.
CELLS = [
    pytest.param(
        family,
        way,
        name,
        id=f"{name}-{way}-{family.name}",
        marks=() if (j - i) % 5 < 2 else WIDE,
    )
    for i, name in enumerate(LOOPS)
    for j, family in enumerate(ALL_FAMILIES)
    for way in WAYS
]


@pytest.mark.parametrize(("family", "way", "name"), CELLS)
def test_a_loop_moves_the_weights_as_the_bare_optimizer_does_and_warns_of_nothing(family, way, name, caplog):
    loop = Loop(family, WAYS[way])
    for _ in range(STEPS):
        getattr(loop, name)()
    assert [weight.numpy() for weight in loop.weights] == [4.0 - STEPS * RATE, 4.0 - 2 * STEPS * RATE]
    updates = 2 * STEPS if name == "one_loss_and_two_updates" else STEPS
    assert float(loop.optimizer.loss_scale) == 64.0 * 2 ** (updates // 2)
    assert not [record for record in caplog.records if "LossScaleOptimizer" in record.getMessage()]


@pytest.mark.table(
    "inside-tensorflow_2-keras3",
    "eager-keras_3_apply_gradients-tf_keras",
    "eager-keras_3_apply-tf_keras",
    "inside-tensorflow_2-tf_keras_legacy",
    every=1,
)
@families
@pytest.mark.parametrize("contract", ["tensorflow_2", "keras_3_apply", "keras_3_apply_gradients"])
@pytest.mark.parametrize("traced", ["eager", "around", "inside"])
def test_a_loop_on_two_replicas_sums_their_gradients(family, contract, traced):
    strategy = strategies.get("mirrored_2")
    if traced == "inside" and contract != "tensorflow_2":
        pytest.skip("a tf.function inside strategy.run makes no merge call")
    with strategy.scope():
        loop = Loop(family, lambda function: function)
    step = getattr(loop, contract)
    if traced == "inside":
        unscaled = tf.function(loop.unscaled)
        step = lambda: loop.update(unscaled())  # noqa: E731
    on_all = lambda: strategy.run(step)  # noqa: E731
    on_all = tf.function(on_all) if traced == "around" else on_all
    for _ in range(STEPS):
        on_all()
    assert [weight.values[1].numpy() for weight in loop.weights] == [4.0 - 2 * STEPS * RATE, 4.0 - 4 * STEPS * RATE]
