"""Adafactor is an optimizer of its Keras like any other: fit, schedules, configs, files, checkpoints, strategies."""

import numpy as np
import pytest
import tensorflow as tf

from tests import numerics, strategies
from tests.cases import combinations
from tests.optimizers.recorded import KERAS, LIBRARIES
from tf_lossscale import LossScaleOptimizer, optimizers


def data(n=64):
    x = np.random.default_rng(0).normal(size=(n, 4)).astype("float32")
    return x, x.sum(axis=1, keepdims=True)


def model_of(keras, policy="float32"):
    keras.utils.set_random_seed(0)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(8, activation="tanh", dtype=policy),
            layers.Dense(1, dtype=policy),
            layers.Activation("linear", dtype="float32"),
        ]
    )


def fit(model, epochs=1, **kwargs):
    return model.fit(*data(), batch_size=16, epochs=epochs, shuffle=False, verbose=0, **kwargs).history["loss"]


def two_groups(make, variables, **kwargs):
    kernels, biases = ([v for v in variables if len(v.shape) == rank] for rank in (2, 1))
    return make([{"params": kernels, "weight_decay": 0.1}, {"params": biases, "lr": 0.02, "d": 2.0}], lr=0.05, **kwargs)


def step(optimizer, variables, seed=0):
    rng = np.random.default_rng(seed)
    optimizer.apply_gradients([(tf.constant(rng.normal(size=v.shape), v.dtype), v) for v in variables])


def weights(seed=1):
    rng = np.random.default_rng(seed)
    return [tf.Variable(rng.normal(size=size).astype("float32")) for size in ((4, 3), (3,), (3, 2), (2,))]


def assert_equal(some, others):
    for a, b in zip(some, others):
        np.testing.assert_array_equal(a, b)


def test_the_class_by_the_short_name_is_that_of_tensorflows_own_keras():
    assert optimizers.Adafactor is LIBRARIES["keras3"]
    assert issubclass(LIBRARIES["keras3"], KERAS["keras3"].optimizers.Optimizer)
    assert issubclass(LIBRARIES["tf_keras"], KERAS["tf_keras"].optimizers.Optimizer)
    assert {"Adafactor", "keras3", "tf_keras"} <= set(dir(optimizers))


def test_a_matrix_has_as_much_state_as_it_has_rows_and_columns(library, make):
    variable = tf.Variable(tf.zeros([1000, 500]))
    optimizer = make([variable])
    optimizer.build([variable])
    state = optimizer.variables if library == "keras3" else optimizer.variables()
    # One each for the number of the matrix's steps and iterations; Keras 3 lists the learning rate too.
    assert sum(v.shape.num_elements() for v in map(tf.convert_to_tensor, state)) == 1000 + 500 + 2 + (
        library == "keras3"
    )


def test_a_schedule_is_followed_by_each_group(make, keras):
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([0, 1], [0.5, 0.25, 0.0])
    first, second = tf.Variable([4.0]), tf.Variable([4.0])
    optimizer = make([{"params": [first]}, {"params": [second], "lr": 0.125}], lr=schedule)
    values = []
    for _ in range(3):
        optimizer.apply_gradients([(tf.constant([1.0]), first), (tf.constant([1.0]), second)])
        values.append((first.numpy().item(), second.numpy().item()))
    assert values[0] == pytest.approx((2.0, 3.5))
    assert values[1][0] == pytest.approx(1.5)
    assert values[2][0] == values[1][0]
    assert values[2][1] < values[1][1]


@pytest.mark.slow
def test_callbacks_that_set_the_learning_rate_are_heard_in_fit(make, keras):
    model = model_of(keras)
    model.compile(make(lr=0.1), "mse")
    before = [w.copy() for w in model.get_weights()]
    fit(model, epochs=2, callbacks=[keras.callbacks.LearningRateScheduler(lambda epoch: 0.0)])
    assert_equal(before, model.get_weights())
    assert float(model.optimizer.learning_rate) == model.optimizer.lr == 0.0


