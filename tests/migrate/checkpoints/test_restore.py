"""`migrate.restore`: tf_keras legacy's optimizers go on in Keras 3 and tf_keras; what does not fit is an error."""

import h5py
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from absl import logging

from tests import strategies
from tests.cases import combinations
from tf_lossscale import LossScaleOptimizer, legacy, migrate
from tf_lossscale.migrate.checkpoints.read import read

LEGACY = tf_keras.optimizers.legacy
NEW = {"keras3": tf.keras.optimizers, "tf_keras": tf_keras.optimizers}
SHAPES = {"kernel": (3, 2), "bias": (2,), "scalar": ()}


def variables(seed=0):
    rng = np.random.default_rng(seed)
    return [tf.Variable(rng.normal(size=shape).astype("float32"), name=name) for name, shape in SHAPES.items()]


def gradients(steps, seed=1):
    rng = np.random.default_rng(seed)
    for i in range(steps):
        each = [rng.normal(size=shape).astype("float32") for shape in SHAPES.values()]
        yield [tf.constant(g if i % 5 != 3 else g + np.inf) for g in each]


def train(optimizer, weights, given):
    for each in given:
        with tf.GradientTape() as tape:
            loss = optimizer.get_scaled_loss(tf.add_n([tf.reduce_sum(w * g) for w, g in zip(weights, each)]))
        scaled = tape.gradient(loss, weights)
        optimizer.apply_gradients(zip(optimizer.get_unscaled_gradients(scaled), weights))


def checkpoint(folder, optimizer, weights, **more):
    more |= {} if optimizer is None else {"optimizer": optimizer}
    return tf.train.Checkpoint(**dict(zip(SHAPES, weights)), **more).write(str(folder / "old"))


# tests/conformance/test_restore.py trains each recorded optimizer on.
@pytest.mark.parametrize("library", NEW)
@pytest.mark.parametrize(
    ("name", "arguments", "note"),
    [
        ("Adam", {"amsgrad": True}, None),
        ("Ftrl", {"l1_regularization_strength": 0.01, "beta": 0.1}, None),
        ("RMSprop", {"momentum": 0.9}, None),
        ("RMSprop", {"centered": True}, "divides by sqrt(v) + epsilon, the current one by sqrt(v + epsilon)"),
        ("Adagrad", {}, "divides by sqrt(v) + epsilon, the current one by sqrt(v + epsilon)"),
        ("Nadam", {}, "the momentum schedule of the current optimizer warms up 250 times as fast"),
    ],
)
def test_where_todays_formula_of_a_legacy_optimizer_is_another_one_a_note_says_so(
    name, arguments, note, library, tmp_path
):
    theirs, mine = variables(), variables(seed=2)
    old = tf_keras.mixed_precision.LossScaleOptimizer(getattr(LEGACY, name)(0.05, **arguments), initial_scale=1024.0)
    train(old, theirs, gradients(7))
    new = LossScaleOptimizer(getattr(NEW[library], name)(0.05, **arguments))
    restored = migrate.restore(checkpoint(tmp_path, old, theirs), new, mine)
    assert (restored.iterations, restored.loss_scale, restored.dynamic_counter) == (7, 512.0, 3)
    assert bool(restored.notes) == bool(note)
    assert (note or "") in "".join(restored.notes)
    for a, b in zip(mine, theirs):
        np.testing.assert_array_equal(a, b)


