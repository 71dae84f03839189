"""`probe` counts the gradients of a bare optimizer, and leaves no trace."""

import numpy as np
import pytest
import tensorflow as tf

from tests.families import ALL_FAMILIES, FAMILIES, all_families, families
from tf_lossscale import LossScaleOptimizer, probe
from tf_lossscale.optimizers import Adafactor
from tf_lossscale.precision.counts import ZEROS, column
from tf_lossscale.precision.report_text import whether_float16_fits

KERAS_3 = FAMILIES[0]


def model_of(family):
    keras = family.keras
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, name="hidden"), keras.layers.Dense(1)])
    model.set_weights([np.full(weight.shape, 0.5) for weight in model.get_weights()])
    model.compile(family.adam(), "mse")
    return model


def fit(model, epochs=1):
    x = np.linspace(0, 1, 8).reshape(4, 2)
    model.fit(x, x[:, :1], batch_size=1, epochs=epochs, shuffle=False, verbose=0)


@families
def test_fit_trains_the_same_and_the_report_names_the_variables(family):
    alone, probed = model_of(family), model_of(family)
    fit(alone)
    with probe(probed.optimizer, every=3) as counting:
        fit(probed)
    for one, other in zip(alone.get_weights(), probed.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    report = counting.precision_report()
    names = [row.variable.removeprefix(f"{probed.name}/") for row in report.rows]
    assert names == ["hidden/kernel", "hidden/bias", *(f"{probed.layers[-1].name}/{n}" for n in ("kernel", "bias"))]
    assert [row.values for row in report.rows] == [6, 3, 3, 1]
    assert (report.step, report.counts.scale, report.counts.full_precision) == (4, 1.0, True)


@all_families
@pytest.mark.parametrize("mode", ["eager", "function", "compiled"])
def test_every_family_is_counted_once_a_step_and_is_as_before_afterwards(family, mode):
    inner, weight = family.sgd(), tf.Variable([1.0, 1.0], name="weight")
    if hasattr(inner, "build"):
        inner.build([weight])
    attributes = dict(vars(inner))

    def step(gradient):
        family.apply(inner, [gradient], [weight])

    with probe(inner, every=2) as counting:
        modes = {"eager": step, "function": tf.function(step), "compiled": tf.function(step, jit_compile=True)}
        taken = modes[mode]
        for gradient in ([1.0, 0.0], [2.0, 0.0], [4.0, 0.0]):
            taken(tf.constant(gradient))
        counting.count_exponents()
        taken(tf.constant([8.0, 0.0]))
    assert not {"apply", "apply_gradients"} & vars(inner).keys()
    assert [name for name in vars(inner).keys() - attributes.keys() if "overridden" in name] == []
    counts = counting.counts()
    assert (counts.names, counts.step) == (("weight",), 4)
    assert (counts.counts[0, ZEROS], counts.counts[0, column(3)], counts.counts.sum()) == (1, 1, 2)
    for _ in range(3):
        taken(tf.constant([1.0, 0.0]))
    assert counting.counts().step == 4, "a function that was traced in the block counts no more"
    np.testing.assert_array_equal(weight, [1.0 - 0.5 * 18.0, 1.0])


def test_keywords_and_variables_that_the_optimizer_knows_are_understood():
    inner, weight = KERAS_3.sgd(), tf.Variable([1.0], name="weight")
    inner.build([weight])
    with probe(inner, every=1) as counting:
        for step, call in enumerate(
            (
                lambda gradient: inner.apply([gradient]),
                lambda gradient: inner.apply(grads=[gradient], trainable_variables=[weight]),
                lambda gradient: inner.apply_gradients(grads_and_vars=[(gradient, weight)]),
                lambda gradient: inner.apply_gradients(iter([(gradient, weight)])),
            )
        ):
            call(tf.constant([2.0**step]))
            assert counting.counts().names == ("weight",)
            assert counting.counts().counts[0, column(step)] == 1


@families
def test_a_call_without_gradients_has_the_result_that_it_has_without_a_probe(family):
    def outcome(call):
        try:
            return type(call()), None
        except Exception as error:
            return type(error), str(error)

    inner = family.sgd()
    calls = [lambda: inner.apply_gradients(), lambda: inner.apply_gradients([])]
    calls += [lambda: inner.apply_gradients(grads_and_vars=iter([]))]
    expected = [outcome(call) for call in calls]
    with probe(inner) as counting:
        assert [outcome(call) for call in calls] == expected
    with pytest.raises(ValueError, match="has taken none inside the block"):
        counting.precision_report()


def test_gradients_that_float16_computed_do_not_tell_whether_it_fits():
    inner, weight = KERAS_3.sgd(), tf.Variable([1.0, 1.0], dtype=tf.float16)
    with probe(inner) as counting:
        inner.apply_gradients([(tf.constant([0.0, 1.0], tf.float16), weight)])
    report = counting.precision_report()
    assert report.rows[0].rounded
    assert whether_float16_fits(report).endswith(
        "they were computed in float16, and values that vanished are lost. Run the program in float32."
    )


def test_the_factor_of_keras_3_is_the_scale():
    inner, weight = KERAS_3.sgd(loss_scale_factor=8.0), tf.Variable([1.0])
    with probe(inner) as counting:
        inner.apply_gradients([(tf.constant([1.0]), weight)])
    assert counting.counts().scale == 8.0


def test_an_error_in_the_block_leaves_the_optimizer_as_it_was():
    inner, weight = KERAS_3.sgd(), tf.Variable([1.0])
    with pytest.raises(tf.errors.InvalidArgumentError, match="shape"), probe(inner) as counting:
        inner.apply_gradients([(tf.constant([1.0, 2.0]), weight)])
    assert not {"apply", "apply_gradients"} & set(vars(inner))
    inner.apply_gradients([(tf.constant([1.0]), weight)])
    assert counting.counts().step == 1, "nothing after the block is counted"


def test_in_a_session_the_steps_are_counted():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        weight = tf.compat.v1.get_variable("weight", initializer=[1.0], use_resource=True)
        inner = ALL_FAMILIES[3].sgd()
        with probe(inner) as counting:
            step = inner.minimize(4.0 * tf.reduce_sum(weight), var_list=[weight])
            session.run(tf.compat.v1.global_variables_initializer())
            session.run(step)
            assert counting.counts().counts[0, column(2)] == 1
        assert session.run(weight).tolist() == [-1.0]


def test_without_a_counted_step_the_error_names_the_usual_reason():
    model = model_of(KERAS_3)
    fit(model)
    with probe(model.optimizer) as counting:
        fit(model)
    with pytest.raises(ValueError, match=r"inside the block of probe\(\).*compile the Keras model again"):
        counting.precision_report()


def test_what_cannot_be_probed_is_refused_with_what_to_do():
    inner = KERAS_3.sgd()
    wrapper = LossScaleOptimizer(inner)
    for wrong in (wrapper, inner):
        with pytest.raises(TypeError, match=r'without a loss scale.*diagnose="exponents"'), probe(wrong):
            pass
    with pytest.raises(TypeError, match="must be an instance of an optimizer class"), probe("adam"):
        pass
    bare = KERAS_3.sgd()
    with pytest.raises(ValueError, match="`every` must be a whole number"), probe(bare, every=0):
        pass
    with probe(bare), pytest.raises(RuntimeError, match="End the `with` block of the other probe first"), probe(bare):
        pass
    assert not {"apply", "apply_gradients"} & set(vars(bare))


def test_adafactors_step_hooks_are_called_after_a_probe_as_before():
    weight, calls = tf.Variable([1.0, 2.0]), []
    optimizer = Adafactor([weight])
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    with probe(optimizer):
        optimizer.step(lambda: tf.reduce_sum(weight))
    optimizer.apply_gradients([(tf.ones([2]), weight)])
    assert len(calls) == 2
