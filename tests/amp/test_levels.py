"""Which layers compute in half precision, against the recorded levels of MindSpore."""

import copy

import numpy as np
import pytest
import tensorflow as tf

from tests.amp.networks import of_tokens
from tests.cases import combinations
from tests.conformance import recordings
from tf_lossscale import amp

RECORDED = recordings.load("mindspore_managers")["auto_mixed_precision"]

# (level, operation) -> why the recorded dtype is not ours. Keras casts a layer's inputs when it is called, and a layer
# computes all of its operations in one dtype.
DIFFERENCES = {("auto", "BiasAdd"): "a layer of Keras multiplies and adds its bias in one dtype"}


def assert_as_recorded(network, level, model):
    dtypes = {name: dtype.capitalize() for name, _, dtype, _ in amp.dtype_table(model)}
    for layer, operation, dtype in RECORDED[f"{network} {level} float16 train"]["ok"]["compute_summary"]:
        differs = (level, operation) in DIFFERENCES and layer != "fixed"
        assert (dtypes[layer] != dtype) == differs, (layer, operation)


def lenet(keras):
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Conv2D(6, 5, use_bias=False, name="conv1"),
            layers.BatchNormalization(name="bn1"),
            layers.ReLU(name="relu"),
            layers.MaxPooling2D(name="max_pool2d"),
            layers.Conv2D(16, 5, use_bias=False, name="conv2"),
            layers.BatchNormalization(name="bn2"),
            layers.ReLU(name="relu_1"),
            layers.MaxPooling2D(name="max_pool2d_1"),
            layers.Flatten(name="flatten"),
            layers.Dense(120, name="fc1"),
            layers.ReLU(name="relu_2"),
            layers.Dense(84, name="fc2"),
            layers.ReLU(name="relu_3"),
            layers.Dense(10, name="fc3"),
            layers.Softmax(name="softmax"),
        ]
    )


@pytest.mark.parametrize("built", [False, True], ids=["new", "built"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "auto"])
def test_each_layer_of_lenet_computes_in_the_recorded_dtype(keras, level, built):
    model = lenet(keras)
    images = np.ones((2, 32, 32, 1), "float32")
    if built:
        model(images)
    assert amp.auto_mixed_precision(model, level) is model
    output = model(images)
    assert_as_recorded("LeNet5", level, model)
    assert output.dtype == model.layers[-1].compute_dtype
    assert {tf.as_dtype(v.dtype) for v in model.variables} == {tf.float32}


def test_a_layer_with_an_attribute_layers_is_set_with_all_of_its_parts(keras):
    class Encoder(keras.layers.Layer):
        def __init__(self):
            super().__init__(name="encoder")
            self.layers = [keras.layers.Dense(4, name="first"), keras.layers.Dense(4, name="second")]
            self.norm = keras.layers.LayerNormalization(name="norm")
            self.out = keras.layers.Dense(4, name="out")

        def call(self, inputs):
            for layer in self.layers:
                inputs = layer(inputs)
            return self.out(self.norm(inputs))

    def dtypes(model):
        return {name.split("/")[-1]: dtype for name, _, dtype, _ in amp.dtype_table(model)}

    encoder = Encoder()
    model = keras.Sequential([encoder])
    names = {"encoder", "first", "second", "norm", "out"}
    assert dtypes(amp.auto_mixed_precision(model, "O2")) == {**dict.fromkeys(names, "float16"), "norm": "float32"}
    assert model(np.ones((1, 4), "float32")).dtype == "float16"
    amp.to_float(model, "float32")
    assert dtypes(model) == dict.fromkeys(names, "float32")
    amp.to_float(encoder, "bfloat16")
    assert dtypes(model) == dict.fromkeys(names, "bfloat16")
    with pytest.raises(TypeError, match="must be a Keras model"):
        amp.auto_mixed_precision(encoder, "O2")