def distinct(variables, start):
    for i, variable in enumerate(variables):
        variable.assign(np.full(variable.shape, start + i))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of a legacy Adam, and its variables."""
    optimizer, weights = LossScaleOptimizer(LEGACY.Adam(0.05, beta_1=0.8, decay=0.1), initial_scale=64.0), variables()
    train(optimizer, weights, gradients(3))
    folder = tmp_path_factory.mktemp("saved")
    return checkpoint(folder, optimizer, weights, step=tf.Variable(1, dtype=tf.int64)), weights


def test_variables_go_by_name_by_the_files_names_or_by_shape(saved):
    path, weights = saved
    by_name = variables(2)[::-1]
    migrate.restore(path, tf.keras.optimizers.Adam(), by_name)
    named = dict(zip(SHAPES, variables(2)))
    migrate.restore(path, tf.keras.optimizers.Adam(), {name: named[name] for name in ("bias", "kernel")})
    in_order = sorted(SHAPES)  # as tf.train.Checkpoint puts its keywords
    by_order = {name: tf.keras.Variable(np.zeros(SHAPES[name], "float32"), name="any") for name in in_order}
    optimizer = tf.keras.optimizers.Adam()
    notes = migrate.restore(path, optimizer, list(by_order.values())).notes
    assert "by their shapes: bias -> any, kernel -> any, scalar -> any." in notes[0]
    for i, weight in enumerate(weights):
        np.testing.assert_array_equal(by_name[::-1][i], weight)
        np.testing.assert_array_equal(by_order[weight.name[:-2]].numpy(), weight)
    np.testing.assert_array_equal(named["bias"], weights[1])
    assert np.abs(optimizer._momentums[0].numpy()).max() > 0


def test_variables_of_one_shape_that_nothing_but_the_order_tells_are_noted(tmp_path):
    one, two = (tf.Variable([value], name=name) for name, value in (("one", 1.0), ("two", 2.0)))
    old = LEGACY.SGD()
    old.apply_gradients([(tf.zeros([1]), one)])
    path = tf.train.Checkpoint(opt=old, one=one, two=two).write(str(tmp_path / "alike"))
    given = [tf.Variable([0.0], name="a"), tf.Variable([0.0], name="b")]
    with pytest.raises(ValueError, match='these pairs are right, pass match="order": one -> a, two -> b'):
        migrate.restore(path, tf.keras.optimizers.SGD(), given)
    (note,) = migrate.restore(path, tf.keras.optimizers.SGD(), given, match="order").notes
    assert "matched by order, as asked: one -> a, two -> b" in note
    assert [float(v[0]) for v in given] == [1.0, 2.0]
    assert migrate.restore(path, tf.keras.optimizers.SGD(), {"two": given[0], "one": given[1]}).notes == ()
    assert [float(v[0]) for v in given] == [2.0, 1.0]


def test_what_is_not_the_same_today_is_noted(saved):
    optimizer = tf.keras.optimizers.Adam(0.5, beta_1=0.9)
    decays, differs, _ = migrate.restore(saved[0], optimizer, variables(2)).notes
    assert "InverseTimeDecay(0.05, 1, 0.1)" in decays
    assert "beta_1=0.8, but the optimizer keeps its own value, 0.9" in differs
    assert optimizer.beta_1 == 0.9


def test_the_decay_of_nadams_momentum_is_not_noted_as_that_of_the_learning_rate(tmp_path):
    given = variables()
    old = LossScaleOptimizer(LEGACY.Nadam(0.05))
    old.apply_gradients([(tf.ones_like(variable), variable) for variable in given])
    path = tf.train.Checkpoint(optimizer=old, variables=given).save(str(tmp_path / "ckpt"))
    notes = migrate.restore(path, tf.keras.optimizers.Nadam(0.05), given).notes
    assert not [note for note in notes if "decays" in note]


def test_a_schedule_stays_and_accumulated_micro_steps_count_as_keras_counts_them(saved):
    schedule = tf.keras.optimizers.schedules.InverseTimeDecay(0.05, 1, 0.1)
    optimizer = LossScaleOptimizer(tf.keras.optimizers.Adam(schedule, gradient_accumulation_steps=2))
    migrate.restore(saved[0], optimizer, variables(2))
    assert int(optimizer.iterations) == 3
    assert int(optimizer.inner_optimizer._iterations) == 6
    assert float(optimizer.learning_rate) == pytest.approx(0.05 / 1.6), "Keras counts micro-steps here"


def test_of_several_optimizers_one_has_to_be_named(tmp_path):
    weights = variables()
    one, two = (LossScaleOptimizer(LEGACY.SGD(rate), initial_scale=scale) for rate, scale in ((0.5, 2), (0.25, 4)))
    for optimizer in (one, two):
        train(optimizer, weights, gradients(1))
    path = checkpoint(tmp_path, None, weights, discriminator=one, generator=two)
    new = LossScaleOptimizer(tf.keras.optimizers.SGD(0.1))
    with pytest.raises(ValueError, match=r"the file has the optimizers discriminator, generator\. Pass one"):
        migrate.restore(path, new, weights)
    assert migrate.restore(path, new, weights, name="generator").loss_scale == 4.0
    assert float(new.learning_rate) == 0.25


class AddonsAdamW(LEGACY.Adam):
    """Decays as TensorFlow Addons' AdamW does."""

    def __init__(self, rate, weight_decay):
        super().__init__(rate, name="AdamW")
        self._set_hyper("weight_decay", weight_decay)

    def _resource_apply_dense(self, grad, var, apply_state=None):
        var.assign_sub(self._get_hyper("weight_decay", var.dtype) * var)
        return super()._resource_apply_dense(grad, var, apply_state)