def test_a_new_learning_rate_is_heard_in_a_traced_function_without_another_trace(make):
    variable, traces = tf.Variable([4.0]), []
    optimizer = make([variable], lr=0.5)
    optimizer.build([variable])

    @tf.function
    def train():
        traces.append(1)
        optimizer.apply_gradients([(tf.constant([1.0]), variable)])

    train()
    assert variable.numpy() == pytest.approx([2.0])
    optimizer.param_groups[0]["lr"] = 0.25
    train()
    before = variable.numpy()
    assert before == pytest.approx([1.5])
    optimizer.learning_rate = 0.0
    train()
    assert variable.numpy() == before
    assert len(traces) == 1


# Option -> a value other than the one at the start.
OTHER = {
    "beta2_decay": -0.5,
    "eps": (1e-3, 1e-2),
    "d": 2.0,
    "weight_decay": 0.5,
    "foreach": True,
    "maximize": True,
    "lr": lambda: 0.5,
}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["group", "attribute", "loaded"])
@pytest.mark.parametrize("option", OTHER)
def test_an_option_that_a_traced_function_does_not_see_is_said(library, make, option, way, caplog):
    if option == "lr" and (library, way) != ("keras3", "group"):
        pytest.skip("a number as the learning rate is seen; tf_keras takes no function")
    variable = tf.Variable([1.0, 2.0])
    optimizer = make([variable], lr=0.1)

    def change(value):
        if way == "group":
            optimizer.param_groups[0][option] = value
        elif way == "attribute":
            setattr(optimizer, option, value)
        else:
            state = optimizer.state_dict()
            state["param_groups"][0][option] = value
            optimizer.load_state_dict(state)

    before = optimizer.param_groups[0][option]
    step(optimizer, [variable])
    change(OTHER[option])
    change(before)
    assert "traced" not in caplog.text, "no function was traced"
    tf.function(step)(optimizer, [variable])
    step(optimizer, [variable])
    change(before)
    optimizer.param_groups[0]["lr"] = 0.2
    optimizer.load_state_dict(optimizer.state_dict())
    assert "traced" not in caplog.text, "nothing is other than it was"
    change(OTHER[option])
    assert f"The option '{option}' of a parameter group was set after a tf.function" in caplog.text


def test_options_can_be_set_and_apply_to_the_groups_that_have_none_of_their_own(make):
    variables = weights()
    optimizer = two_groups(make, variables)
    optimizer.weight_decay = 0.5
    optimizer.d = 3.0
    optimizer.learning_rate = 0.5
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.5]
    assert [group["d"] for group in optimizer.param_groups] == [3.0, 2.0]
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.02]
    with pytest.raises(ValueError, match="`d`"):
        optimizer.d = 0.1
    optimizer.weight_decay = None
    assert optimizer.weight_decay == 0.0


@pytest.mark.parametrize("grouped", [False, True], ids=["one group", "two groups"])
def test_a_config_makes_an_optimizer_that_takes_the_same_steps(make, keras, grouped):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    options = {
        "beta2_decay": -0.5,
        "eps": (1e-3, 1e-2),
        "d": 1.5,
        "weight_decay": 0.1,
        "maximize": True,
        "clipnorm": 1.0,
    }
    a, b = weights(), weights()
    original = two_groups(make, a, clipnorm=1.0) if grouped else make(lr=schedule, **options)
    original.build(a)
    config = original.get_config()
    again = make.from_config(config)
    assert again.get_config() == config
    again.build(b)
    for seed in range(3):
        step(original, a, seed)
        step(again, b, seed)
    assert_equal(a, b)
    assert not np.array_equal(a[0], weights()[0])
    assert [group["lr"] for group in again.param_groups[1:]] == [0.02] * grouped


