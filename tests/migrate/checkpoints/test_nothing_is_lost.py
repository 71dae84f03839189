"""A table over optimizers, options and formats: what the old optimizer held is in the new one, or a note names it.

Every variable of the old optimizer has a value of its own, so that a value in a wrong place is seen.
"""

import dataclasses
import functools
import itertools
import re
import warnings

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.cases import combinations
from tf_lossscale import DynamicLossScale, LossScaleOptimizer, migrate

# Each test writes and reads files of models; `test_saved_models.py` and `test_restore.py` run in `make test`.
pytestmark = pytest.mark.slow

KERAS = {"keras3": tf.keras, "tf_keras": tf_keras, "legacy": tf_keras}
LIBRARIES = {**{name: keras.optimizers for name, keras in KERAS.items()}, "legacy": tf_keras.optimizers.legacy}
# The arguments with which each class has all of its slots.
CLASSES = {
    "SGD": {"momentum": 0.75, "nesterov": True},
    "Adam": {"amsgrad": True, "beta_1": 0.75},
    "AdamW": {"weight_decay": 0.25},
    "Nadam": {"beta_2": 0.75},
    "Adamax": {"beta_2": 0.75},
    "RMSprop": {"momentum": 0.75, "centered": True},
    "Adagrad": {"epsilon": 0.25},
    "Adadelta": {"rho": 0.75},
    "Ftrl": {"l1_regularization_strength": 0.25},
}
# The slots of legacy optimizers, and where the two newer libraries keep them.
SLOTS = {
    "SGD": {"momentum": "momentums"},
    "Adam": {"m": "_momentums", "v": "_velocities", "vhat": "_velocity_hats"},
    "AdamW": {"m": "_momentums", "v": "_velocities"},
    "Nadam": {"m": "_momentums", "v": "_velocities"},
    "Adamax": {"m": "_m", "v": "_u"},
    "RMSprop": {"rms": "_velocities", "momentum": "_momentums", "mg": "_average_gradients"},
    "Adagrad": {"accumulator": "_accumulators"},
    "Adadelta": {"accum_grad": "_accumulated_grads", "accum_var": "_accumulated_delta_vars"},
    "Ftrl": {"accumulator": "_accumulators", "linear": "_linears"},
}
OF_ANY_CLASS = {"average": "_model_variables_moving_average", "gradient_accumulator": "_accumulated_gradients"}
EMA = {"use_ema": True, "ema_momentum": 0.75}
EMA_ONLY = ("ema_momentum", "ema_overwrite_frequency")
MICRO_STEPS = {"gradient_accumulation_steps": 4}
WRAPPERS = {
    "plain": lambda optimizer: optimizer,
    "hysteresis": lambda optimizer: LossScaleOptimizer(optimizer, initial_scale=64.0, hysteresis=3),
    "dynamic": lambda optimizer: LossScaleOptimizer(optimizer, initial_scale=64.0, dynamic_growth_steps=7),
    "fixed at 512": lambda optimizer: LossScaleOptimizer(optimizer, dynamic=False, initial_scale=512.0),
    "fixed at 8": lambda optimizer: LossScaleOptimizer(optimizer, dynamic=False, initial_scale=8.0),
    "Keras's": lambda optimizer: keras_of(optimizer)(optimizer, initial_scale=64.0),
    "Keras's, fixed": lambda optimizer: keras_of(optimizer)(optimizer, dynamic=False, initial_scale=512.0),
}
KINDS = ("checkpoint", "h5", "live")
OF_SCALE = {
    "loss_scale": ("current_loss_scale", "dynamic_scale"),
    "dynamic_counter": ("good_steps", "counter", "step_counter"),
    "bad_steps": ("bad_steps",),
}


def keras_of(optimizer):
    is_new = isinstance(optimizer, tf.keras.optimizers.Optimizer)
    return tf.keras.optimizers.LossScaleOptimizer if is_new else tf_keras.mixed_precision.LossScaleOptimizer


@dataclasses.dataclass(frozen=True)
class Case:
    old: str
    name: str
    options: dict
    new: str
    today: dict
    kinds: tuple = KINDS
    wrappers: tuple = ("plain", "plain")
    rates: tuple = (0.5, 0.25)

    def __str__(self):
        parts = [self.old, self.name, *self.options, "to", self.new, *self.today, *self.wrappers, *self.rates]
        return "-".join(part for part in parts if part not in ("plain", 0.5, 0.25))


