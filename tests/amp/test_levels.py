"""Which layers compute in half precision, against the recorded levels of MindSpore."""

import copy
import gzip
import json
import pathlib

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tf_lossscale import amp

pytestmark = pytest.mark.wide("the levels in many kinds of layers")

RECORDED = json.loads(
    gzip.decompress((pathlib.Path(__file__).parents[1] / "conformance/data/mindspore_managers.json.gz").read_bytes())
)["auto_mixed_precision"]

LIBRARIES = {"keras3": tf.keras, "tf_keras": tf_keras}

# (level, layer) -> why the recorded dtype is not ours. Keras casts a layer's inputs when it is called, and a layer
# computes all of its operations in one dtype.
DIFFERENCES = {
    ("auto", "fc1", "BiasAdd"): "a Dense layer of Keras multiplies and adds its bias in one dtype",
    ("auto", "fc2", "BiasAdd"): "the same",
    ("auto", "fc3", "BiasAdd"): "the same",
}


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


@pytest.mark.first
@pytest.mark.parametrize("built", [False, True], ids=["new", "built"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "auto"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_each_layer_of_lenet_computes_in_the_recorded_dtype(library, level, built):
    model = lenet(LIBRARIES[library])
    images = np.ones((2, 32, 32, 1), "float32")
    if built:
        model(images)
    assert amp.auto_mixed_precision(model, level) is model
    output = model(images)
    dtypes = {layer.name: str(layer.compute_dtype).capitalize() for layer in model.layers}
    for layer, operation, dtype in RECORDED[f"LeNet5 {level} float16 train"]["ok"]["compute_summary"]:
        if (level, layer, operation) in DIFFERENCES:
            assert dtypes[layer] != dtype, "no longer a difference: take it out of the table"
        else:
            assert dtypes[layer] == dtype, (layer, operation)
    assert output.dtype == model.layers[-1].compute_dtype
    assert {tf.as_dtype(v.dtype) for v in model.variables} == {tf.float32}


@pytest.mark.parametrize("library", LIBRARIES)
def test_half_precision_changes_the_numbers_a_little(library):
    model = lenet(LIBRARIES[library])
    images = np.random.default_rng(0).normal(size=(4, 32, 32, 1)).astype("float32")
    full = np.asarray(amp.auto_mixed_precision(model, "O0")(images))
    half = np.asarray(tf.cast(amp.auto_mixed_precision(model, "O2")(images), tf.float32))
    assert 0 < np.abs(full - half).max() < 0.02
    np.testing.assert_array_equal(np.asarray(amp.to_float(model, "float32")(images)), full)


@pytest.mark.parametrize("library", LIBRARIES)
def test_bfloat16_can_be_chosen(library):
    model = amp.auto_mixed_precision(lenet(LIBRARIES[library]), "O2", dtype="bfloat16")
    assert model.get_layer("fc1").compute_dtype == "bfloat16"
    assert model.get_layer("bn1").compute_dtype == "float32"


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_layer_set_by_hand_stays_in_o1_and_auto_and_not_in_o2_and_o3(library):
    for level, expected in (("O1", "float32"), ("auto", "float32"), ("O2", "float16"), ("O3", "float16")):
        model = lenet(LIBRARIES[library])
        amp.to_float(model.get_layer("fc1"), "float32")
        amp.auto_mixed_precision(model, level)
        assert model.get_layer("fc1").compute_dtype == expected, level


@pytest.mark.first
@pytest.mark.parametrize("library", LIBRARIES)
def test_level_o0_changes_nothing_and_o1_and_auto_change_only_what_they_name(library):
    keras = LIBRARIES[library]
    for level, expected in (("O0", "float32"), ("O1", "float16"), ("auto", "float16")):
        layers = [keras.layers.BatchNormalization(dtype="mixed_float16"), keras.layers.Dense(3)]
        model = keras.Sequential([*layers, amp.to_float(keras.layers.Softmax(), "bfloat16")])
        amp.auto_mixed_precision(model, level)
        assert [layer.compute_dtype for layer in model.layers] == ["float16", expected, "bfloat16"], level


@pytest.mark.parametrize("library", LIBRARIES)
def test_models_within_models_are_looked_into(library):
    keras = LIBRARIES[library]
    inner = keras.Sequential([keras.layers.Dense(2, name="inner_dense"), keras.layers.BatchNormalization(name="norm")])
    model = amp.auto_mixed_precision(keras.Sequential([inner, keras.layers.Dense(1, name="outer")]), "O2")
    assert [row[:1] + row[2:] for row in amp.dtype_table(model)] == [
        ("inner_dense", "float16", "float32"),
        ("norm", "float32", "float32"),
        ("outer", "float16", "float32"),
    ]


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_layer_with_an_attribute_layers_is_set_with_all_of_its_parts(library):
    keras = LIBRARIES[library]

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


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_parts_of_a_layer_follow(library):
    keras = LIBRARIES[library]
    model = keras.Sequential([keras.layers.LSTM(3, name="lstm"), keras.layers.Dense(1, name="out")])
    model(np.ones((2, 4, 3), "float32"))
    amp.auto_mixed_precision(model, "O2")
    assert [row[2] for row in amp.dtype_table(model)] == ["float16"] * 3
    assert model(np.ones((2, 4, 3), "float32")).dtype == "float16"


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


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_the_states_of_a_recurrent_layer_have_one_dtype(library, level):
    for layer, in_half in recurrent(LIBRARIES[library]):
        model = amp.auto_mixed_precision(LIBRARIES[library].Sequential([layer]), level)
        assert np.isfinite(model(np.ones((2, 4, 3), "float32")).numpy()).all()
        dtypes = {row[0]: row[2] for row in amp.dtype_table(model) if "cell" in row[0]}
        assert set(dtypes.values()) == {"float16" if in_half or level == "O2" else "float32"}, dtypes


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "auto"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_layers_of_many_parts_and_constants_compute_at_every_level(library, level):
    keras = LIBRARIES[library]

    class Attending(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.attention = keras.layers.MultiHeadAttention(2, 3)

        def call(self, values):
            return self.attention(values, values)

    inputs = keras.Input((5, 6))
    model = keras.Model(inputs, Attending()(keras.layers.Normalization(mean=1.0, variance=4.0)(inputs)))
    values = np.random.default_rng(0).normal(size=(2, 5, 6)).astype("float32")
    full = model(values).numpy()
    half = amp.auto_mixed_precision(model, level)(values)
    np.testing.assert_allclose(half.numpy().astype("float32"), full, atol=2e-2)
    assert {row[2] for row in amp.dtype_table(model) if "attention" in row[0]} == {"float16"}


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_layer_set_by_hand_is_set_with_its_parts(library):
    keras = LIBRARIES[library]
    layer = amp.to_float(keras.layers.LSTM(2), "float16")
    assert layer.cell.compute_dtype == "float16"
    amp.to_float(layer, "float32")
    model = amp.auto_mixed_precision(keras.Sequential([layer, keras.layers.Dense(1)]), "O1")
    assert [row[2] for row in amp.dtype_table(model)] == ["float32", "float32", "float16"]


@pytest.mark.parametrize("built", [False, True], ids=["new", "built"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_every_normalization_and_variables_of_the_model_itself_compute_in_half(library, built):
    keras = LIBRARIES[library]

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


# A small network of MindSpore's recording: one layer of it was set to float32 by hand.
@pytest.mark.parametrize("level", ["O0", "O2", "auto"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_each_layer_of_a_nested_network_computes_in_the_recorded_dtype(library, level):
    keras = LIBRARIES[library]
    layers = keras.layers
    body = [layers.Conv2D(4, 3, name="body.0"), layers.BatchNormalization(name="body.1"), layers.ReLU(name="body.2")]
    head = [layers.Flatten(), layers.LayerNormalization(name="ln"), layers.Dense(3, name="fc")]
    model = keras.Sequential([keras.Sequential(body), *head, layers.Dense(2, name="fixed")])
    amp.to_float(model.layers[-1], "float32")
    amp.auto_mixed_precision(model, level)
    assert model(np.ones((2, 6, 6, 1), "float32")).shape == (2, 2)
    dtypes = {name: dtype.capitalize() for name, _, dtype, _ in amp.dtype_table(model)}
    for layer, operation, dtype in RECORDED[f"SeqNet {level} float16 train"]["ok"]["compute_summary"]:
        if not (level == "auto" and (layer, operation) in {("body.0", "BiasAdd"), ("fc", "BiasAdd")}):
            assert dtypes[layer] == dtype, (layer, operation)


def test_the_result_is_a_table():
    table = amp.dtype_table(amp.auto_mixed_precision(lenet(tf.keras), "O2"))
    assert table[1] == ("bn1", "BatchNormalization", "float32", "float32")


@pytest.mark.first
@pytest.mark.parametrize("level", ["O4", "o1", 1, None])
def test_an_unknown_level_is_a_value_error_and_changes_nothing(level):
    model = lenet(tf.keras)
    with pytest.raises(ValueError, match="is not supported"):
        amp.auto_mixed_precision(model, level)
    assert {layer.compute_dtype for layer in model.layers} == {"float32"}


def test_a_dtype_of_tensorflow_or_numpy_is_taken():
    for dtype in (tf.bfloat16, tf.bfloat16.as_numpy_dtype):
        assert amp.to_float(tf.keras.layers.Dense(1), dtype).compute_dtype == "bfloat16"
    for dtype in (np.float16, np.dtype("float16"), tf.float16):
        assert amp.to_float(tf.keras.layers.Dense(1), dtype).compute_dtype == "float16"
    model = amp.auto_mixed_precision(tf.keras.Sequential([tf.keras.layers.Dense(1)]), "O3", dtype=tf.float16)
    assert model.layers[0].compute_dtype == "float16"


@pytest.mark.first
def test_bad_networks_and_dtypes_are_refused():
    with pytest.raises(TypeError, match="must be a Keras model"):
        amp.auto_mixed_precision(5, "auto")
    with pytest.raises(ValueError, match="float16, bfloat16"):
        amp.auto_mixed_precision(lenet(tf.keras), "O0", dtype="float32")
    for dtype in ("int8", np.float64, 19, None, "x"):
        with pytest.raises(ValueError, match="float32, float16, bfloat16"):
            amp.to_float(tf.keras.layers.Dense(1), dtype)
    with pytest.raises(TypeError, match="layer"):
        amp.to_float(3, "float16")


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

    return keras.Sequential([layers.Dense(8), TransformerBlock(), layers.GlobalAveragePooling1D(), layers.Dense(1)])


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


@pytest.mark.parametrize("network", [transformer, residual, functional, states])
@pytest.mark.parametrize("level", ["O1", "O2", "O3", "auto"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_layers_in_half_precision_and_float32_are_added_in_a_network_of_ones_own(library, level, network):
    keras = LIBRARIES[library]
    model, x = network(keras), np.random.default_rng(0).normal(size=(4, 5, 6)).astype("float32")
    full = np.asarray(model(x))
    trained = amp.Model(model, "mse", keras.optimizers.SGD(0.0), amp_level=level)
    np.testing.assert_allclose(trained.predict(x), full, atol=5e-2)
    if level == "O1" or network is not functional:  # one in each library is enough: it takes seconds
        trained.train(1, tf.data.Dataset.from_tensors((x, np.zeros((4, 1), "float32"))))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.cast(model(x), tf.float32))
    assert None not in tape.gradient(loss, model.trainable_variables)
    assert any("float16" in row[2] for row in amp.dtype_table(model))
    amp.auto_mixed_precision(model, "O1")  # whatever was set before
    model(x)
    np.testing.assert_array_equal(amp.to_float(model, "float32")(x), full)


@pytest.mark.parametrize("library", LIBRARIES)
def test_layers_return_the_dtype_that_the_recording_has(library):
    layers = LIBRARIES[library].layers
    for level, expected in (("O1", "float32"), ("auto", "float32"), ("O2", "float16"), ("O3", "float16")):
        dense, norm = layers.Dense(2), layers.LayerNormalization()
        amp.auto_mixed_precision(LIBRARIES[library].Sequential([dense, norm]), level)
        assert dense(tf.ones((1, 2))).dtype == expected, level
        assert norm(tf.ones((1, 2))).dtype == expected, level


def test_a_copy_of_a_layer_computes_with_its_own_weights():
    # A copy of a tf_keras layer in half precision raises, with levels or without: it has lost the casts of variables.
    dense = tf.keras.layers.Dense(1, use_bias=False)
    amp.auto_mixed_precision(tf.keras.Sequential([dense]), "O1")
    dense(tf.ones((1, 1)))
    dense.set_weights([np.ones((1, 1))])
    again = copy.deepcopy(dense)
    again.set_weights([np.full((1, 1), 3.0)])
    assert [float(each(tf.ones((1, 1)))[0, 0]) for each in (dense, again)] == [1.0, 3.0]


@pytest.mark.parametrize("library", LIBRARIES)
def test_an_error_of_a_layer_that_mixes_dtypes_itself_names_the_layer_and_to_float_mends_it(library):
    keras = LIBRARIES[library]

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


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("way", ["fit", "evaluate", "predict", "Model", "a layer of a Model", "cell"])
def test_a_level_counts_for_a_model_that_has_already_run(library, way):
    keras, seen = LIBRARIES[library], []

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


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_normalization_layer_at_the_input_gets_values_that_half_precision_would_round(library):
    keras = LIBRARIES[library]
    mean = keras.initializers.Constant(2048.0)
    model = keras.Sequential([keras.Input((1,)), keras.layers.BatchNormalization(moving_mean_initializer=mean)])
    amp.auto_mixed_precision(model, "O2")
    assert float(model(tf.constant([[2049.0]]))[0, 0]) == pytest.approx(1.0, rel=1e-2)  # float16 rounds 2049 to 2048


TOKENS = np.array([[1, 2, 0, 0], [3, 1, 2, 0]])


def attention_of_tokens(keras):
    tokens = keras.Input((4,), dtype="int32")
    embedded = keras.layers.Embedding(5, 4, mask_zero=True)(tokens)
    return keras.Model(tokens, keras.layers.MultiHeadAttention(2, 4)(embedded, embedded))


def model_of_ones_own(keras):
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.recurrent = keras.layers.LSTM(3)

        def call(self, inputs):
            return self.recurrent(inputs)

    tokens = keras.Input((4,), dtype="int32")
    embedded = keras.layers.Embedding(5, 4, mask_zero=True)(tokens)
    return keras.Model(tokens, Own()(keras.layers.LayerNormalization()(embedded)))


@pytest.mark.parametrize("network", [attention_of_tokens, model_of_ones_own])
@pytest.mark.parametrize("level", ["O1", "O2", "O3", "auto"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_padding_is_masked_at_every_level(library, level, network):
    model = network(LIBRARIES[library])
    random = np.random.RandomState(0)
    model.set_weights([random.normal(0, 0.5, weight.shape) for weight in model.get_weights()])
    expected = np.array(model(TOKENS))
    amp.auto_mixed_precision(model, level)
    np.testing.assert_allclose(np.array(model(TOKENS), "float32"), expected, atol=5e-3)
    amp.to_float(model, "float32")
    np.testing.assert_array_equal(np.array(model(TOKENS)), expected)


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_constants_of_a_layer_are_as_before_after_the_way_back(library, level):
    keras = LIBRARIES[library]

    class Own(keras.layers.Layer):
        def build(self, shape):
            self.constant = tf.constant([1.1, 2.2, 100000.0])

        def call(self, inputs):
            return inputs * tf.cast(self.constant, inputs.dtype)

    model = keras.Sequential([keras.Input((3,)), Own()])
    inputs = np.array([[1.0, 2.0, 3.0]], "float32")
    expected = np.array(model(inputs))
    amp.auto_mixed_precision(model, level)
    assert np.isinf(model(inputs)[0, 2])
    model.layers[-1].constant = new = tf.constant([3.3, 4.4, 5.5])  # as `Normalization.adapt` does
    amp.auto_mixed_precision(model, level)
    amp.to_float(model, "float32")
    np.testing.assert_array_equal(np.array(model(inputs)), inputs * new)
    model.layers[-1].constant = tf.constant([1.1, 2.2, 100000.0])
    amp.auto_mixed_precision(model, level)
    amp.to_float(model, "float32")
    np.testing.assert_array_equal(np.array(model(inputs)), expected)


@pytest.mark.parametrize("mode", ["int8", "float8"])
def test_a_quantized_layer_is_refused_and_nothing_is_changed(mode):
    keras = tf.keras
    layers = [
        keras.layers.Dense(4, name="first"),
        keras.layers.LayerNormalization(),
        keras.layers.Dense(2, name="last"),
    ]
    model = keras.Sequential([keras.Input((3,)), *layers])
    layers[-1].quantize(mode)
    x = np.ones((1, 3), "float32")
    before, dtypes = np.asarray(model(x)), [layer.dtype_policy.name for layer in layers]
    for change in (
        lambda: amp.auto_mixed_precision(model, "O1"),
        lambda: amp.auto_mixed_precision(model, "O2"),
        lambda: amp.to_float(model, "float32"),
        lambda: amp.to_float(layers[-1], "float16"),
        lambda: amp.Model(model, "mse", "sgd", amp_level="O2"),
    ):
        with pytest.raises(ValueError, match=rf"'last' is quantized \({mode}\)"):
            change()
    amp.auto_mixed_precision(model, "O0")
    assert [layer.dtype_policy.name for layer in layers] == dtypes
    np.testing.assert_array_equal(model(x), before)
    assert amp.to_float(layers[0], "float16").compute_dtype == "float16"


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("level", ["O1", "auto"])
def test_setting_a_level_again_restores_the_casts_of_a_loaded_model(library, level, tmp_path):
    keras = LIBRARIES[library]
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
