"""`scale_inside`: a loss function for a library that owns the tape and never scales."""

import collections

import numpy as np
import pytest
import tensorflow as tf

from tests import strategies
from tests.cases import combinations
from tests.families import ALL_FAMILIES, FAMILIES
from tf_lossscale import LossScaleOptimizer
from tf_lossscale.core import scaling

SMALL = 2.0**-26  # zero in float16
Info = collections.namedtuple("Info", ["loss", "extra"])


def library_step(optimizer, loss_fn, variables):
    """What a library does; returns the loss and the gradients that it saw."""
    with tf.GradientTape() as tape:
        loss = loss_fn()
    gradients = tape.gradient(loss, variables)
    optimizer.apply_gradients(zip(gradients, variables))
    return loss, gradients


def halves(weight, factor=SMALL):
    """A loss whose gradient passes through float16, where `factor` becomes zero."""
    return lambda: factor * tf.cast(tf.cast(weight, tf.float16), tf.float32)


CALLS = {
    "eager": lambda step: step,
    "function": tf.function,
    "compiled": lambda step: tf.function(step, jit_compile=True),
    "mirrored": lambda step: tf.function(lambda: strategies.get("mirrored_2").run(step)),
}


@pytest.mark.parametrize(
    ("family", "call"),
    combinations(
        ALL_FAMILIES,
        CALLS,
        usual=["keras3-function", "tf1-eager", "sonnet-compiled", "tf_keras-eager", "tf_keras_legacy-function"],
    ),
)
def test_gradients_that_vanish_in_float16_arrive_unscaled_and_an_overflow_skips_the_step(family, call):
    if family.name == "sonnet" and call == "mirrored":
        pytest.skip("Sonnet leaves it to the caller to sum gradients over replicas")
    strategy = strategies.get("mirrored_2") if call == "mirrored" else tf.distribute.get_strategy()
    with strategy.scope():
        weight, factor = tf.Variable(0.0), tf.Variable(SMALL, trainable=False)
        optimizer = LossScaleOptimizer(family.sgd())
    step = CALLS[call](lambda: library_step(optimizer, optimizer.scale_inside(halves(weight, factor)), [weight])[0])
    step()
    moved = -0.5 * SMALL * strategy.num_replicas_in_sync
    assert weight.numpy() == moved
    factor.assign(4.0)  # 2**15 times 4 is infinite in float16
    step()
    assert (weight.numpy(), float(optimizer.loss_scale)) == (moved, 2.0**14)
    without = tf.Variable(0.0)
    assert library_step(LossScaleOptimizer(family.sgd()), halves(without), [without])[1][0] == 0.0


@pytest.mark.parametrize("call", ["eager", "function", "compiled"])
def test_a_persistent_tape_gives_the_gradients_of_each_variable_and_part_again(call):
    first, second = tf.Variable(2.0), tf.Variable(3.0)
    optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(0.5), initial_scale=1024)
    optimizer.build([first, second])

    def step():
        with tf.GradientTape(persistent=True) as tape:
            loss = optimizer.scale_inside(lambda: first * first * second)()
        gradients = [tape.gradient(loss, first), tape.gradient(loss, second)]
        again = tape.gradient(loss, [first, second])
        optimizer.apply_gradients(zip(gradients, [first, second]))
        return [*gradients, *again]

    assert [float(gradient) for gradient in CALLS[call](step)()] == [12.0, 4.0, 12.0, 4.0]
    assert [first.numpy(), second.numpy()] == [2.0 - 6.0, 3.0 - 2.0]


def test_a_jacobian_is_computed_from_the_scaled_loss():
    weight = tf.Variable([2.0, 3.0])
    optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(), initial_scale=1024)
    with tf.GradientTape(persistent=True) as tape:
        loss = optimizer.scale_inside(lambda: weight**2)()
    for pfor in (True, False):
        np.testing.assert_array_equal(tape.jacobian(loss, weight, experimental_use_pfor=pfor), [[4.0, 0.0], [0.0, 6.0]])