SGD = {"momentum": 0.75}
CASES = [
    Case("legacy", "Adam", CLASSES["Adam"], "keras3", {}, ("checkpoint",)),
    Case("legacy", "Ftrl", CLASSES["Ftrl"], "keras3", {}, ("checkpoint",)),
    Case("tf_keras", "Adagrad", CLASSES["Adagrad"], "keras3", CLASSES["Adagrad"], ("live",)),
    Case("keras3", "Nadam", {}, "keras3", CLASSES["Nadam"], ("h5",)),
    Case("keras3", "Adam", {**EMA, **MICRO_STEPS}, "keras3", {**EMA, **MICRO_STEPS}),
    Case("keras3", "Adam", {**EMA, **MICRO_STEPS}, "tf_keras", {}),
    Case("keras3", "Adam", {}, "keras3", EMA, ("live",)),
    Case("keras3", "Adam", {}, "keras3", MICRO_STEPS, ("live",)),
    Case("keras3", "Adam", MICRO_STEPS, "keras3", {"gradient_accumulation_steps": 3}),
    Case("tf_keras", "RMSprop", CLASSES["RMSprop"] | EMA, "keras3", CLASSES["RMSprop"] | EMA | MICRO_STEPS),
    Case("legacy", "Adam", {"clipnorm": 2.0, "decay": 0.25}, "keras3", {}),
    Case("tf_keras", "Adam", {"weight_decay": 0.25}, "keras3", {}),
    Case("legacy", "Adam", {}, "keras3", {}, rates=("schedule", 0.25)),
    Case("keras3", "Adam", {}, "keras3", {}, ("live",), rates=(0.5, "schedule")),
    *(
        Case(library, "SGD", SGD, library, SGD, kinds, wrappers)
        for library, *wrappers, kinds in (
            ("legacy", "hysteresis", "dynamic", ("h5",)),
            ("legacy", "plain", "hysteresis", KINDS),
            ("legacy", "fixed at 512", "Keras's", ("h5",)),
            ("legacy", "Keras's, fixed", "plain", ("h5",)),
            ("tf_keras", "Keras's, fixed", "Keras's", ("h5",)),
            ("tf_keras", "dynamic", "fixed at 8", ("h5",)),
            ("tf_keras", "fixed at 512", "hysteresis", KINDS),
            ("keras3", "fixed at 512", "fixed at 8", ("h5",)),
            ("keras3", "Keras's", "hysteresis", KINDS),
            ("keras3", "hysteresis", "plain", ("h5",)),
        )
    ),
]


def model_of(library):
    """Five values, in two layers with a variable of the same shape."""
    layers = KERAS[library].layers
    model = KERAS[library].Sequential([layers.Dense(1, name="first"), layers.Dense(1, name="second")], name="model")
    model.build((None, 2))
    return model


def made(library, name, options, wrapper, rate):
    lacking = {"decay"} if library != "legacy" else {*EMA, "weight_decay"}
    lacking |= {*MICRO_STEPS} if library != "keras3" else set()
    options = {key: value for key, value in options.items() if key not in lacking}
    rate = KERAS[library].optimizers.schedules.InverseTimeDecay(0.5, 10, 0.5) if rate == "schedule" else rate
    return WRAPPERS[wrapper](getattr(LIBRARIES[library], name)(rate, **options))


def inner_of(optimizer):
    return getattr(optimizer, "inner_optimizer", optimizer)


def build(optimizer, weights):
    (optimizer.build if hasattr(optimizer, "build") else inner_of(optimizer)._create_all_weights)(weights)


def slots_of(optimizer, weights):
    """Map (slot, index of the variable) to the slot."""
    inner = inner_of(optimizer)
    if hasattr(inner, "get_slot_names"):
        return {(slot, i): inner.get_slot(w, slot) for slot in inner.get_slot_names() for i, w in enumerate(weights)}
    attributes = {**SLOTS[type(inner).__name__], **OF_ANY_CLASS}
    lists = {slot: getattr(inner, attribute, None) or [] for slot, attribute in attributes.items()}
    return {(slot, i): each for slot, several in lists.items() for i, each in enumerate(several)}


def scale_of(optimizer):
    """Map the names of a dynamic scale's values to their variables."""
    holder = getattr(optimizer, "_loss_scale", optimizer)
    there = [(key, getattr(holder, name, None)) for key, names in OF_SCALE.items() for name in names]
    return {key: value for key, value in there if value is not None}


def number(value):
    return float(np.asarray(value))


def settings_of(optimizer):
    """The arguments of an optimizer that change its steps."""
    config = inner_of(optimizer).get_config()
    ignored = ("jit_compile", "is_legacy_optimizer", *(() if config.get("use_ema") else EMA_ONLY))
    config = {key: value for key, value in config.items() if key not in ignored}
    return {key: number(value) for key, value in config.items() if not isinstance(value, (str, dict, type(None)))}


