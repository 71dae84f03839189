"""The activation report names the layer that overflows, and leaves the model as it was."""

import threading

import numpy as np
import pytest
import sonnet
import tensorflow as tf

from tests import strategies
from tests.families import FAMILIES, with_keras_3
from tf_lossscale.diagnosis import activation_report
from tf_lossscale.libraries.models import tensors_of

kerases = pytest.mark.parametrize("keras", [each.keras for each in FAMILIES[:2]], ids=["keras3", "tf_keras"])
HALF = "mixed_float16"


def model_of(keras, *layers, shape=(4,), name="model"):
    return keras.Sequential([keras.Input(shape), *layers], name=name)


def computing(keras, name, function, **options):
    """A layer that computes a function of its input in float16."""
    own = type("Own", (keras.layers.Layer,), {"call": lambda self, x: function(x)})
    return own(name=name, **{"dtype": HALF, **options})


def dense(keras, name, value=0.5, **options):
    constant = keras.initializers.Constant(value)
    return keras.layers.Dense(4, kernel_initializer=constant, name=name, **{"dtype": HALF, **options})


def a_loss(keras):
    return model_of(keras, dense(keras, "hidden", 100.0)), tf.ones([2, 4])


def an_embedding(keras):
    embedding = keras.layers.Embedding(3, 4, keras.initializers.Constant(1e5), name="embedding", dtype=HALF)
    return model_of(keras, embedding, dense(keras, "head"), shape=(2,)), tf.constant([[1, 2]])


def a_residual_sum(keras):
    x = keras.Input((4,))
    hidden = dense(keras, "hidden", 1e4)(x)
    total = keras.layers.Add(name="add", dtype=HALF)([hidden, dense(keras, "again", 0.25)(hidden)])
    return keras.Model(x, dense(keras, "head")(total), name="model"), tf.ones([2, 4])


def a_residual_sum_in_call(keras):
    class Block(keras.layers.Layer):
        def __init__(self):
            super().__init__(name="block", dtype=HALF)
            self.hidden, self.head = dense(keras, "hidden", 0.25), dense(keras, "head")

        def call(self, x):
            return self.head(x + self.hidden(x))

    return model_of(keras, Block()), tf.fill([2, 4], 4e4)


def an_operator(keras):
    x = keras.Input((4,))
    keras.mixed_precision.set_global_policy(HALF)  # the operators of tf_keras are layers, but a dtype has no effect
    try:
        return keras.Model(x, dense(keras, "head")(dense(keras, "hidden")(x) * 5e4), name="model"), tf.ones([2, 4])
    finally:
        keras.mixed_precision.set_global_policy("float32")


def an_rnn_state(keras):
    constant = keras.initializers.Constant
    options = {"kernel_initializer": constant(1.0), "recurrent_initializer": constant(1.0), "activation": "relu"}
    rnn = keras.layers.SimpleRNN(4, name="rnn", dtype=HALF, **options)
    return model_of(keras, rnn, dense(keras, "head"), shape=(20, 4)), tf.ones([2, 20, 4])


def a_custom_layer(keras):
    class Gated(keras.layers.Layer):
        def __init__(self):
            super().__init__(name="gated", dtype=HALF)
            self.gate = dense(keras, "gate")

        def call(self, x):
            return {"outputs": self.gate(x) ** 8}

    x = keras.Input((4,))
    return keras.Model(x, dense(keras, "head")(Gated()(x)["outputs"]), name="model"), tf.fill([2, 4], 100.0)


def a_layer_of_keras(keras):
    x = keras.Input((4, 4))
    attention = keras.layers.MultiHeadAttention(1, 4, name="attention", kernel_initializer="ones", dtype=HALF)
    return keras.Model(x, attention(x, x), name="model"), tf.fill([1, 4, 4], 100.0)


def a_shared_layer(keras):
    x, layer = keras.Input((4,)), dense(keras, "shared", 100.0)
    return keras.Model(x, dense(keras, "head")(layer(layer(x))), name="model"), tf.ones([2, 4])


def mixed_dtypes(keras):
    return model_of(keras, dense(keras, "wide", 1e5, dtype="float32"), dense(keras, "narrow")), tf.ones([2, 4])


def weights(keras):
    return model_of(keras, dense(keras, "hidden"), dense(keras, "head", float("nan"))), tf.ones([2, 4])


def a_logarithm(keras):
    return model_of(keras, computing(keras, "log", tf.math.log, dtype="float32")), tf.zeros([2, 4])