def test_the_config_of_several_groups_needs_a_built_optimizer(make):
    optimizer = two_groups(make, weights())
    with pytest.raises(ValueError, match="this optimizer is not built"):
        optimizer.get_config()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grouped", "builder", "averaged"),
    combinations(
        [False, True],
        ["step", "load_state_dict", "fit"],
        [False, True],
        usual=["True-step-False", "True-load_state_dict-True", "False-fit-True"],
    ),
)
def test_a_loaded_model_has_the_groups_of_the_saved_one_in_whatever_order_they_are(
    make, keras, grouped, builder, averaged, tmp_path
):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), keras.layers.Dense(4)])
    backbone, head = ([layer.kernel, layer.bias] for layer in model.layers)
    x, y = data()[0], data()[0][::-1]

    def new():
        groups = [{"params": head, "lr": 0.1}, {"params": backbone, "lr": 0.0}] if grouped else [*head, *backbone]
        return make(groups, use_ema=averaged, ema_momentum=0.5)

    def take_a_step(optimizer):
        optimizer.step(lambda: tf.reduce_mean((model(x) - y) ** 2))

    def fit(model):
        model.fit(x, y, batch_size=16, shuffle=False, verbose=0)

    optimizer = new()
    if builder == "step":
        take_a_step(optimizer)
    elif builder == "load_state_dict":
        take_a_step(other := new())
        optimizer.load_state_dict(other.state_dict())
    model.compile(optimizer, "mse")
    fit(model)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is make
    assert int(loaded.optimizer.iterations) == int(optimizer.iterations) >= 4
    if builder == "fit":  # the others have built the optimizer in the order of its groups
        after, before = loaded.optimizer.get_config(), optimizer.get_config()
        # In a loaded model, Keras 3 leaves out the names of the enclosing models.
        names = list(zip(before.pop("variable_names"), after.pop("variable_names")))
        assert after == before
        assert [long.endswith(short) for long, short in names] == [True] * 4
    fit(model)
    fit(loaded)
    assert_equal(model.get_weights(), loaded.get_weights())
    assert_equal(optimizer.state_dict()["state"][1].values(), loaded.optimizer.state_dict()["state"][1].values())
    first = loaded.optimizer.param_groups[0]["params"][0]
    assert first is loaded.layers[1].kernel


def test_groups_are_assigned_by_name_and_other_names_are_refused(make):

    def named(*names):
        return [tf.Variable([1.0], name=name) for name in names]

    def again(variables):
        optimizer = make.from_config(original.get_config())
        optimizer.build(variables)
        positions = {id(variable): i for i, variable in enumerate(variables)}
        return [[positions[id(variable)] for variable in group["params"]] for group in optimizer.param_groups]

    head, backbone = named("head/kernel", "backbone/kernel")
    original = make([{"params": [head]}, {"params": [backbone]}])
    original.build([backbone, head])
    assert again(named("backbone/kernel", "head/kernel")) == [[1], [0]]
    assert again(named("head/kernel", "backbone/kernel")) == [[0], [1]]
    assert again(named("model/head/kernel", "model/backbone/kernel", "more/kernel")) == [[0, 2], [1]]
    with pytest.raises(
        ValueError, match=r"\['a/kernel:0', 'b/kernel:0'\], do not match .*load the model in a new process"
    ):
        again(named("a/kernel", "b/kernel"))
    for others in (("one/head/kernel", "two/head/kernel"), ("a/kernel",), ("head/kernel",)):
        with pytest.raises(ValueError, match="do not match the names in the config"):
            again(named(*others))


def test_groups_of_variables_without_names_are_assigned_by_position(make):
    variables, others = ([tf.Variable([1.0]) for _ in range(2)] for _ in range(2))
    original = make([{"params": [variables[1]]}, {"params": [variables[0]]}])
    original.build(variables)
    again = make.from_config(original.get_config())
    again.build(others)
    assert [group["params"][0] is other for group, other in zip(again.param_groups, others[::-1])] == [True, True]