def recurrent(keras):
    """(layers, whether O1 has them in half precision)"""

    class Summing(keras.layers.Layer):
        state_size = 2

        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(2)

        def build(self, shape):
            self.dense.build(shape)

        def call(self, inputs, states, training=None):
            total = self.dense(inputs) + states[0]
            return total, [total]

    layers = keras.layers
    return [
        (layers.GRU(2), True),
        (layers.RNN([layers.LSTMCell(2), layers.GRUCell(3)]), True),
        (layers.Bidirectional(layers.SimpleRNN(2)), True),
        (layers.RNN([layers.LSTMCell(2), Summing()]), False),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_states_of_a_recurrent_layer_have_one_dtype(keras, level):
    for layer, in_half in recurrent(keras):
        model = amp.auto_mixed_precision(keras.Sequential([layer]), level)
        assert np.isfinite(model(np.ones((2, 4, 3), "float32")).numpy()).all()
        dtypes = {row[0]: row[2] for row in amp.dtype_table(model) if "cell" in row[0]}
        assert set(dtypes.values()) == {"float16" if in_half or level == "O2" else "float32"}, dtypes


@pytest.mark.parametrize("built", [False, True], ids=["new", "built"])
def test_every_normalization_and_variables_of_the_model_itself_compute_in_half(keras, built):
    class Scaled(keras.Model):
        def __init__(self):
            super().__init__()
            self.parts = [keras.layers.GroupNormalization(2), keras.layers.Embedding(5, 4)]
            self.factor = self.add_weight(shape=(4,), initializer="ones", name="factor")

        def call(self, rows):
            return self.parts[0](self.parts[1](rows)) * tf.convert_to_tensor(self.factor)

    model, rows = Scaled(), np.ones((2, 4), "int32")
    if built:
        model(rows)
    for dtype in ("float16", "float32"):
        amp.auto_mixed_precision(model, "O3") if dtype == "float16" else amp.to_float(model, dtype)
        assert model(rows).dtype == dtype
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.cast(model(rows), tf.float32))
        gradients = tape.gradient(loss, model.trainable_variables)
        assert {g.dtype for g in gradients} == {tf.float32}


@pytest.mark.parametrize("level", ["O0", "O2", "auto"])
def test_each_layer_of_a_nested_network_computes_in_the_recorded_dtype(keras, level):
    layers = keras.layers
    body = [layers.Conv2D(4, 3, name="body.0"), layers.BatchNormalization(name="body.1"), layers.ReLU(name="body.2")]
    head = [layers.Flatten(), layers.LayerNormalization(name="ln"), layers.Dense(3, name="fc")]
    fixed = amp.to_float(layers.Dense(2, name="fixed"), "float32")  # the recorded network had this layer set by hand
    model = amp.auto_mixed_precision(keras.Sequential([keras.Sequential(body), *head, fixed]), level)
    assert model(np.ones((2, 6, 6, 1), "float32")).shape == (2, 2)
    assert_as_recorded("SeqNet", level, model)


def test_o0_o1_and_auto_leave_what_was_set_by_hand_and_o2_and_o3_do_not(keras):
    for level, by_hand, norm, dense in (
        ("O0", "bfloat16", "float16", "float32"),
        ("O1", "bfloat16", "float16", "float16"),
        ("auto", "bfloat16", "float16", "float16"),
        ("O2", "float16", "float32", "float16"),
        ("O3", "float16", "float16", "float16"),
    ):
        lstm, layers = amp.to_float(keras.layers.LSTM(2), "bfloat16"), keras.layers
        model = keras.Sequential([lstm, layers.BatchNormalization(dtype="mixed_float16"), layers.Dense(3)])
        amp.auto_mixed_precision(model, level)
        assert [row[2] for row in amp.dtype_table(model)] == [by_hand, by_hand, norm, dense], level