def of_wrapper(optimizer):
    if inner_of(optimizer) is optimizer:
        return {}
    variables = scale_of(optimizer)
    if variables:
        return {key: number(variable) for key, variable in variables.items()}
    return {"loss_scale": number(optimizer.loss_scale)}


def fill(optimizer, weights):
    rng = np.random.default_rng(3)
    for variable in [*weights, *slots_of(optimizer, weights).values()]:
        variable.assign(rng.uniform(1.0, 2.0, tuple(variable.shape)))
    inner = inner_of(optimizer)
    getattr(inner, "_iterations" if hasattr(inner, "gradient_accumulation_steps") else "iterations").assign(10)
    for variable, value in zip(scale_of(optimizer).values(), (32.0, 5, 2)):
        variable.assign(value)


def save(kind, model, library, tmp_path):
    """Save a model with its optimizer, and return the source to restore from."""
    if kind == "live":
        return model.optimizer
    if kind == "checkpoint":
        return tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(str(tmp_path / "ckpt"))
    path = tmp_path / {"h5": "model.h5", "keras": "model.keras", "SavedModel": "saved"}[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save(path, **({"save_format": "tf"} if kind == "SavedModel" else {}))
    return KERAS[library].models.load_model(path).optimizer if kind == "keras" else path


def require_nothing_lost(case, kind, tmp_path):
    model, again = model_of(case.old), model_of(case.new)
    old = made(case.old, case.name, case.options, case.wrappers[0], case.rates[0])
    new = made(case.new, case.name, case.today, case.wrappers[1], case.rates[1])
    model.compile(old, "mse")
    build(old, model.trainable_variables)
    fill(old, model.trainable_variables)
    old_slots = {key: np.array(each) for key, each in slots_of(old, model.trainable_variables).items()}
    values = [np.array(weight) for weight in model.trainable_variables]
    if kind in ("live", "keras"):
        again.set_weights(model.get_weights())
    source = save(kind, model, case.old, tmp_path)
    restored = migrate.restore(source, new, again.trainable_variables)
    notes = "\n".join(restored.notes)

    for weight, value in zip(again.trainable_variables, values):
        np.testing.assert_array_equal(weight, value)
    new_slots = slots_of(new, again.trainable_variables)
    for (slot, i), value in old_slots.items():
        if (slot, i) not in new_slots or not np.array_equal(new_slots[slot, i], value):
            is_lost = re.search(rf"are not restored: [^\n]*the slots {slot}( of 2 micro-steps)?[,.]", notes)
            assert is_lost, f"{slot} of variable {i}"
            assert (slot, i) not in new_slots or is_lost[1], f"{slot} of variable {i} is wrong"
    for slot, i in new_slots.keys() - old_slots.keys():
        if slot == "average":
            np.testing.assert_array_equal(new_slots[slot, i], values[i])
        else:
            name = getattr(new_slots[slot, i], "path", new_slots[slot, i].name.removesuffix(":0"))
            assert re.search(rf"do not change: [^\n]*{name}[,.]", notes), f"{slot} of variable {i} is not set"

    steps = number(inner_of(old).iterations)
    assert restored.iterations == number(inner_of(new).iterations)
    assert restored.iterations == steps or "micro-steps" in notes
    before, after = settings_of(old), settings_of(new)
    if kind in ("checkpoint", "SavedModel"):  # other arguments are not in the file
        before = {key: value for key, value in before.items() if key in ("learning_rate", *getattr(old, "_hyper", ()))}
    for key, value in before.items():
        if value != (after.get(key) or 0.0) and value != pytest.approx(after.get(key)):
            assert f"{key}={value:g}" in notes, key
    if case.rates[0] == "schedule":
        assert "do not change: learning_rate" in notes
    before, after = of_wrapper(old), of_wrapper(new)
    fixed = [len(each) == 1 for each in (before, after)]
    if kind != "live" and (
        # These leave no trace in the file.
        (case.wrappers[0].startswith("Keras's") and kind == "h5" and case.old != "keras3" and not fixed[0])
        or (fixed[0] and kind == "checkpoint")
    ):
        before = {}
    if before and fixed[0]:
        assert before == after or f"not restored: a fixed loss scale (loss_scale={before['loss_scale']:g})." in notes
    elif before and fixed[1]:
        assert f"do not change: the loss scale ({after['loss_scale']:g})." in notes
    if before and after and not any(fixed):
        assert restored.loss_scale == after["loss_scale"] == before["loss_scale"]
    for key, value in before.items():
        assert value == after.get(key, 0.0) or f"{key}={value:g}" in notes, key
    if after and not before:
        assert f"loss scale ({after['loss_scale']:g})." in notes
    if not case.options.get("use_ema"):
        assert "ema_momentum" not in notes
    is_the_same = (case.old, case.options, case.wrappers[0]) == (case.new, case.today, case.wrappers[1])
    if kind == "h5" and is_the_same and bool(before) == bool(after) and "schedule" not in case.rates:
        assert not notes


@pytest.mark.parametrize(("case", "kind"), [(case, kind) for case in CASES for kind in case.kinds], ids=str)
def test_each_value_is_restored_or_named(case, kind, tmp_path):
    require_nothing_lost(case, kind, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "kind"), [("tf_keras", "SavedModel"), ("legacy", "SavedModel"), ("keras3", "keras"), ("tf_keras", "keras")]
)
def test_each_value_of_a_whole_model_is_restored_or_named(old, kind, tmp_path):
    options = {"amsgrad": True, **(EMA if old != "legacy" else {})}
    case = Case(old, "Adam", options, old, options, wrappers=("hysteresis", "hysteresis"))
    require_nothing_lost(case, kind, tmp_path)


