"""`keep_state`: the forward pass of a skipped step leaves nothing in a model's non-trainable variables."""

import gc
import sys
import threading

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_lossscale
from tests import strategies
from tests.cases import combinations, named
from tf_lossscale.core import skipping

FINE = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
OVERFLOWING = FINE.copy()
OVERFLOWING[5] = np.inf
BOTH = np.concatenate([FINE, OVERFLOWING])
WAYS = {"eager": lambda step: step, "function": tf.function, "XLA": tf.function(jit_compile=True)}
LIBRARIES = {"keras3": tf.keras, "tf_keras": tf_keras}
libraries = pytest.mark.parametrize("keras", LIBRARIES.values(), ids=LIBRARIES)


def model_of(keras=tf.keras):
    return keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])


def wrapped(keras=tf.keras, **options):
    return tf_lossscale.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=8, **options)


def step_of(model, optimizer):
    """Returns a function that takes a training step."""

    def step(x):
        optimizer.minimize(lambda: tf.reduce_mean(model(x, training=True) ** 2), model.trainable_variables)

    return step


def state(model):
    return [np.array(weight) for weight in model.layers[0].get_weights()[2:]]


def warnings_in(caplog):
    return [message for message in caplog.messages if "keep_state" in message]


def fit(model, x, batch_size=8):
    return model.fit(x, np.ones((len(x), 1), "float32"), batch_size=batch_size, shuffle=False, verbose=0)


@libraries
@pytest.mark.parametrize("way", WAYS)
def test_a_skipped_step_leaves_no_trace_and_an_applied_step_does(keras, way, caplog):
    model, optimizer = model_of(keras), wrapped(keras)
    step = WAYS[way](tf_lossscale.keep_state(model, optimizer)(step_of(model, optimizer)))
    start = state(model)
    step(tf.constant(OVERFLOWING))
    np.testing.assert_array_equal(state(model), start)
    step(tf.constant(FINE))
    after = state(model)
    assert np.abs(np.subtract(after, start)).max() > 0
    step(tf.constant(OVERFLOWING))
    np.testing.assert_array_equal(state(model), after)
    assert int(optimizer.skipped_steps) == 2
    assert not warnings_in(caplog)


@libraries
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_fit_restores_the_state_and_keeps_metrics(keras, run_eagerly):
    model = model_of(keras)
    model.compile(wrapped(keras), "mse", metrics=["mae"], run_eagerly=run_eagerly)
    model.train_step = tf_lossscale.keep_state(model)(model.train_step)
    history = fit(model, BOTH)
    assert int(model.optimizer.skipped_steps) == 1
    assert np.isfinite(state(model)).all()
    assert np.isnan(history.history["mae"][0])


@libraries
def test_the_states_of_a_stateful_rnn_layer_are_restored(keras):
    cell = keras.layers.LSTM(3, stateful=True)
    model = keras.Sequential([keras.Input(batch_shape=(2, 3, 2)), cell, keras.layers.Dense(1)])
    model.compile(wrapped(keras), "mse")
    model.train_step = tf_lossscale.keep_state(model)(model.train_step)
    x = np.ones((12, 3, 2), "float32")
    x[4] = np.inf
    fit(model, x, batch_size=2)
    assert int(model.optimizer.skipped_steps) == 1
    assert np.isfinite([np.array(each) for each in cell.states]).all()


@libraries
def test_a_metric_of_the_model_keeps_what_a_skipped_step_added(keras):
    class Tracking(keras.Model):
        def __init__(self):
            super().__init__()
            self.tracker, self.dense = keras.metrics.Sum(), keras.layers.Dense(1)

        def call(self, x, training=False):
            self.tracker.update_state(1.0)
            return self.dense(x)

    model, optimizer = Tracking(), wrapped(keras)
    step = tf_lossscale.keep_state(model, optimizer)(step_of(model, optimizer))
    model(FINE)
    for x in (FINE, OVERFLOWING, OVERFLOWING):
        step(tf.constant(x))
    assert (int(optimizer.skipped_steps), float(model.tracker.result())) == (2, 4.0)


@libraries
def test_the_state_of_every_replica_is_restored(keras):
    with strategies.get("mirrored_2").scope():
        model = model_of(keras)
        model.compile(wrapped(keras), "mse")
        model.train_step = tf_lossscale.keep_state(model)(model.train_step)
    fit(model, np.concatenate([FINE, FINE]), batch_size=16)
    before = state(model)
    fit(model, BOTH, batch_size=16)  # only the rows of the second replica overflow
    assert int(model.optimizer.skipped_steps) == 1
    np.testing.assert_array_equal(state(model), before)