def test_unknown_levels_and_dtypes_and_bad_networks_are_refused_and_change_nothing():
    dense = tf.keras.layers.Dense(1)
    model = tf.keras.Sequential([dense])
    for level in ("O4", "o1", 1, None):
        with pytest.raises(ValueError, match="is not supported"):
            amp.auto_mixed_precision(model, level)
    for dtype in ("int8", np.float64, 19, None, "x"):
        with pytest.raises(ValueError, match="float32, float16, bfloat16"):
            amp.to_float(dense, dtype)
    with pytest.raises(ValueError, match="float16, bfloat16"):
        amp.auto_mixed_precision(model, "O0", dtype="float32")
    with pytest.raises(TypeError, match="must be a Keras model"):
        amp.auto_mixed_precision(5, "auto")
    with pytest.raises(TypeError, match="layer"):
        amp.to_float(3, "float16")
    assert dense.compute_dtype == "float32"


def test_a_dtype_of_tensorflow_or_numpy_is_taken():
    for dtype in (tf.bfloat16, tf.bfloat16.as_numpy_dtype):
        model = tf.keras.Sequential([tf.keras.layers.Dense(1), tf.keras.layers.LayerNormalization()])
        amp.auto_mixed_precision(model, "O2", dtype=dtype)
        assert [layer.compute_dtype for layer in model.layers] == ["bfloat16", "float32"]
        assert model(tf.ones((1, 2))).dtype == "bfloat16"
    for dtype in (np.float16, np.dtype("float16"), tf.float16):
        assert amp.to_float(tf.keras.layers.Dense(1), dtype).compute_dtype == "float16"


def transformer(keras):
    """The block of Keras's tutorial on text classification with a Transformer."""
    layers = keras.layers

    class TransformerBlock(layers.Layer):
        def __init__(self):
            super().__init__()
            self.att = layers.MultiHeadAttention(2, 8)
            self.ffn = keras.Sequential([layers.Dense(8, activation="relu"), layers.Dense(8)])
            self.layernorm1 = layers.LayerNormalization(epsilon=1e-6)
            self.layernorm2 = layers.LayerNormalization(epsilon=1e-6)

        def call(self, inputs):
            out1 = self.layernorm1(inputs + self.att(inputs, inputs))
            return self.layernorm2(out1 + self.ffn(out1))

    first = [layers.Normalization(mean=1.0, variance=4.0), layers.Dense(8)]
    return keras.Sequential([*first, TransformerBlock(), layers.GlobalAveragePooling1D(), layers.Dense(1)])


def residual(keras):
    class Residual(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense, self.norm = keras.layers.Dense(6), keras.layers.LayerNormalization()
            self.out = keras.layers.Dense(1)

        def call(self, x):
            return self.out(x + self.norm(self.dense(x)) + self.dense(x) + x)[:, 0]

    return Residual()


def functional(keras):
    inputs = keras.Input((5, 6))
    dense, norm = keras.layers.Dense(6), keras.layers.LayerNormalization()
    return keras.Model(inputs, keras.layers.Dense(1)(inputs + dense(inputs) + norm(dense(inputs)) + inputs)[:, 0])


def states(keras):
    class States(keras.Model):
        def __init__(self):
            super().__init__()
            self.lstm = keras.layers.LSTM(3, return_state=True)
            self.out = keras.layers.Dense(1)

        def call(self, x):
            _, *state = self.lstm(x)
            return self.out(state[0] + self.lstm(x, initial_state=state)[0])

    return States()


def attention_of_tokens(keras):
    return of_tokens(keras, lambda embedded: keras.layers.MultiHeadAttention(2, 4)(embedded, embedded))


def model_of_ones_own(keras):
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.recurrent = keras.layers.LSTM(3)

        def call(self, inputs):
            return self.recurrent(inputs)

    return of_tokens(keras, lambda embedded: Own()(keras.layers.LayerNormalization()(embedded)))


SEQUENCES = np.random.default_rng(0).normal(size=(4, 5, 6)).astype("float32")
TOKENS = np.array([[1, 2, 0, 0], [3, 1, 2, 0]])
# Network -> its input, and how far half precision may lie from float32. Of tokens, a mask that is lost shows.
NETWORKS = {
    **dict.fromkeys((transformer, residual, functional, states), (SEQUENCES, 5e-2)),
    **dict.fromkeys((attention_of_tokens, model_of_ones_own), (TOKENS, 5e-3)),
}


@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("level", combinations(["O1", "O2", "O3", "auto"], usual=["O1", "O2"]))
def test_a_network_of_ones_own_computes_at_every_level_and_as_before_after_the_way_back(keras, level, network):
    model, (x, tolerance) = network(keras), NETWORKS[network]
    full = np.asarray(model(x))
    trained = amp.Model(model, "mse", keras.optimizers.SGD(0.0), amp_level=level)
    np.testing.assert_allclose(trained.predict(x), full, atol=tolerance)
    # One level of the functional network is enough in each library: it takes seconds.
    if x is SEQUENCES and (level == "O1" or network is not functional):
        trained.train(1, tf.data.Dataset.from_tensors((x, np.zeros((4, 1), "float32"))))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.cast(model(x), tf.float32))
    assert None not in tape.gradient(loss, model.trainable_variables)
    assert any("float16" in row[2] for row in amp.dtype_table(model))
    amp.auto_mixed_precision(model, "O1")  # whatever was set before
    model(x)
    np.testing.assert_array_equal(amp.to_float(model, "float32")(x), full)