@pytest.mark.parametrize(
    ("kind", "old", "new", "name"),
    combinations(
        KINDS,
        LIBRARIES,
        LIBRARIES,
        CLASSES,
        usual=[
            *(f"{kind}-{library}-{library}-Nadam" for kind in ("checkpoint", "h5") for library in LIBRARIES),
            "live-tf_keras-tf_keras-Nadam",
        ],
    ),
)
def test_after_a_skipped_step_the_next_steps_are_those_of_the_old_optimizer_or_a_note_says_why(
    kind, old, new, name, tmp_path
):
    if name == "AdamW" and "legacy" in (old, new):
        pytest.skip("tf_keras has no legacy AdamW")
    models = [model_of(library) for library in (old, new)]
    options = {**CLASSES[name], **({"epsilon": 1e-7} if name in ("RMSprop", "Adagrad") else {})}
    optimizers = [
        LossScaleOptimizer(getattr(LIBRARIES[library], name)(0.1, **options), initial_scale=64.0)
        for library in (old, new)
    ]

    def step(i, x):
        weights = models[i].trainable_variables
        optimizers[i].minimize(lambda: tf.add_n([tf.reduce_sum(weight * x) for weight in weights]), weights)

    models[0].compile(optimizers[0], "mse")
    # Random weights could come close to 0, where a relative difference says nothing.
    models[0].set_weights([np.ones_like(weight) for weight in models[0].get_weights()])
    for x in (1.0, np.inf, 2.0):
        step(0, x)
    models[1].set_weights(models[0].get_weights())
    notes = migrate.restore(save(kind, models[0], old, tmp_path), optimizers[1], models[1].trainable_variables).notes
    for i, x in itertools.product((0, 1), (1.0, 3.0)):
        step(i, x)
    are_the_same = all(map(functools.partial(np.allclose, rtol=1e-5), *(model.get_weights() for model in models)))
    assert are_the_same or notes
    # tf_keras saves no product of momenta in an .h5 file.
    assert are_the_same or old != new or (kind, old, name) == ("h5", "tf_keras", "Nadam")


class LAMB(tf_keras.optimizers.legacy.Adam):
    """Has the slots of Adam, and another rule."""

    def __init__(self):
        super().__init__(0.5, name="LAMB")
        self._set_hyper("weight_decay_rate", 0.25)


@pytest.mark.parametrize("name", ["Adam", "Adamax"])
@pytest.mark.parametrize("library", ["keras3", "tf_keras"])
@pytest.mark.parametrize("old", [LAMB, tf.keras.optimizers.Lamb])
def test_slots_of_an_unknown_class_are_named(old, library, name, tmp_path):
    weight = tf.Variable([1.0, 2.0], name="weight")
    optimizer = old()
    optimizer.apply_gradients([(tf.ones(2), weight)])
    path = tf.train.Checkpoint(optimizer=optimizer, weight=weight).write(str(tmp_path / "ckpt"))
    with pytest.raises(ValueError, match=rf"is of class {old.__name__}, but the given optimizer is {name}"):
        migrate.restore(optimizer, getattr(LIBRARIES[library], name)(0.5), [weight])
    if (old, name) == (tf.keras.optimizers.Lamb, "Adamax"):  # Keras 3 calls the slots of the two by other names
        with pytest.raises(ValueError, match="slots in the file are _momentums, _velocities, and Adamax needs m, v"):
            migrate.restore(path, getattr(LIBRARIES[library], name)(0.5), [weight])
        return
    notes = "\n".join(migrate.restore(path, getattr(LIBRARIES[library], name)(0.5), [weight]).notes)
    assert re.search(rf"does not name the class .* m, v .*(?i:lamb).* are restored as the slots of {name}", notes)
    assert "weight_decay_rate=0.25" in notes or old is not LAMB