def data(keras):
    return model_of(keras, dense(keras, "hidden"), dense(keras, "head")), tf.fill([2, 4], np.inf)


def nothing(keras):
    return model_of(keras, dense(keras, "hidden"), dense(keras, "head")), tf.ones([2, 4])


# Where an overflow is planted -> the advice.
ADVICE = {
    a_loss: "`loss_fn()` overflows: compute it in float32.",
    an_embedding: "`embedding` casts weights of 1e+05 to float16: give it dtype float32.",
    a_residual_sum: "`add` overflows: give it dtype float32.",
    a_residual_sum_in_call: "`block` overflows before `block/head`: compute that part in float32.",
    an_operator: "` overflows: compute it in float32.",
    an_rnn_state: "`rnn/simple_rnn_cell` overflows: give it and `rnn` dtype float32.",
    a_custom_layer: "`gated` overflows after its inner layers: compute that part in float32.",
    a_layer_of_keras: "`: give it dtype float32.",
    a_shared_layer: "`shared (call 2)` overflows: give it dtype float32.",
    mixed_dtypes: "`narrow` casts inputs of 4e+05 to float16: give it dtype float32.",
    weights: "`head` has infinite or NaN weights: restore an older checkpoint.",
    a_logarithm: "`log` computes infinity or NaN in float32: look for a division by zero or log(0).",
    data: "The input of `hidden` is already infinite or NaN: look at where it comes from.",
    nothing: "Every layer's output is finite, and so is the loss: if steps are skipped, only gradients are not.",
}


@with_keras_3  # Keras 2 casts the inputs of these layers.
@pytest.mark.parametrize("dtype", ["mixed_float16", "float32"])
@pytest.mark.parametrize("before", ["mixed_float16", "float32"])
def test_a_layer_of_keras_3_that_does_not_cast_its_inputs_needs_float32_before_it(before, dtype):
    layer = tf.keras.layers.LayerNormalization(dtype=dtype, name="norm")
    first = tf.keras.layers.Dense(4, dtype=before)
    model = tf.keras.Sequential([tf.keras.Input((4,)), first, layer, tf.keras.layers.Dense(1, dtype="float32")])
    layer.gamma.assign([1e5] * 4)
    report = activation_report(model, tf.random.stateless_normal([8, 4], [0, 1]))
    if "float16" not in before + dtype:
        assert report.first is None
    else:
        them = "it and the layer before it" if before == "mixed_float16" else "it"
        assert report.first.advice == f"`norm` casts weights of 1e+05 to float16: give {them} dtype float32."


@kerases
@pytest.mark.parametrize("planted", ADVICE, ids=lambda planted: planted.__name__)
def test_a_report_names_the_layer_in_which_an_overflow_is_planted(keras, planted):
    model, inputs = planted(keras)
    report = activation_report(model, inputs, loss_fn=lambda outputs: tf.reduce_mean(outputs**2))
    assert repr(report).splitlines()[-1].endswith(ADVICE[planted])
    assert report.advice.startswith(f"`{report.first.layer}`" if report.first else ADVICE[planted])
    assert [row for row in report.rows if row.advice] == [report.first] * bool(report.first)
    assert len(report.plot().axes[0].get_yticklabels()) == len(report.rows)


def with_states(keras):
    """A model of which every kind of state changes in training mode."""

    class Counting(keras.layers.Layer):
        def __init__(self):
            super().__init__(name="counting")
            self.calls, self.counts = 0, [tf.Variable(0.0, trainable=False)]

        def call(self, x):
            self.calls += 1
            self.counts[0].assign_add(1.0)
            return x

    layers = keras.layers.BatchNormalization(), keras.layers.Dropout(0.5, seed=1), Counting()
    rnn = keras.layers.LSTM(2, stateful=True, recurrent_dropout=0.5, seed=1)
    model = keras.Sequential([keras.layers.Input((3, 4), batch_size=2), *layers, rnn], name="model")
    model.compile("adam", "mse")
    return model