def test_a_copy_of_a_layer_computes_with_its_own_weights():
    # A copy of a tf_keras layer in half precision raises, with levels or without: it has lost the casts of variables.
    dense = tf.keras.layers.Dense(1, use_bias=False)
    amp.auto_mixed_precision(tf.keras.Sequential([dense]), "O1")
    dense(tf.ones((1, 1)))
    dense.set_weights([np.ones((1, 1))])
    again = copy.deepcopy(dense)
    again.set_weights([np.full((1, 1), 3.0)])
    assert [float(each(tf.ones((1, 1)))[0, 0]) for each in (dense, again)] == [1.0, 3.0]


def test_an_error_of_a_layer_that_mixes_dtypes_itself_names_the_layer_and_to_float_mends_it(keras):
    class Mixing(keras.layers.Layer):
        def call(self, x):
            return x + tf.ones_like(x, tf.float32)

    layers = [Mixing(name="mixing"), keras.layers.Dense(3)]
    model = amp.Model(keras.Sequential(layers), "mse", "sgd", amp_level="O2")
    data = tf.data.Dataset.from_tensors((np.ones((4, 3), "float32"), np.ones((4, 3), "float32")))
    for call in (
        lambda: model.train(1, data),
        lambda: model.eval(data),
        lambda: model.predict(tf.ones((4, 3))),
    ):
        with pytest.raises((TypeError, tf.errors.InvalidArgumentError), match=r"(?i:mixing)"):
            call()
    amp.to_float(model.network.layers[0], "float32")
    model.train(1, data)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["fit", "evaluate", "predict", "Model", "a layer of a Model", "cell"])