@pytest.mark.parametrize("kind", ["checkpoint", "live"])
def test_a_subclass_goes_into_itself_and_is_named_elsewhere(kind, tmp_path):
    weight = tf.Variable([1.0, 2.0], name="weight")
    old = tf.keras.optimizers.AdamW()
    old.apply_gradients([(tf.ones(2), weight)])
    source = old
    if kind == "checkpoint":
        source = tf.train.Checkpoint(optimizer=old, weight=weight).write(str(tmp_path / "ckpt"))
    assert migrate.restore(source, tf.keras.optimizers.AdamW(), [weight]).notes == ()
    notes = migrate.restore(source, tf.keras.optimizers.Adam(), [weight]).notes
    assert "is of class AdamW, but the given optimizer is Adam." in notes[0]
    lamb, again = LAMB(), LAMB()
    lamb.apply_gradients([(tf.ones(2), weight)])
    assert migrate.restore(lamb, again, [weight]).notes == ()


class WithOneMoreSlot(tf_keras.optimizers.legacy.SGD):
    def _create_slots(self, weights):
        super()._create_slots(weights)
        for weight in weights:
            self.add_slot(weight, "of_its_own")


@pytest.mark.parametrize("kind", ["checkpoint", "live"])
def test_slots_that_no_optimizer_of_the_class_has_are_named(kind, tmp_path):
    weight = tf.Variable([1.0, 2.0], name="weight")
    old, new = (WithOneMoreSlot(0.5, momentum=0.75, name="SGD") for _ in range(2))
    old.apply_gradients([(tf.ones(2), weight)])
    if kind == "live":
        lost, unset = migrate.restore(old, new, [weight]).notes
        assert "are not restored: SGD/weight/of_its_own." in lost
        assert "do not change: SGD/weight/of_its_own." in unset
    else:
        path = tf.train.Checkpoint(optimizer=old, weight=weight).write(str(tmp_path / "ckpt"))
        new = tf_keras.optimizers.legacy.SGD(0.5, momentum=0.75)
        _, lost = migrate.restore(path, new, [weight]).notes
        assert "are not restored: the slots of_its_own." in lost
    np.testing.assert_array_equal(new.get_slot(weight, "momentum"), old.get_slot(weight, "momentum"))


class Halving(DynamicLossScale):
    """Has a variable of its own."""

    def __init__(self):
        super().__init__(64.0)
        self.steps = tf.Variable(3.0, name="steps")


@pytest.mark.parametrize("kind", ["checkpoint", "live"])
@pytest.mark.parametrize("swapped", [False, True])
def test_variables_of_a_users_loss_scale_are_named(swapped, kind, tmp_path):
    weight = tf.Variable([1.0, 2.0], name="weight")
    made = [
        LossScaleOptimizer(tf.keras.optimizers.SGD(), loss_scale=Halving()),
        LossScaleOptimizer(tf.keras.optimizers.SGD()),
    ]
    old, new = made[::-1] if swapped else made
    old.build([weight])
    source = old
    if kind == "checkpoint":
        source = tf.train.Checkpoint(optimizer=old, weight=weight).write(str(tmp_path / "ckpt"))
    (note,) = migrate.restore(source, new, [weight]).notes
    assert re.search("do not change: .*steps" if swapped else "are not restored: .*steps", note)


@pytest.mark.parametrize("kind", ["h5", "live"])
def test_counts_of_skipped_steps_are_restored_or_named(kind, tmp_path):
    for arguments in ({"dynamic": False, "skip_nonfinite": True}, {}):
        model = model_of("tf_keras")
        old = LossScaleOptimizer(tf_keras.optimizers.SGD(), initial_scale=64.0, **arguments)
        model.compile(old, "mse")
        build(old, model.trainable_variables)
        old.set_state({**old.state(), "skipped_steps": 3, "total_steps": 4})
        new = LossScaleOptimizer(tf_keras.optimizers.SGD(), initial_scale=64.0, **arguments)
        notes = migrate.restore(save(kind, model, "tf_keras", tmp_path), new, model.trainable_variables).notes
        assert new.state() == old.state() or "are not restored: skipped_steps=3, total_steps=4." in notes[0]