@kerases
@pytest.mark.parametrize("error", [False, True])
def test_a_report_changes_nothing_also_if_the_model_raises_an_error(keras, error):
    model, twin, x = with_states(keras), with_states(keras), tf.random.normal([2, 3, 4])
    twin.set_weights(model.get_weights())
    classes = {base: vars(base).get("__call__") for layer in (model, *model.layers) for base in type(layer).__mro__}

    def fail(outputs):
        raise ZeroDivisionError

    for _ in range(2):
        if error:
            with pytest.raises(ZeroDivisionError):
                activation_report(model, x, loss_fn=fail)
        else:
            activation_report(model, x)
        assert [base for base, call in classes.items() if vars(base).get("__call__") is not call] == []
        assert not tf.config.functions_run_eagerly()
        assert model.layers[-2].calls == twin.layers[-2].calls
        outputs = []
        for each in (model, twin):
            tf.random.set_seed(0)  # eager random operations with the same seed share a state
            outputs.append(each(x, training=True))
        np.testing.assert_array_equal(*outputs)
        for own, other in zip(model.get_weights(), twin.get_weights()):
            np.testing.assert_array_equal(own, other)
        assert model.layers[-2].counts[0] == twin.layers[-2].counts[0]


@kerases
def test_a_model_that_is_not_built_gets_variables_with_their_initial_values(keras):
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.norm = keras.layers.BatchNormalization(name="norm")

        @tf.function
        def call(self, x, training=False):
            return self.norm(x, training=training)

    model = Own()
    assert activation_report(model, tf.constant([[1.0], [3.0]])).rows[0].weights == 1
    assert float(model.norm.moving_mean[0]) == 0
    model(tf.constant([[1.0], [3.0]]), training=True)
    assert float(model.norm.moving_mean[0]) != 0


@kerases
def test_the_calls_that_build_a_model_have_no_rows(keras):
    model = keras.Sequential([dense(keras, "hidden"), dense(keras, "head")], name="model")
    rows = activation_report(model, tf.ones([2, 4])).rows
    assert [(row.layer, row.inputs) for row in rows] == [("hidden", 1), ("head", 2), ("model", 1)]


@kerases
def test_the_weights_of_a_model_do_not_include_its_metrics(keras):
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden, self.loss_tracker = dense(keras, "hidden"), keras.metrics.Mean()

        def call(self, x):
            return self.hidden(x)

    model = Own()
    model.loss_tracker.update_state(np.nan)
    assert activation_report(model, tf.ones([2, 4])).rows[-1].weights == 0.5


@kerases
def test_rows_are_in_the_order_in_which_calls_return(keras):
    encoder = model_of(keras, dense(keras, "first"), dense(keras, "second"), shape=(3, 4), name="encoder")
    x, y = keras.Input((3, 4)), keras.Input((3, 4))
    rnn = keras.layers.SimpleRNN(4, name="rnn", dtype=HALF)
    model = keras.Model([x, y], rnn(keras.layers.Add(name="add")([encoder(x), encoder(y)])), name="model")
    names = [row.layer for row in activation_report(model, [tf.ones([2, 3, 4])] * 2).rows]
    own = ["encoder/first", "encoder/second", "encoder"]
    cell = "rnn/simple_rnn_cell"
    assert names == [*own, *(f"{name} (call 2)" for name in own), "add", cell, "rnn", "model"]


@kerases
def test_any_inputs_and_outputs_are_measured(keras):
    outputs = {
        "none": None,
        "sparse": tf.sparse.from_dense([0.0, 2.0]),
        "pair": (tf.constant(["text"]), tf.ragged.constant([[1.0], [], [4.0, 3.0]])),
    }
    layer = computing(keras, "own", lambda x: outputs, dtype="float32")
    (row,) = activation_report(layer, {"a": np.float32([[3.0]]), "b": [tf.constant([[-5.0]]), tf.constant([[7]])]}).rows
    assert (row.layer, row.dtype, row.inputs, row.outputs, row.weights) == ("own", "float32", 5, 4, None)
    lookup = keras.layers.StringLookup()
    lookup.adapt(["text"])
    for each in (lookup, computing(keras, "own", lambda x: None)):
        (row,) = activation_report(each, tf.constant(["text"])).rows
        assert (row.inputs, row.outputs, row.weights) == (None, None, None)


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float32, tf.float64])
def test_the_shares_depend_on_the_dtype_of_the_output(dtype):
    smallest = {tf.float16: 2.0**-14, tf.float64: 2.0**-1022}.get(dtype, 2.0**-126)
    values = np.array([smallest / 4, smallest, 1.0, 2.0, np.inf, -np.inf, np.nan, 0.0], dtype.as_numpy_dtype)

    class Values(tf.Module):
        def __call__(self, x):
            return tf.constant(values)

    (row,) = activation_report(Values(), tf.constant(np.nan)).rows
    assert (row.infinite, row.nan, row.subnormal) == (2 / 8, 1 / 8, 1 / 8)
    assert (row.dtype, row.advice) == (dtype.name, "")