def test_a_step_function_with_python_control_flow_on_tensors_is_still_converted():
    model, optimizer = model_of(), wrapped()

    @tf.function
    @tf_lossscale.keep_state(model, optimizer)
    def step(x):
        if tf.reduce_sum(x) > 1e6:
            x = tf.zeros_like(x)
        step_of(model, optimizer)(x)

    step(tf.constant(OVERFLOWING))
    assert int(optimizer.skipped_steps) == 0


def test_an_error_in_the_step_passes_through():
    with pytest.raises(KeyError), tf_lossscale.keep_state(model_of(), wrapped()):
        raise KeyError("data")


def test_around_a_tf_function_it_restores_and_warns_of_nothing(caplog):
    model, optimizer = model_of(), wrapped()
    step = tf_lossscale.keep_state(model, optimizer)(tf.function(step_of(model, optimizer)))
    for _ in range(3):
        step(tf.constant(OVERFLOWING))
    assert np.isfinite(state(model)).all()
    assert not warnings_in(caplog)


def test_a_module_without_keras():
    module, optimizer = tf.Module(), wrapped()
    module.weight, module.mean = tf.Variable(1.0), tf.Variable(0.0, trainable=False)
    with tf_lossscale.keep_state(module, optimizer):
        module.mean.assign(np.inf)
        optimizer.minimize(lambda: module.weight * module.mean, [module.weight])
    assert module.mean.numpy() == 0.0


def test_a_tf1_graph_is_refused():
    keeping = tf_lossscale.keep_state(model_of(), wrapped())
    with tf.Graph().as_default(), pytest.raises(RuntimeError, match="TF1 graph"), keeping:
        pass


@libraries
def test_a_model_that_is_not_built_is_refused(keras):
    model = keras.Sequential([keras.layers.Dense(1)])
    with pytest.raises(ValueError, match="needs a built model"), tf_lossscale.keep_state(model, wrapped(keras)):
        pass


@pytest.mark.parametrize("models", [[lambda x: x], [], [tf.keras.optimizers.SGD(0.1)]], ids=["function", "none", "SGD"])
def test_what_is_no_model_is_refused(models):
    with pytest.raises(TypeError, match=r"needs Keras models.*Write @keep_state\(model\)"):
        tf_lossscale.keep_state(*models)


def layer_with(where):
    """A Keras 3 layer that writes the largest input into a variable, and a function that returns the variable."""

    class Layer(tf.keras.layers.Layer):
        def build(self, shape):
            self.kernel = self.add_weight(shape=(), initializer="ones")
            variable = tf.Variable(0.0, trainable=False)
            if where == "module":
                self.held = tf.Module()
                self.held.variable = variable
            else:
                self.held = {"attribute": variable, "list": [[variable]], "dict": {"a": variable}}[where]

        def call(self, x):
            written().assign(tf.reduce_max(x))
            return x * self.kernel

    def written():
        parts = {"attribute": lambda held: held, "list": lambda held: held[0][0], "dict": lambda held: held["a"]}
        return parts.get(where, lambda held: held.variable)(layer.held)

    layer = Layer()
    return layer, written


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("where", ["attribute", "list", "dict", "module"])
def test_a_variable_of_a_layer_is_restored_wherever_it_is(where, way):
    layer, written = layer_with(where)
    inputs = tf.keras.Input((1,))
    model, optimizer = tf.keras.Model(inputs, layer(inputs)), wrapped()
    optimizer.build(model.trainable_variables)
    step = WAYS[way](tf_lossscale.keep_state(model)(step_of(model, optimizer)))
    step(tf.constant([[3.0]])), step(tf.constant([[np.inf]]))
    assert float(written()) == 3.0