@pytest.mark.parametrize("library", NEW)
def test_adamw_of_tensorflow_addons_goes_on_with_its_decay_by_the_learning_rate(tmp_path, library):
    old, theirs, mine = AddonsAdamW(0.05, 0.01), variables(), variables(2)
    for each in gradients(3):
        old.apply_gradients(list(zip(each, theirs)))
    new = NEW[library].AdamW(0.05, weight_decay=0.01 / 0.05)
    (note,) = migrate.restore(checkpoint(tmp_path, old, theirs), new, mine).notes
    assert "Divide the old weight_decay by the learning rate." in note
    for each in gradients(3, seed=3):
        old.apply_gradients(list(zip(each, theirs)))
        new.apply_gradients(list(zip(each, mine)))
    for a, b in zip(mine, theirs):
        np.testing.assert_allclose(a, b, 1e-5, 1e-6)


def built_for_others():
    optimizer = tf.keras.optimizers.Adam()
    optimizer.build(variables(3))
    return optimizer


ADAM = tf.keras.optimizers.Adam
MISTAKES = {
    "another class": (tf.keras.optimizers.RMSprop, variables, "old: .* is of class Adam, but .* is RMSprop"),
    "no such class": (tf.keras.optimizers.Lion, variables, "old: cannot restore state into Lion, only into SGD, "),
    "another shape": (
        ADAM,
        lambda _: {"kernel": tf.Variable(np.zeros((2, 3), "float32"))},
        r"old: .*'kernel' has shape \(3, 2\), but yours has \(2, 3\)",
    ),
    "another variable": (
        ADAM,
        lambda _: {"weight": tf.Variable(0.0)},
        r"old: the file has no variable 'weight', only: .*kernel \(3, 2\)",
    ),
    "another model": (
        ADAM,
        lambda _: [tf.Variable(0.0, name="a")],
        r"old: nothing proves which of .* The file has: .*`variables` has: a \(\)\. Pass the model",
    ),
    "built for others": (built_for_others, variables, "old: .*was not built for all of `variables`"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_does_not_fit_is_an_error_that_names_it_and_changes_nothing(saved, mistake):
    inner, given, message = MISTAKES[mistake]
    optimizer, weights = LossScaleOptimizer(inner()), given(2)
    each = list(weights.values()) if isinstance(weights, dict) else weights
    before = [weight.numpy() for weight in each]
    with pytest.raises(ValueError, match=f"(?s){message}"):
        migrate.restore(saved[0], optimizer, weights)
    for weight, value in zip(each, before):
        np.testing.assert_array_equal(weight, value)
    assert (int(optimizer.iterations), float(optimizer.loss_scale)) == (0, 2.0**15)


def test_optimizers_of_other_libraries_are_refused_with_what_to_do(saved):
    old, new = tf.compat.v1.train.AdamOptimizer(), tf.keras.optimizers.Adam()
    with pytest.raises(TypeError, match=r"`optimizer` must be .*, but got: .*saver_names"):
        migrate.restore(saved[0], old, variables())
    with pytest.raises(TypeError, match=r"`source` must be an optimizer from Keras 3, tf_keras .* or a path, but got"):
        migrate.restore(old, new, variables())
    for given in ([tf.constant([1.0])], {"kernel": np.ones([3, 2])}):
        with pytest.raises(TypeError, match=r"(?s)`variables` must be a model, .*, but it is or contains: .*model.var"):
            migrate.restore(saved[0], new, given)


OF_ONE_NAME = [
    *((library, False) for library in NEW.values()),
    *((library, True) for library in (LEGACY, *NEW.values())),
]


@pytest.mark.parametrize(("library", "is_live"), OF_ONE_NAME)
def test_variables_of_one_name_and_shape_never_get_the_slots_of_each_other(tmp_path, library, is_live):
    weights = {name: tf.Variable([1.0, 2.0], name="Variable") for name in ("w0", "w1")}
    saved = library.Adam()
    saved.apply_gradients([(tf.constant([1.0, 1.0]), weights["w0"]), (tf.constant([3.0, 3.0]), weights["w1"])])
    optimizer, given = tf.keras.optimizers.Adam(), {name: tf.Variable([0.0, 0.0]) for name in reversed(weights)}
    source = saved
    if is_live:
        given = dict(reversed(weights.items()))
    else:
        source = tf.train.Checkpoint(optimizer=saved, **weights).save(str(tmp_path / "ckpt"))
    notes = "".join(migrate.restore(source, optimizer, given).notes)
    is_unknown = library is NEW["tf_keras"] and not is_live
    assert is_unknown == ("does not say which variables these slots belong to" in notes)
    expected = [0.0, 0.0] if is_unknown else [0.3, 0.1]
    assert [moment.numpy()[0] for moment in optimizer._momentums] == pytest.approx(expected)
    if is_unknown:
        in_order, optimizer = dict(reversed(given.items())), tf.keras.optimizers.Adam()
        notes = "".join(migrate.restore(source, optimizer, in_order, match="order").notes)
        assert "slots were matched by order, as asked: Adam/m/Variable -> w0, Adam/m/Variable -> w1, " in notes
        assert [moment.numpy()[0] for moment in optimizer._momentums] == pytest.approx([0.1, 0.3])


class WithLayersInAList(tf.keras.Model):
    def __init__(self, frozen=False):
        super().__init__()
        self.hidden = [tf.keras.layers.Dense(4), tf.keras.layers.Dense(4)]
        self.out = tf.keras.layers.Dense(4, trainable=not frozen)

    def call(self, x):
        return self.out(self.hidden[1](self.hidden[0](x)))


class WithAMeanBeforeItsGain(tf.keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.mean = self.add_weight(shape=(4,), initializer="zeros", trainable=False)
        self.gain = self.add_weight(shape=(4,), initializer="ones")

    def call(self, x):
        return x * self.gain


def of_layers(keras, *layers):
    return keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(4)])


ALIKE = {
    "normalized": lambda: of_layers(tf.keras, tf.keras.layers.Dense(4), tf.keras.layers.BatchNormalization()),
    "a mean before its gain": lambda: of_layers(tf.keras, tf.keras.layers.Dense(4), WithAMeanBeforeItsGain()),
    "layers in a list": WithLayersInAList,
    "layers in a list, one frozen": lambda: WithLayersInAList(frozen=True),
}


@pytest.mark.parametrize("name", ALIKE)
def test_variables_of_one_shape_with_other_names_in_a_keras_3_checkpoint_are_never_exchanged(name, tmp_path):
    """The file's object graph lists them in another order than Keras, and does not contain layers in a list."""
    old, new = ALIKE[name](), ALIKE[name]()
    for start, model in ((0.0, old), (100.0, new)):
        model(np.zeros((1, 4), "float32"))
        distinct(model.variables, start)
    optimizer = tf.keras.optimizers.SGD()
    optimizer.build(old.trainable_variables)
    path = tf.train.Checkpoint(model=old, optimizer=optimizer, step=tf.Variable(1)).write(str(tmp_path / "ckpt"))
    notes = migrate.restore(path, tf.keras.optimizers.SGD(), new).notes
    assert ["by their positions in the optimizer: optimizer/" in note for note in notes] == [True] * ("list" in name)
    for a, b in zip(old.variables, new.variables):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("has_step", [True, False], ids=["global_step", "no step count"])
@pytest.mark.parametrize("kind", ["Saver", "Checkpoint"])
def test_adam_of_tensorflow_1_goes_on_after_so_many_steps_that_the_powers_of_its_betas_are_gone(
    tmp_path, kind, has_step
):
    v1, steps, path = tf.compat.v1, 100_000, str(tmp_path / "ckpt")
    # With this gradient at each step, these are the moments, and a step subtracts the learning rate.
    state = {"w": np.ones(2), "m": np.array([1.0, 2.0]), "v": np.array([1.0, 4.0]), "beta1_power": 0.0}
    state["beta2_power"] = np.float32(0.999) ** (steps + 1)
    if kind == "Saver":
        with tf.Graph().as_default(), v1.Session() as session:
            names = {"m": "w/Adam", "v": "w/Adam_1"}
            for name, value in state.items():
                v1.get_variable(names.get(name, name), initializer=np.float32(value))
            if has_step:
                v1.get_variable("global_step", initializer=np.int64(steps))
            session.run(v1.global_variables_initializer())
            v1.train.Saver().save(session, path)
    else:
        old, weight = v1.train.AdamOptimizer(), tf.Variable(np.ones(2, "float32"), name="w")
        old.apply_gradients([(tf.zeros(2), weight)])
        for name, place in zip(("beta1_power", "beta2_power"), old._get_beta_accumulators()):
            place.assign(state[name])
        for name in ("m", "v"):
            old.get_slot(weight, name).assign(state[name])
        more = {"global_step": tf.Variable(np.int64(steps))} if has_step else {}
        tf.train.Checkpoint(w=weight, optimizer=old, **more).write(path)
    weight, optimizer = tf.Variable(np.zeros(2, "float32"), name="w"), tf.keras.optimizers.Adam(0.01, epsilon=1e-8)
    restored = migrate.restore(path, optimizer, [weight])
    if has_step:
        assert (restored.iterations, restored.notes) == (steps, ())
    else:
        (note,) = restored.notes
        assert "does not hold the step count" in note and f"continues from step {restored.iterations}" in note
    optimizer.apply_gradients([(tf.constant([1.0, 2.0]), weight)])
    np.testing.assert_allclose(weight, [0.99, 0.99], 1e-6)


def trained(model):
    """Train a model for one step, without which tf_keras does not save the optimizer."""
    model.compile(NEW["keras3" if isinstance(model, tf.keras.Model) else "tf_keras"].Adam(), "mse")
    model.train_on_batch(np.ones((4, 4), "float32"), np.zeros((4, 4), "float32"))
    return model


def variables_of(optimizer):
    return optimizer.variables() if callable(optimizer.variables) else optimizer.variables


def batch_and_layer_normalized(keras):
    return of_layers(keras, keras.layers.BatchNormalization(scale=False), keras.layers.LayerNormalization())


def first_of_two_frozen(keras):
    return of_layers(keras, keras.layers.Dense(4, trainable=False), keras.layers.Dense(4))


@pytest.mark.parametrize(
    ("library", "make", "suffix"),
    combinations(
        NEW,
        [batch_and_layer_normalized, first_of_two_frozen],
        [".keras", ".h5"],
        usual=["keras3-first_of_two_frozen-.h5"],
    ),
)
def test_no_slot_of_a_model_file_goes_to_a_variable_that_was_not_trained(library, make, suffix, tmp_path):
    keras = tf.keras if library == "keras3" else tf_keras
    old, new = (trained(make(keras)) for _ in range(2))
    distinct(variables_of(old.optimizer)[2:], 100.0)
    path = tmp_path / f"model{suffix}"
    old.save(path)
    if suffix == ".keras":
        loaded = keras.models.load_model(path)
        migrate.restore(loaded.optimizer, new.optimizer, new.trainable_variables, match="order")
    else:
        notes = migrate.restore(path, new.optimizer, new).notes
        assert all("Only the numbers in their names tell these" in note for note in notes)
    for a, b in zip(variables_of(old.optimizer), variables_of(new.optimizer)):
        np.testing.assert_array_equal(a, b)
    if suffix == ".keras":
        return
    slots = read(path).optimizers[0].slots["m"]
    for slot, variable in zip(slots, old.trainable_variables):
        np.testing.assert_array_equal(slot.owner.value(), variable)
    last = [slot.owner.path for slot in slots[-2:]]
    optimizer = NEW[library].Adam()
    (note,) = migrate.restore(path, optimizer, dict(zip(last, new.trainable_variables[-2:]))).notes
    others = [slot.owner.path for slot in slots[:-2]]
    assert f"are not restored: {', '.join(f'the slots of {path}' for path in others)}." in note
    np.testing.assert_array_equal(optimizer._momentums[0], old.optimizer._momentums[-2])


class WithItsOwnGain(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.first, self.second = tf.keras.layers.Dense(4), tf.keras.layers.Dense(4)
        self.gain = self.add_weight(shape=(4,), initializer="ones", name="gain")

    def call(self, x):
        return self.second(self.first(x)) * self.gain


def test_a_slot_of_an_h5_file_whose_variable_is_missing_takes_no_other_variable(tmp_path):
    trained(WithItsOwnGain()).save(tmp_path / "model.h5")
    assert all(slot.owner for slot in read(tmp_path / "model.h5").optimizers[0].slots["m"])
    with h5py.File(tmp_path / "model.h5", "a") as file:
        del file["model_weights/top_level_model_weights"]
    gain, *others = read(tmp_path / "model.h5").optimizers[0].slots["m"]
    assert gain.owner is None
    for slot in others:
        assert slot.owner.name.replace("/", "_") in slot.tensor.name


def test_a_name_that_several_variables_of_the_file_have_is_an_error_that_lists_their_paths(tmp_path):
    weights = {name: tf.Variable([1.0], name="Variable") for name in ("w0", "w1")}
    path = tf.train.Checkpoint(optimizer=tf_keras.optimizers.SGD(), **weights).write(str(tmp_path / "ckpt"))
    given = tf.Variable([0.0])
    with pytest.raises(ValueError, match=r"several variables 'Variable'\. Pass one of their paths: w0, w1"):
        migrate.restore(path, tf_keras.optimizers.SGD(), {"Variable": given})
    migrate.restore(path, tf_keras.optimizers.SGD(), {"w1": given})
    assert float(given[0]) == 1.0


@pytest.mark.parametrize("optimizers", [LEGACY, *NEW.values()], ids=["tf_keras_legacy", *NEW])
def test_an_optimizer_on_several_replicas_is_read_while_it_is_alive(optimizers):
    strategy = strategies.get("mirrored_2")

    def make():
        with strategy.scope():
            weight = tf.Variable([1.0, 2.0], name="weight")
            return weight, LossScaleOptimizer(optimizers.Adam(0.1), initial_scale=64.0)

    weight, old = make()

    @tf.function
    def step():
        strategy.run(lambda: old.minimize(lambda: tf.reduce_sum(weight**2), [weight]))

    for _ in range(3):
        step()
    _, new = make()
    with strategy.scope():
        restored = migrate.restore(old, new, {"weight": weight})
    assert (restored.iterations, restored.loss_scale, restored.dynamic_counter) == (3, 64.0, 3)
    for one, another in zip(old.weights, new.weights, strict=True):
        np.testing.assert_array_equal(one.numpy(), another.numpy())


@pytest.mark.parametrize("name", ["Adam", "d_opt", "LazyAdam"])
def test_the_steps_of_tensorflow_1s_adam_are_known_whatever_it_is_called(name, tmp_path):
    mine, theirs = variables(), variables()
    old = tf.compat.v1.train.AdamOptimizer(0.1, name=name)
    for each in gradients(3):
        old.apply_gradients(list(zip(each, theirs)))
    new = tf.keras.optimizers.Adam(0.1, epsilon=1e-8)
    assert migrate.restore(checkpoint(tmp_path, old, theirs), new, mine).iterations == int(new.iterations) == 3
    for each in gradients(2, seed=3):
        old.apply_gradients(list(zip(each, theirs)))
        new.apply_gradients(list(zip(each, mine)))
    for a, b in zip(mine, theirs):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("saved_scale", "expected"), [(2.0**20, 2.0**10), (2.0**-3, 1.0)])
def test_a_restored_scale_stays_in_the_range_of_the_new_rules(saved_scale, expected, tmp_path):
    theirs = variables()
    old = LossScaleOptimizer(tf.keras.optimizers.SGD(), initial_scale=saved_scale, min_scale=2.0**-10)
    old.build(theirs)
    new = LossScaleOptimizer(tf.keras.optimizers.SGD(), initial_scale=2.0**8, max_scale=2.0**10)
    migrate.restore(checkpoint(tmp_path, old, theirs), new, variables())
    assert float(new.loss_scale) == expected


def test_micro_steps_of_an_unknown_number_in_a_step_are_noted(tmp_path):
    theirs = variables()
    old = tf.keras.optimizers.Adam(0.1, gradient_accumulation_steps=4)
    for each in gradients(8):
        old.apply_gradients(list(zip(each, theirs)))
    notes = "\n".join(
        migrate.restore(checkpoint(tmp_path, old, theirs), tf.keras.optimizers.Adam(0.1), variables()).notes
    )
    assert "counts 8 micro-steps, but does not say how many of them make a step" in notes


def test_in_a_keras_3_model_with_a_replaced_layer_each_layer_gets_its_own_weights(tmp_path):
    class Replaced(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.a, self.b = tf.keras.layers.Dense(3), tf.keras.layers.Dense(3)
            self.a = tf.keras.layers.Dense(3)

        def call(self, x):
            return self.b(self.a(x))

    old, new = Replaced(), Replaced()
    for model in (old, new):
        model(np.ones((1, 3), "float32"))
    optimizer = tf.keras.optimizers.Adam()
    optimizer.build(old.trainable_variables)
    path = tf.train.Checkpoint(model=old, optimizer=optimizer).write(str(tmp_path / "ckpt"))
    assert migrate.restore(path, tf.keras.optimizers.Adam(), new).notes == ()
    for layer in ("a", "b"):
        np.testing.assert_array_equal(getattr(new, layer).kernel, getattr(old, layer).kernel)


@pytest.mark.parametrize("live", [False, True])
def test_a_restore_into_a_manager_of_contrib_says_nothing_of_configs(live, tmp_path, monkeypatch):
    def managed():
        scale = legacy.ExponentialUpdateLossScaleManager(8.0, 3)
        return LossScaleOptimizer(tf.keras.optimizers.SGD(0.1), loss_scale=scale), tf.Variable(1.0, name="w")

    optimizer, weight = managed()
    optimizer.minimize(lambda: weight**2, [weight])
    tf.train.Checkpoint(optimizer=optimizer, weight=weight).save(str(tmp_path / "ckpt"))
    said = []
    monkeypatch.setattr(logging, "warning", lambda message, *values: said.append(message % values))
    other, fresh = managed()
    migrate.restore(optimizer if live else str(tmp_path), other, [fresh])
    assert fresh.numpy() == weight.numpy() or live
    assert not said
    other.get_config()
    assert len(said) == 1 and "A config cannot contain the rule" in said[0]