@pytest.mark.parametrize("result", [lambda w: [w, w], lambda w: {"loss": w}, lambda w: ([w, w], w), lambda w: 3])
def test_what_is_no_loss_is_refused_and_named(result):
    weight, optimizer = tf.Variable(3.0), LossScaleOptimizer(tf.keras.optimizers.SGD())
    for function in (lambda call: call(), lambda call: tf.function(call)()):
        with pytest.raises(TypeError, match=r"`loss_fn` must return the loss.*returned: .*[\d\w]"):
            function(optimizer.scale_inside(lambda: result(weight * 1.0)))
    for nothing in ((), None):
        with pytest.raises(TypeError, match="`loss_fn` must return the loss"):
            optimizer.scale_inside(lambda nothing=nothing: nothing)()


def test_arguments_pass_and_a_tuple_keeps_its_class_and_its_other_parts_without_gradients():
    weight, optimizer = tf.Variable(3.0), LossScaleOptimizer(tf.keras.optimizers.SGD())

    def loss_fn(x, *, factor):
        return Info(factor * weight * x, {"square": weight**2, "none": None, "text": "x"})

    with tf.GradientTape(persistent=True) as tape:
        info = optimizer.scale_inside(loss_fn)(tf.constant(2.0), factor=5.0)
    assert isinstance(info, Info)
    assert (float(info.loss), float(info.extra["square"])) == (30.0, 9.0)
    assert (info.extra["none"], info.extra["text"]) == (None, "x")
    assert float(tape.gradient(info.loss, weight)) == 10.0
    assert tape.gradient(info.extra["square"], weight) is None
    plain = optimizer.scale_inside(lambda: (weight * 1.0, 7))()
    assert type(plain) is tuple
    assert plain[1] == 7


def test_gradients_of_looked_up_rows_stay_sparse_and_unused_variables_have_none():
    table, other = tf.Variable(tf.ones([4, 2])), tf.Variable(1.0)
    optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD())

    def loss_fn():
        tf.identity(other)  # read, and not used
        return tf.reduce_sum(tf.gather(table, [1, 1, 3]))

    with tf.GradientTape() as tape:
        loss = optimizer.scale_inside(loss_fn)()
    of_table, of_other = tape.gradient(loss, [table, other])
    assert isinstance(of_table, tf.IndexedSlices)
    assert tf.convert_to_tensor(of_table).numpy().tolist() == [[0, 0], [2, 2], [0, 0], [1, 1]]
    assert of_other is None


@pytest.mark.parametrize("method", ["scale_inside", "get_scaled_loss", "scale_loss"])
def test_autograph_converts_a_loss_function_and_leaves_the_package_as_it_is(method, monkeypatch):
    optimizer, weight, statuses = LossScaleOptimizer(FAMILIES[1].sgd(), initial_scale=8), tf.Variable(1.0), set()
    multiply = scaling.scale_loss

    def scale_loss(*args):
        statuses.add(tf.__internal__.autograph.control_status_ctx().status.name)
        return multiply(*args)

    monkeypatch.setattr(scaling, "scale_loss", scale_loss)

    def loss_fn():
        return weight * 3.0 if weight > 0 else weight * 2.0

    @tf.function
    def gradient():
        with tf.GradientTape() as tape:
            loss = getattr(optimizer, method)(loss_fn)()
        return tape.gradient(loss, weight)

    assert gradient().numpy() == (3.0 if method == "scale_inside" else 24.0)
    assert statuses == {"DISABLED"}


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "function"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_in_fit_which_scales_the_loss_too_the_step_is_right(family, eager):
    class Model(family.keras.Sequential):
        def compute_loss(self, x=None, *args, **kwargs):
            del args, kwargs
            return self.optimizer.scale_inside(lambda: tf.reduce_mean(self(x)))()

    dense = family.keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = Model([family.keras.Input((1,)), dense])
    model.compile(LossScaleOptimizer(family.sgd(), initial_scale=8), "mse", run_eagerly=eager)
    model.fit(np.ones((2, 1)), np.ones((2, 1)), batch_size=1, verbose=0)
    assert dense.kernel.numpy().item() == -1.0
    # The last batch overflows, in the gradients alone.
    model.fit(np.full((1, 1), 1e38), np.ones((1, 1)), verbose=0)
    assert dense.kernel.numpy().item() == -1.0
    assert model.optimizer.state()["loss_scale"] == 4.0