@pytest.mark.parametrize(
    ("keras", "way", "passes", "bad"),
    combinations(named(LIBRARIES), WAYS, ["one", "two", "two functions"], ["generator", "critic"], usual=7),
)
def test_the_step_of_a_gan_restores_both_networks(keras, way, passes, bad):
    if passes == "two functions" and way == "XLA":
        pytest.skip("the functions are compiled as one")
    layers = keras.layers
    generator = keras.Sequential([keras.Input((4,)), layers.BatchNormalization(), layers.Dense(4)])
    critic, optimizers = model_of(keras), [wrapped(keras) for _ in range(2)]
    for model, optimizer in zip((generator, critic), optimizers):
        optimizer.build(model.trainable_variables)

    def scaled_and_applied(model, optimizer, loss_fn):
        with tf.GradientTape() as tape:
            scaled = optimizer.get_scaled_loss(loss_fn())
        gradients = tape.gradient(scaled, model.trainable_variables)
        optimizer.apply_gradients(zip(optimizer.get_unscaled_gradients(gradients), model.trainable_variables))

    def critic_step(z):
        scaled_and_applied(
            critic, optimizers[1], lambda: tf.reduce_mean(critic(generator(z, training=True), training=True))
        )

    def generator_step(z):
        scaled_and_applied(
            generator, optimizers[0], lambda: -tf.reduce_mean(critic(generator(z, training=True), training=True))
        )

    wrap = tf.function if passes == "two functions" else (lambda step: step)
    steps = [wrap(critic_step), wrap(generator_step)][: 1 if passes == "one" else 2]
    whole = lambda *noise: [step(z) and None for step, z in zip(steps, noise)] and None  # noqa: E731
    whole = WAYS[way](tf_lossscale.keep_state(generator, critic)(whole))
    fine, overflowing = tf.constant(FINE), tf.constant(OVERFLOWING)
    whole(fine, fine)
    whole(*((overflowing, fine) if bad == "critic" or passes == "one" else (fine, overflowing)))
    assert sum(int(optimizer.skipped_steps) for optimizer in optimizers) >= 1
    whole(fine, fine)
    for model in (generator, critic):
        assert all(np.isfinite(np.array(weight)).all() for weight in model.get_weights())


@pytest.mark.parametrize("way", WAYS)
def test_an_average_that_is_updated_after_the_step_stays_finite(way):
    model, average, optimizer = model_of(), model_of(), wrapped()
    optimizer.build(model.trainable_variables)

    def step(x):
        step_of(model, optimizer)(x)
        for weight, mean in zip(model.weights, average.weights):
            mean.assign(0.5 * mean + 0.5 * weight)

    step = WAYS[way](tf_lossscale.keep_state(model)(step))
    for x in (FINE, OVERFLOWING, FINE):
        step(tf.constant(x))
    assert all(np.isfinite(weight).all() for weight in average.get_weights())


@libraries
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_around_the_strategys_run_each_copy_gets_its_own_value_back(keras, compiled):
    strategy = strategies.get("mirrored_2")
    with strategy.scope():
        model, optimizer = model_of(keras), wrapped(keras)
        optimizer.build(model.trainable_variables)
    step = tf_lossscale.keep_state(model)(lambda x: strategy.run(step_of(model, optimizer), args=(x,)) and None)
    step = tf.function(step) if compiled else step

    def copies():
        mean = model.layers[0].moving_mean
        return [np.array(copy) for copy in strategy.experimental_local_results(getattr(mean, "_value", mean))]

    def of(*values):
        return strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(values[context.replica_id_in_sync_group])
        )

    step(of(FINE, 3 * FINE))
    before = copies()
    step(of(FINE, OVERFLOWING))
    np.testing.assert_array_equal(copies(), before)
    assert int(optimizer.skipped_steps) == 1


def test_a_model_without_a_call_method_is_built_by_its_layers():
    class Trainer(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.net = model_of()

        def train_step(self, data):
            step_of(self.net, self.optimizer)(data[0])
            return {"loss": 0.0}

    model = Trainer()
    model.compile(wrapped())
    model.train_step = tf_lossscale.keep_state(model)(model.train_step)
    fit(model, BOTH)
    assert int(model.optimizer.skipped_steps) == 1
    assert np.isfinite(state(model.net)).all()


@libraries
def test_without_it_the_monitor_names_the_variables_once_and_its_remedy_works_after_fit(keras, caplog):
    model = model_of(keras)
    model.compile(wrapped(keras), "mse")
    start, monitor = model.get_weights(), tf_lossscale.LossScaleMonitor()
    model.fit(BOTH, np.ones((16, 1)), batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=[monitor])
    (said,) = warnings_in(caplog)
    assert "moving_mean" in said and "moving_variance" in said
    for statement in said.split(": ")[-1].removesuffix(".").split(", then "):
        exec(statement, {"model": model, "tf_lossscale": tf_lossscale})
    model.set_weights(start)
    fit(model, BOTH)
    assert int(model.optimizer.skipped_steps) == 3
    assert np.isfinite(state(model)).all()


class WithPlainObject(tf.Module):
    """A module that holds a plain object, which holds a variable and a layer."""

    def __init__(self, keras):
        super().__init__()
        self.weight = tf.Variable(1.0)
        self.held = type("Plain", (), {})()
        self.held.seen = tf.Variable(0.0, trainable=False)
        self.held.norm = keras.layers.BatchNormalization()
        self.held.norm.build((None, 1))

    def __call__(self, x):
        self.held.seen.assign(tf.reduce_max(x))
        return self.weight * self.held.norm(x, training=True)


@libraries
def test_the_variables_of_plain_objects_are_restored(keras):
    model, optimizer = WithPlainObject(keras), wrapped()
    step = tf_lossscale.keep_state(model)(
        lambda x: optimizer.minimize(lambda: tf.reduce_mean(model(x)), [model.weight])
    )
    step(tf.constant([[3.0]])), step(tf.constant([[np.inf]]))
    assert int(optimizer.skipped_steps) == 1
    assert float(model.held.seen) == 3.0
    assert np.isfinite(model.held.norm.get_weights()).all()


@pytest.mark.parametrize("inner", [lambda step: step, tf.function], ids=["whole", "inner function"])
def test_a_with_block_in_a_function_restores_the_state(inner):
    model, optimizer = model_of(), wrapped()
    optimizer.build(model.trainable_variables)
    inner_step = inner(step_of(model, optimizer))

    @tf.function
    def step(x):
        with tf_lossscale.keep_state(model):
            inner_step(x)

    step(tf.constant(FINE))
    before = state(model)
    gc.collect()  # the variable with which a function inside says that it skipped is held by the graph
    step(tf.constant(OVERFLOWING))
    np.testing.assert_array_equal(state(model), before)


@pytest.mark.slow
def test_a_step_restores_only_the_models_of_its_own_thread():
    class Holding(tf.Module):
        def __init__(self):
            super().__init__()
            self.mean = tf.Variable(0.0, trainable=False)

    lost, errors = [], []

    def train():
        try:
            models, scale = (Holding(), Holding()), tf_lossscale.DynamicLossScale()

            @tf_lossscale.keep_state(models[0])
            @tf_lossscale.keep_state(models[1])
            def step():
                models[1].mean.assign(float("nan"))
                return scale.step([tf.constant(np.inf)], lambda gradients: None)

            for _ in range(30):
                step()
                lost.extend(model for model in models if model.mean.numpy() != 0.0)
        except Exception as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=train) for _ in range(8)]
        [thread.start() for thread in threads], [thread.join() for thread in threads]
    finally:
        sys.setswitchinterval(interval)
    assert (lost, errors) == ([], [])