@pytest.mark.parametrize("added", [False, True], ids=["groups of the constructor", "an added group"])
def test_a_checkpoint_goes_on_where_it_was(make, tmp_path, added):

    def new(seed):
        variables = weights(seed)
        optimizer = two_groups(make, variables)
        optimizer.build(variables)
        return tf.train.Checkpoint(optimizer=optimizer, weights=variables), optimizer, variables

    checkpoint, optimizer, variables = new(1)
    if added:
        first, second = optimizer.param_groups
        optimizer = make([first])
        checkpoint.optimizer = optimizer
        step(optimizer, first["params"], 3)
        optimizer.add_param_group(second)
    for seed in range(3):
        step(optimizer, variables, seed)
    optimizer.param_groups[1]["lr"] = 0.01
    path = checkpoint.write(str(tmp_path / "ckpt"))
    other, restored, others = new(2)
    other.read(path).assert_consumed()
    assert restored.param_groups[1]["lr"] == 0.01
    step(optimizer, variables, 3)
    step(restored, others, 3)
    assert_equal(variables, others)
    assert int(restored.iterations) == int(optimizer.iterations) == (5 if added else 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one_device", "mirrored_2", "central_storage"])
@pytest.mark.parametrize("scaled", [False, True], ids=["bare", "in LossScaleOptimizer"])
def test_a_step_over_replicas_is_a_step_over_the_whole_batch(make, name, scaled):
    strategy = strategies.get(name)
    parts = [
        np.random.default_rng(i).normal(size=(4, 3)).astype("float32") for i in range(strategy.num_replicas_in_sync)
    ]
    alone = tf.Variable(tf.ones([4, 3]))
    reference = make(lr=0.05)
    with strategy.scope():
        shared = tf.Variable(tf.ones([4, 3]))
        optimizer = make(lr=0.05)
        optimizer = LossScaleOptimizer(optimizer, initial_scale=8.0) if scaled else optimizer
        optimizer.build([shared]) if not scaled else optimizer.inner_optimizer.build([shared])
    gradients = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(parts[context.replica_id_in_sync_group])
    )

    @tf.function
    def train(gradient):
        if scaled:
            optimizer.get_scaled_loss(tf.constant(0.0))
            (gradient,) = optimizer.get_unscaled_gradients([gradient * optimizer.loss_scale])
        optimizer.apply_gradients([(gradient, shared)])

    for _ in range(3):
        strategy.run(train, args=(gradients,))
        reference.apply_gradients([(tf.constant(sum(parts)), alone)])
    numerics.assert_close(shared.numpy(), alone, 2e-6, tf.ones([4, 3]))


@pytest.mark.parametrize("jit_compile", [False, True])
def test_inside_the_loss_scale_a_step_is_the_same_and_an_overflow_leaves_no_trace(make, jit_compile):
    a, b = weights(), weights()
    bare, inner = two_groups(make, a), two_groups(make, b)
    inner.build(b)
    wrapper = LossScaleOptimizer(inner, initial_scale=1024.0)

    @tf.function(jit_compile=jit_compile)
    def scaled_step(gradients):
        wrapper.scale_loss(tf.constant(0.0))
        wrapper.apply(gradients, b)

    for seed in range(4):
        rng = np.random.default_rng(seed)
        gradients = [tf.constant(rng.normal(size=v.shape), tf.float32) for v in a]
        if seed in (0, 2):
            before = [v.numpy() for v in b], inner.state_dict()
            scaled_step([g * np.inf for g in gradients])
            assert_equal(before[0], b)
            np.testing.assert_equal(inner.state_dict()["state"], before[1]["state"])
        bare.apply_gradients(zip(gradients, a))
        scaled_step([g * wrapper.loss_scale for g in gradients])
        for x, y, start in zip(a, b, weights()):
            numerics.assert_close(x, y, 2e-6 if jit_compile else 0, start)
    assert float(wrapper.loss_scale) == 256.0
    assert wrapper.beta2_decay == -0.8


def test_inside_the_loss_scale_sparse_rows_are_summed_and_a_nan_in_one_skips_the_step(make):
    a, b = weights()[0], weights()[0]
    bare, wrapper = make(lr=0.1), LossScaleOptimizer(make(lr=0.1), initial_scale=2.0)

    def rows(first):
        return tf.IndexedSlices(tf.constant([[first, 1.0, 2.0], [3.0, 4.0, 5.0]]), tf.constant([1, 1]), (4, 3))

    wrapper.scale_loss(tf.constant(0.0))
    wrapper.apply([rows(np.nan)], [b])
    np.testing.assert_array_equal(a, b)
    wrapper.scale_loss(tf.constant(0.0))
    wrapper.apply([rows(1.0)], [b])  # the scale is 1 now
    bare.apply_gradients([(tf.constant([[0.0] * 3, [4.0, 5.0, 7.0], [0.0] * 3, [0.0] * 3]), a)])
    np.testing.assert_array_equal(a, b)