def test_a_level_counts_for_a_model_that_has_already_run(keras, way):
    seen = []

    class Noting(keras.layers.Layer):
        def call(self, x):
            seen.append(tf.as_dtype(x.dtype).name)
            return x

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), Noting(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x, y = tf.ones((8, 4)), tf.ones((8, 1))
    data = tf.data.Dataset.from_tensors((x, y))
    trained = amp.Model(model, "mse", keras.optimizers.SGD(0.1)) if "Model" in way else None
    cell = amp.TrainOneStepCell(amp.WithLossCell(model, keras.losses.MeanSquaredError()), keras.optimizers.SGD(0.1))
    run = {
        "fit": lambda: model.fit(x, y, verbose=0),
        "evaluate": lambda: model.evaluate(x, y, verbose=0),
        "predict": lambda: model.predict(x, verbose=0),
        "cell": lambda: cell(x, y),
    }.get(way) or (lambda: trained.train(1, data, verbose=0))
    run()
    run()
    for dtype in ("float16", "float32"):
        seen.clear()
        if way == "a layer of a Model":
            amp.to_float(model.layers[1], dtype)
        else:
            amp.auto_mixed_precision(model, "O3") if dtype == "float16" else amp.to_float(model, dtype)
        run()
        assert set(seen) == {dtype}


def test_a_normalization_layer_at_the_input_gets_values_that_half_precision_would_round(keras):
    mean = keras.initializers.Constant(2048.0)
    model = keras.Sequential([keras.Input((1,)), keras.layers.BatchNormalization(moving_mean_initializer=mean)])
    amp.auto_mixed_precision(model, "O2")
    assert float(model(tf.constant([[2049.0]]))[0, 0]) == pytest.approx(1.0, rel=1e-2)  # float16 rounds 2049 to 2048


def test_constants_of_a_layer_are_as_before_after_the_way_back(keras):
    class Own(keras.layers.Layer):
        def build(self, shape):
            self.constant = tf.constant([1.1, 2.2, 100000.0])

        def call(self, inputs):
            return inputs * tf.cast(self.constant, inputs.dtype)

    model, inputs = keras.Sequential([keras.Input((3,)), Own()]), np.array([[1.0, 2.0, 3.0]], "float32")
    for constant in ([1.1, 2.2, 100000.0], [3.3, 4.4, 5.5], [1.1, 2.2, 100000.0]):
        amp.auto_mixed_precision(model, "O2")
        model.layers[-1].constant = tf.constant(constant)  # as `Normalization.adapt` does
        amp.auto_mixed_precision(model, "O2")
        assert np.isinf(model(inputs)[0, 2]) == (constant[2] == 100000.0)  # which is no float16
        amp.to_float(model, "float32")
        np.testing.assert_array_equal(np.array(model(inputs)), inputs * np.float32(constant))


@pytest.mark.parametrize("mode", ["int8", "float8"])
def test_a_quantized_layer_is_refused_and_nothing_is_changed(mode):
    first, last = tf.keras.layers.Dense(4), tf.keras.layers.Dense(2, name="last")
    model = tf.keras.Sequential([tf.keras.Input((3,)), first, tf.keras.layers.LayerNormalization(), last])
    last.quantize(mode)
    x = np.ones((1, 3), "float32")
    before, dtypes = np.asarray(model(x)), amp.dtype_table(model)
    for change in (
        lambda: amp.auto_mixed_precision(model, "O1"),
        lambda: amp.auto_mixed_precision(model, "O2"),
        lambda: amp.to_float(model, "float32"),
        lambda: amp.to_float(last, "float16"),
        lambda: amp.Model(model, "mse", "sgd", amp_level="O2"),
    ):
        with pytest.raises(ValueError, match=rf"'last' is quantized \({mode}\)"):
            change()
    amp.auto_mixed_precision(model, "O0")
    assert amp.dtype_table(model) == dtypes
    np.testing.assert_array_equal(model(x), before)
    assert amp.to_float(first, "float16").compute_dtype == "float16"


@pytest.mark.parametrize("level", ["O1", "auto"])
def test_setting_a_level_again_restores_the_casts_of_a_loaded_model(keras, level, tmp_path):
    inputs = keras.Input((3,))
    output = keras.layers.Dense(4, kernel_initializer="ones")(inputs)
    model = amp.auto_mixed_precision(keras.Model(inputs, output * output), level)
    x = np.full((1, 3), 100.0, "float32")
    model.save(tmp_path / "model.keras")
    copies = [keras.models.load_model(tmp_path / "model.keras"), keras.models.clone_model(model)]
    copies[1].set_weights(model.get_weights())
    for each in (model, *copies):
        amp.auto_mixed_precision(each, level)
        assert each.layers[1].compute_dtype == "float16"
        assert each(x).dtype == "float32"
        assert np.asarray(each(x)).tolist() == [[90000.0] * 4]  # which is no float16