@pytest.mark.slow
def test_an_interrupt_at_any_line_leaves_no_watcher_behind():
    model, optimizer = model_of(), wrapped()
    step = tf_lossscale.keep_state(model)(step_of(model, optimizer))
    step(tf.constant(FINE))
    files = {sys.modules["tf_lossscale.training.keep_state"].__file__, skipping.__file__}
    at, lines = 0, 0

    def tracer(frame, event, argument):
        nonlocal lines
        if frame.f_code.co_filename not in files:
            return None
        lines += event == "line"
        if event == "line" and lines == at:
            raise KeyboardInterrupt
        return tracer

    interrupted = True
    while interrupted:
        at, lines, interrupted = at + 1, 0, False
        sys.settrace(tracer)
        try:
            step(tf.constant(OVERFLOWING))
        except KeyboardInterrupt:
            interrupted = True
        finally:
            sys.settrace(None)
        assert skipping._watching() == [], at
    assert at > 50
    before = state(model)
    step(tf.constant(OVERFLOWING))
    np.testing.assert_array_equal(state(model), before)


@pytest.mark.slow
@pytest.mark.parametrize("keras", [tf.keras, tf_keras], ids=["keras3", "tf_keras"])
def test_the_monitor_names_statistics_that_are_not_finite_on_the_second_replica_only(keras, caplog):
    with strategies.get("mirrored_2").scope():
        model = model_of(keras)
        model.compile(wrapped(keras), "mse")
    x = np.concatenate([FINE, OVERFLOWING])  # only the rows of the second replica overflow
    model.fit(x, np.ones((16, 1)), 16, shuffle=False, verbose=0, callbacks=[tf_lossscale.LossScaleMonitor()])
    (said,) = warnings_in(caplog)
    assert "moving_mean" in said and "moving_variance" in said


def test_an_interrupt_after_a_skipped_step_keeps_its_statistics_out_and_the_next_ones_in():
    model = tf_keras.Sequential([tf_keras.layers.BatchNormalization(), tf_keras.layers.Dense(1)])
    model.build((None, 1))
    optimizer = tf_lossscale.LossScaleOptimizer(tf_keras.optimizers.SGD(0.1))

    @tf.function
    def step(x):
        optimizer.minimize(lambda: tf.reduce_mean(model(x, training=True) ** 2), model.trainable_variables)

    @tf_lossscale.keep_state(model)
    def train(x, interrupted=False):
        step(tf.constant([[x], [1.0]]))
        if interrupted:
            raise KeyboardInterrupt

    statistics = model.layers[0].moving_mean
    train(3.0)
    before = statistics.numpy()
    with pytest.raises(KeyboardInterrupt):
        train(np.inf, interrupted=True)
    assert statistics.numpy() == before
    train(3.0)
    assert statistics.numpy() > before