def test_tf_keras_may_compile_the_update_itself():
    a, b = weights(), weights()
    for variables, compiled in ((a, True), (b, False)):
        optimizer = two_groups(LIBRARIES["tf_keras"], variables, jit_compile=compiled)
        step(optimizer, variables, 0)
        step(optimizer, variables, 1)
    for x, y, before in zip(a, b, weights()):
        numerics.assert_close(x, y, 2e-6, before)


# Keras 3 itself cannot go on with an optimizer from an .h5 file unless it is wrapped.
@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["keras", "h5"])
def test_fit_in_mixed_precision_with_the_loss_scale_learns_and_is_saved(make, keras, suffix, tmp_path):
    model = model_of(keras, "mixed_float16")
    optimizer = LossScaleOptimizer(two_groups(make, model.trainable_variables), initial_scale=2.0**24)
    model.compile(optimizer, keras.losses.MeanSquaredError())
    losses = fit(model, epochs=8)
    assert losses[-1] < 0.5 * losses[0]
    assert int(model.optimizer.skipped_steps) > 0
    model.save(tmp_path / f"model.{suffix}")
    loaded = keras.models.load_model(tmp_path / f"model.{suffix}")
    assert float(loaded.optimizer.loss_scale) == float(model.optimizer.loss_scale)
    fit(model)
    fit(loaded)
    assert_equal(model.get_weights(), loaded.get_weights())


@pytest.mark.parametrize("option", [{"clipnorm": 0.1}, {"clipvalue": 0.1}, {"global_clipnorm": 0.1}], ids=str)
def test_the_librarys_clipping_acts_on_the_gradient_first(make, option):
    # The first step is the gradient's sign whatever its size; the next ones weigh the gradients of before.
    runs = []
    for kwargs in ({}, option):
        variables = weights()
        optimizer = make(lr=0.1, **kwargs)
        step(optimizer, variables, 0)
        optimizer.apply_gradients([(0.01 * tf.ones(v.shape), v) for v in variables])
        runs.append(variables)
    assert np.abs(runs[0][0] - runs[1][0]).max() > 1e-3


def test_keras_3_averages_the_gradients_of_several_steps():
    make = LIBRARIES["keras3"]
    a, b = weights(), weights()
    optimizer, reference = make(lr=0.1, gradient_accumulation_steps=2), make(lr=0.1)
    for gradients in ([tf.ones(v.shape) * 1.0 for v in a], [tf.ones(v.shape) * 3.0 for v in a]):
        before = [v.numpy() for v in a]
        optimizer.apply_gradients(zip(gradients, a))
    assert_equal(before, weights())
    reference.apply_gradients([(tf.ones(v.shape) * 2.0, v) for v in b])
    for x, y, before in zip(a, b, weights()):
        numerics.assert_close(x, y, 1e-6, before)


def test_variables_that_are_excluded_from_weight_decay_do_not_decay(make):
    variables = weights()
    optimizer = make(lr=0.1, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_list=[variables[0]])
    optimizer.build(variables)
    optimizer.apply_gradients([(tf.zeros(v.shape), v) for v in variables])
    np.testing.assert_array_equal(variables[0], weights()[0])
    np.testing.assert_allclose(variables[1], 0.95 * weights()[1].numpy(), rtol=1e-6)


def test_foreach_says_once_what_memory_its_stacks_take(make, caplog):
    caplog.set_level("INFO", logger="absl")
    variables = [tf.Variable(tf.ones([64, 64])) for _ in range(32)] + [tf.Variable(tf.ones([8]))]
    optimizer = make(variables, foreach=True)
    step(optimizer, variables)
    step(optimizer, variables)
    (message,) = [r.getMessage() for r in caplog.records if "foreach" in r.getMessage()]
    assert "33 parameters in 2 stacked updates" in message
    assert "2.5 MiB" in message  # 32 * 64 * 64 numbers of 4 bytes, five times
    assert "0.1 MiB" in message


def test_a_variable_of_no_group_is_refused_with_what_to_do(make):
    variable = tf.Variable([1.0])
    optimizer = make([tf.Variable([1.0])])
    with pytest.raises(ValueError, match=r"no parameter group.*add_param_group"):
        optimizer.build([variable])
    optimizer.add_param_group({"params": [variable]})
    optimizer.apply_gradients([(tf.constant([1.0]), variable)])
    assert variable.numpy() < 1