def test_modules_without_a_keras_are_told_apart_by_numbers():
    class Network(tf.Module):
        def __init__(self):
            super().__init__("network")
            self.layers = [sonnet.Linear(2), sonnet.Linear(2), sonnet.BatchNorm(True, True)]

        @tf.function
        def __call__(self, x, is_training):
            for layer in self.layers[:2]:
                x = layer(x)
            return self.layers[2](tf.cast(x, tf.float16) * 6e4, is_training)

    model = Network()
    report = activation_report(model, tf.ones([2, 3]))
    assert [row.layer for row in report.rows] == ["linear", "linear_1", "batch_norm", "network"]
    assert not model.layers[2].moving_mean.value.numpy().any()


def test_what_runs_in_a_graph_or_in_another_thread_has_no_row():
    class Inner(tf.Module):
        def __call__(self, x):
            return x

    class Outer(tf.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def __call__(self, x):
            thread = threading.Thread(target=self.inner, args=(x,))
            thread.start()
            thread.join()
            return tf.vectorized_map(self.inner, x)

    assert [row.layer for row in activation_report(Outer(), tf.ones([2])).rows] == ["outer"]


def test_what_cannot_be_reported_on_is_refused():
    with pytest.raises(TypeError, match="`model` must be a Keras model or layer"):
        activation_report(tf.square, tf.ones([1]))
    with pytest.raises(RuntimeError, match=r"activation_report\(\) needs eager mode"):
        tf.function(lambda: activation_report(sonnet.Linear(1), tf.ones([1, 1])))()


@kerases
@pytest.mark.parametrize("training", [False, True])
def test_the_last_line_names_statistics_that_are_not_finite(keras, training):
    model = model_of(keras, keras.layers.BatchNormalization(name="norm"), dense(keras, "head"))
    model.layers[0].moving_variance.assign([np.nan, 1.0, 1.0, 1.0])
    report = activation_report(model, tf.random.stateless_normal([8, 4], [0, 1]), training=training)
    assert repr(report).splitlines()[-1] == report.advice
    assert report.advice.startswith("`norm` has infinite or NaN statistics (moving_variance")
    assert "keep_state(model)" in report.advice
    model.layers[1].kernel.assign(np.full([4, 4], np.inf))
    report = activation_report(model, tf.ones([8, 4]), training=True)
    assert "`norm` has infinite or NaN statistics" in report.advice
    assert "`head` has infinite or NaN weights" in report.advice


@kerases
def test_the_statistics_of_the_second_replica_are_seen(keras):
    with strategies.get("mirrored_2").scope():
        model = model_of(keras, keras.layers.BatchNormalization(name="norm"))
        [mean] = tensors_of([model.layers[0].moving_mean])
    strategies.get("mirrored_2").experimental_local_results(mean)[1].assign([np.nan] * 4)
    assert "`norm` has infinite or NaN statistics (moving_mean)" in activation_report(model, tf.ones([2, 4])).advice


@kerases
def test_a_metric_that_a_layer_updates_gets_its_state_back(keras):
    class Measuring(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.mean = keras.metrics.Mean()

        def call(self, x):
            self.mean.update_state(x)
            return x

    model = model_of(keras, Measuring())
    model(tf.ones([2, 4]))
    before = [float(each) for each in model.layers[0].mean.variables]
    activation_report(model, tf.fill([2, 4], np.inf))
    assert [float(each) for each in model.layers[0].mean.variables] == before
    assert min(before) > 0


@kerases
@pytest.mark.parametrize("container", [list, tuple, "plain object"])
def test_layers_in_a_container_have_rows_and_get_their_state_back(keras, container):
    class Own(keras.Model):
        def __init__(self):
            super().__init__(name="own")
            norms = [keras.layers.BatchNormalization(name=f"norm_{i}") for i in range(2)]
            self.held = type("Plain", (), {"norms": norms})() if container == "plain object" else container(norms)
            if container == "plain object":
                vars(self.held)["norms"] = norms

        def call(self, x, training=False):
            for norm in getattr(self.held, "norms", self.held):
                x = norm(x, training=training)
            return x

    model = Own()
    model(tf.ones([2, 4]))
    rows = activation_report(model, tf.constant([[1.0] * 4, [3.0] * 4])).rows
    assert [row.layer for row in rows] == ["norm_0", "norm_1", "own"]
    for norm in getattr(model.held, "norms", model.held):
        np.testing.assert_array_equal(norm.moving_mean, [0.0] * 4)
