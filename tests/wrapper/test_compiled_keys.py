"""`jit_compile=True` in eager mode: a compiled step is called only where it does what a step without XLA would do."""

import copy
import functools
import gc
import inspect
import weakref

import numpy as np
import pytest
import sonnet
import tensorflow as tf

from tests import strategies
from tests.families import FAMILIES, all_families, tf_keras
from tf_lossscale import LossScaleOptimizer
from tf_lossscale.core import compiled_steps, constants
from tf_lossscale.core.state import DynamicLossScale

KERAS_3 = FAMILIES[0]
legacy, v1 = tf_keras.optimizers.legacy, tf.compat.v1.train

# Library -> its module, its base class, the attribute of the learning rate.
LIBRARIES = {
    "tf_keras": (tf_keras.optimizers, tf_keras.optimizers.Optimizer, "learning_rate"),
    "legacy": (legacy, legacy.Optimizer, "learning_rate"),
    "tf1": (v1, v1.Optimizer, None),
    "sonnet": (sonnet.optimizers, sonnet.Optimizer, "learning_rate"),
}
if tf_keras.__name__ != "keras":
    LIBRARIES["keras3"] = (tf.keras.optimizers, tf.keras.optimizers.Optimizer, "learning_rate")

_KERAS = {
    "Adadelta": ("rho", 0.9, 0.5),
    "Adafactor": ("beta_2_decay", -0.8, -0.25),
    "Adagrad": ("epsilon", 1e-7, 0.5),
    "Adam": ("beta_1", 0.9, 0.5),
    "AdamW": ("weight_decay", 0.125, 0.5),
    "Adamax": ("beta_2", 0.9, 0.5),
    "Ftrl": ("l1_regularization_strength", 0.0, 0.5),
    "Lion": ("weight_decay", 0.125, 0.5),
    "Nadam": ("beta_1", 0.9, 0.5),
    "RMSprop": ("rho", 0.9, 0.5),
    "SGD": ("momentum", 0.9, 0.5),
}
#: Class -> the arguments of its constructor, the attribute that is set, and two values of it; one row for each.
TABLE = {
    "tf_keras": _KERAS,
    "keras3": {
        **_KERAS,
        "Lamb": ("beta_1", 0.9, 0.5),
        "Muon": ("momentum", 0.9, 0.5),
        "ScheduleFreeAdamW": ("weight_decay", 0.125, 0.5),
    },
    "legacy": {
        name: _KERAS[name] for name in ("Adadelta", "Adagrad", "Adam", "Adamax", "Ftrl", "Nadam", "RMSprop", "SGD")
    },
    "tf1": {
        "AdadeltaOptimizer": ("_rho", 0.9, 0.5),
        "AdagradOptimizer": ("_learning_rate", 0.5, 0.25),
        "AdamOptimizer": ("_beta1", 0.9, 0.5),
        "FtrlOptimizer": ("_l1_regularization_strength", 0.0, 0.5),
        "GradientDescentOptimizer": ("_learning_rate", 0.5, 0.25),
        "MomentumOptimizer": ("_momentum", 0.9, 0.5),
        "ProximalAdagradOptimizer": ("_l1_regularization_strength", 0.0, 0.5),
        "ProximalGradientDescentOptimizer": ("_l1_regularization_strength", 0.0, 0.5),
        "RMSPropOptimizer": ("_decay", 0.9, 0.5),
    },
    "sonnet": {
        "Adam": ("beta1", 0.9, 0.5),
        "Momentum": ("momentum", 0.9, 0.5),
        "RMSProp": ("decay", 0.9, 0.5),
        "SGD": ("learning_rate", 0.5, 0.25),
    },
}
NO_STEPS = {
    ("keras3", "LossScaleOptimizer"): "cannot be wrapped",
    ("keras3", "MultiOptimizer"): "consists of other optimizers, which the table has",
    ("tf1", "AdagradDAOptimizer"): "is for graphs: its first eager step fails without a wrapper as well",
    ("tf1", "SyncReplicasOptimizer"): "is for graphs: it needs queues",
}
#: Each step changes a Python number, so that no step is compiled.
STATEFUL = {("tf_keras", "Nadam")}

WAYS = {
    "number": float,
    "numpy_scalar": np.float32,
    "array": lambda value: np.array(value, np.float32),
    "tensor": tf.constant,
    "another_variable": lambda value: tf.Variable(value, trainable=False),
    "assigned_variable": None,
    "function": None,
    "schedule": None,
}
CASES = [
    pytest.param(library, name, which, way, id=f"{library}-{name}-{which}-{way}")
    for library, rows in TABLE.items()
    if library in LIBRARIES
    for name in rows
    for which in ("rate", "other")
    if which == "rate" or "learning_rate" not in rows[name][0]
    for way in WAYS
    if way != "schedule" or (which == "rate" and library not in ("tf1", "sonnet"))
]
START = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
GRADIENTS = (
    [[1.0, -2.0], [0.5, 1.0]],
    [[-0.5, 1.0], [2.0, 0.25]],
    [[1.0, 1.0], [-1.0, 0.5]],
    [[0.5, 2.0], [1.0, -1.0]],
)


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_optimizer_of_the_libraries_is_in_the_table(library):
    module, base, _ = LIBRARIES[library]
    found = {name for name in dir(module) if inspect.isclass(getattr(module, name))}
    found = {name for name in found if issubclass(getattr(module, name), base) and getattr(module, name) is not base}
    out = {name for where, name in NO_STEPS if where == library}
    assert found <= {*TABLE[library], *out}, "a new optimizer"
    assert not out & {*TABLE[library]}


def make(library, name, way):
    module, _, _ = LIBRARIES[library]
    cls, (other, value, _) = getattr(module, name), TABLE[library][name]
    names = inspect.signature(cls.__init__).parameters
    argument = other.lstrip("_")
    more = {"epsilon": 0.5} if name == "AdadeltaOptimizer" else {}  # else its first updates are too small to compare
    rate = 0.5
    if way == "schedule":
        rate = (tf.keras if library == "keras3" else tf_keras).optimizers.schedules.InverseTimeDecay(rate, 1, 0.5)
    return cls(**{"learning_rate": rate, **({argument: value} if argument in names else {}), **more})


class Changing:
    """A hyperparameter that is given in one way, and changes from step to step."""

    def __init__(self, library, name, which, way):
        self.way = way
        if which == "other":
            self.attribute, *self.values = TABLE[library][name]
        else:
            self.attribute, self.values = LIBRARIES[library][2], (0.5, 0.125)
        self.current, self.given = self.values[0], None

    def set(self, inner, value):
        """Set it, or change what was set."""
        attribute = self.attribute or ("_lr" if hasattr(inner, "_lr") else "_learning_rate")
        self.current, first = value, self.given is None
        if self.way == "function":
            if not first:
                return
            self.given = lambda: self.current
            if attribute == "learning_rate":
                _set_rate(inner, self.given)
                return
        elif self.way == "schedule":
            self.given = inner._hyper["learning_rate"] if hasattr(inner, "_hyper") else inner._learning_rate
            self.given.initial_learning_rate = value
            return
        elif self.way == "assigned_variable":
            if not first:
                self.given.assign(value)
                if self.copied:
                    setattr(inner, attribute, self.given)
                return
            self.given = tf.Variable(value, trainable=False)
        else:
            self.given = WAYS[self.way](value)
        setattr(inner, attribute, self.given)

    #: Whether setting the attribute copies the value, as the learning rate's setter does in Keras.
    @property
    def copied(self):
        return self.attribute == "learning_rate"


def _set_rate(inner, rate):
    """Give an optimizer a function, as its constructor does."""
    if hasattr(inner, "_set_hyper"):
        inner._set_hyper("learning_rate", rate)
    elif isinstance(inner, sonnet.Optimizer):
        inner.learning_rate = rate
    else:
        inner._learning_rate = rate


def steps(library, name, changing, kind, changes=True):
    """Take four steps, of which the second and the fourth find another value; return the weights after each."""
    inner, variable, seen = (
        make(library, name, changing.way),
        (tf.keras.Variable if name == "Muon" else tf.Variable)(START),
        [],
    )
    optimizer = inner if kind == "bare" else LossScaleOptimizer(inner, initial_scale=8, jit_compile=kind == "compiled")
    first, second = changing.values
    for gradient, value in zip(GRADIENTS, (first, second, second, first)):
        changing.set(inner, value if changes else first)
        take(optimizer, [gradient], [variable], library == "sonnet")
        seen.append(variable.numpy())
    return optimizer, np.stack(seen), kind == "compiled" and len(optimizer._compiled_steps)


def take(optimizer, gradients, variables, sonnets=False, **kwargs):
    """Take a step with these unscaled gradients."""
    gradients = [g if g is None or tf.is_tensor(g) else tf.constant(g, v.dtype) for g, v in zip(gradients, variables)]
    if isinstance(optimizer, LossScaleOptimizer):
        optimizer.get_scaled_loss(tf.constant(0.0))
        scale = optimizer.loss_scale
        scaled = {id(g): g * tf.cast(scale, g.dtype) for g in gradients if g is not None}
        gradients = optimizer.get_unscaled_gradients([None if g is None else scaled[id(g)] for g in gradients])
    if sonnets:
        optimizer.apply(gradients, variables)
    else:
        optimizer.apply_gradients(zip(gradients, variables), **kwargs)


@pytest.mark.sampled(40)
@pytest.mark.parametrize(("library", "name", "which", "way"), CASES)
def test_a_hyperparameter_that_changes_takes_effect_as_in_the_bare_optimizer(library, name, which, way):
    def run(kind, **kwargs):
        try:
            return steps(library, name, Changing(library, name, which, way), kind, **kwargs)
        except Exception as error:
            return None, error, 0

    _, bare, _ = run("bare")
    compiled, found, count = run("compiled")
    _, plain, _ = run("plain")
    if isinstance(bare, Exception):
        assert (type(plain), type(found)) == (type(bare), type(bare)), (bare, plain, found)
        assert way == "function" or (library, name, way) == ("legacy", "Nadam", "schedule"), bare
        return
    for weights in (plain, found):
        assert not isinstance(weights, Exception), weights
        np.testing.assert_allclose(weights, bare, rtol=2e-5, atol=1e-6)
    assert not np.allclose(run("bare", changes=False)[1], bare, rtol=1e-4), "the change has no effect"
    assert count <= 2, "two values, and so at most two compilations"
    if count == 0:
        assert compiled._compiled_steps._logged, "not compiled, and nobody is told"
    by_value = way in ("number", "numpy_scalar", "array", "schedule")
    compiles = by_value and (library, name) not in STATEFUL and bare_can_be_traced(library, name, which, way)
    assert count or not compiles, compiled._compiled_steps._logged


def bare_can_be_traced(library, name, which, way):
    """False for a step that multiplies a NumPy value by a Keras 3 variable, because NumPy needs the value of that."""
    inner, variable = make(library, name, way), (tf.keras.Variable if name == "Muon" else tf.Variable)(START)
    changing = Changing(library, name, which, way)
    changing.set(inner, changing.values[0])
    take(inner, GRADIENTS[0:1], [variable], library == "sonnet")
    try:
        tf.function(lambda: take(inner, GRADIENTS[0:1], [variable], library == "sonnet"))()
    except NotImplementedError as error:
        assert "numpy() is only available" in str(error)
        return False
    return True


def test_a_step_that_works_in_eager_mode_only_is_not_compiled():
    class OnNumpy(KERAS_3.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            super().update_step(gradient if gradient.numpy().sum() > 3 else -gradient, variable, learning_rate)

    [optimizer, _] = assert_same_steps(lambda: OnNumpy(0.5), lambda *_: None, compiled=0)
    [reason] = optimizer._compiled_steps._logged
    assert "cannot trace" in reason


# What else a step reads. ----------------------------------------------------------------------------------------------


def pair(make_inner, **options):
    """The same optimizer with and without XLA."""
    return [LossScaleOptimizer(make_inner(), initial_scale=8, jit_compile=jit, **options) for jit in (True, False)]


def assert_same_steps(
    make_inner, change, gradients=((1.0, 2.0), (3.0, -1.0), (0.5, 0.5)), compiled=None, start=(1.0, 2.0)
):
    """Take steps, with a change before each but the first, and require the weights of the optimizer without XLA."""
    optimizers = pair(make_inner)
    variables = [tf.Variable(start) for _ in optimizers]
    for i, gradient in enumerate(gradients):
        for optimizer, variable in zip(optimizers, variables):
            if i:
                change(optimizer, variable, i)
            take(optimizer, [gradient], [variable])
        np.testing.assert_allclose(*(v.numpy() for v in variables), rtol=1e-5, err_msg=f"step {i}")
    if compiled is not None:
        assert len(optimizers[0]._compiled_steps) == compiled
    return optimizers


@pytest.mark.parametrize(
    "make_inner",
    [lambda: KERAS_3.optimizers.AdamW(0.1), lambda: tf_keras.optimizers.AdamW(0.1), lambda: v1.AdamOptimizer(0.1)],
    ids=["keras3", "tf_keras", "tf1"],
)
def test_equal_steps_are_compiled_once_though_the_first_step_sets_attributes_of_the_optimizer(make_inner, monkeypatch):
    compilations, plain = [], compiled_steps.CompiledSteps._keep
    monkeypatch.setattr(
        compiled_steps.CompiledSteps,
        "_keep",
        lambda self, key, step, of: [plain(self, key, step, of), compilations.append(step)],
    )
    assert_same_steps(make_inner, lambda *_: None, compiled=1)
    assert len([step for step in compilations if step is not None]) == 1


def test_a_tf1_step_counts_in_the_global_step_that_it_was_given():
    optimizer, variable = (
        LossScaleOptimizer(v1.GradientDescentOptimizer(0.1), jit_compile=True),
        tf.Variable([1.0, 2.0]),
    )
    one, other = (tf.Variable(0, dtype=tf.int64) for _ in range(2))
    for count in (one, other, one, one, other):
        take(optimizer, [[1.0, 1.0]], [variable], global_step=count)
    assert (one.numpy(), other.numpy(), len(optimizer._compiled_steps)) == (3, 2, 2)


def test_a_gradient_that_is_given_twice_goes_to_its_own_variables():
    optimizers = pair(KERAS_3.sgd)
    weights = [[tf.Variable([0.0]) for _ in range(3)] for _ in optimizers]
    a, b = tf.constant([1.0]), tf.constant([10.0])
    for given in ([a, a, b], [a, b, b], [a, b, a]):
        for optimizer, variables in zip(optimizers, weights):
            optimizer.scale_loss(tf.constant(0.0))
            optimizer.apply(given, variables)
    assert [v.numpy().item() for v in weights[0]] == [v.numpy().item() for v in weights[1]]


def test_a_variable_may_change_its_shape():
    inner = functools.partial(v1.GradientDescentOptimizer, 0.5)
    optimizer, variable = LossScaleOptimizer(inner(), jit_compile=True), tf.Variable([1.0], shape=tf.TensorShape(None))
    take(optimizer, [[1.0]], [variable])
    variable.assign([1.0, 2.0])
    take(optimizer, [[1.0, 1.0]], [variable])
    assert variable.numpy().tolist() == [0.5, 1.5]


@pytest.mark.parametrize("limit", [np.float32(0.5), 0.5, None], ids=str)
def test_a_clipping_norm_that_is_set_takes_effect(limit):
    def change(optimizer, variable, i):
        optimizer.inner_optimizer.clipnorm = limit if i == 1 else 0.25

    assert_same_steps(lambda: KERAS_3.optimizers.SGD(0.1, clipnorm=1.0), change)


def test_a_constraint_that_is_a_function_or_changes_takes_effect():
    class AtLeast:
        def __init__(self, least):
            self.least = least

        def __call__(self, weight):
            return tf.maximum(weight, self.least)

        def get_config(self):
            return {"least": self.least}

    def change(optimizer, variable, i):
        variable.constraint.least = -i

    def train(make_constraint, change):
        optimizers, found = pair(KERAS_3.sgd), []
        for optimizer in optimizers:
            variable = KERAS_3.keras.Variable(np.ones(2, np.float32))
            variable.constraint = make_constraint()
            for i in range(3):
                change(optimizer, variable, i)
                take(optimizer, [[4.0, 8.0]], [variable])
            found.append(variable.numpy().tolist())
        assert found[0] == found[1]
        return optimizers[0]

    train(lambda: AtLeast(0), change)
    optimizer = train(lambda: lambda weight: tf.abs(weight), lambda *_: None)
    assert len(optimizer._compiled_steps) == 0
    assert "Python function" in next(iter(optimizer._compiled_steps._logged))


def test_a_loss_scale_that_is_replaced_is_moved():
    optimizer, variable = LossScaleOptimizer(KERAS_3.sgd(), jit_compile=True), tf.Variable([1.0, 2.0])
    for _ in range(3):
        optimizer._loss_scale = DynamicLossScale(4.0)
        take(optimizer, [[float("inf"), 1.0]], [variable])
        assert optimizer._loss_scale().numpy() == 2.0
        gc.collect()
    assert len(optimizer._compiled_steps) == 1, "those of the scales that died are gone"


def test_python_state_of_ones_own_optimizer_is_kept_by_steps_that_are_not_compiled(caplog):
    class Counting(KERAS_3.optimizers.SGD):
        count = 0

        def update_step(self, gradient, variable, learning_rate):
            self.count += 1
            super().update_step(gradient, variable, learning_rate * self.count)

    class Remembering(KERAS_3.optimizers.SGD):
        last = None

        def update_step(self, gradient, variable, learning_rate):
            last, self.last = self.last, gradient
            super().update_step(gradient if last is None else gradient + last, variable, learning_rate)

    for cls in (Counting, Remembering):
        [optimizer, _] = assert_same_steps(lambda cls=cls: cls(0.1), lambda *_: None, [(1.0, 2.0)] * 4, compiled=0)
        assert any("not compiled" in record.getMessage() for record in caplog.records), cls
        caplog.clear()
    assert optimizer.inner_optimizer.last.numpy().tolist() == [1.0, 2.0]


def test_a_schedule_that_is_replaced_or_changed_takes_effect():
    schedules = KERAS_3.keras.optimizers.schedules

    def change(optimizer, variable, i):
        schedule = optimizer.inner_optimizer._learning_rate
        if i == 1:
            schedule.decay_rate = 0.25
        else:
            optimizer.inner_optimizer._learning_rate = schedules.ExponentialDecay(0.5, 1, 0.75)

    assert_same_steps(lambda: KERAS_3.optimizers.SGD(schedules.ExponentialDecay(0.5, 1, 0.5)), change, compiled=3)


# What lives, and for how long. ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["tf1", "sonnet"])
def test_steps_for_variables_that_died_are_dropped(library, monkeypatch):
    monkeypatch.setattr(compiled_steps, "_MOST", 2)
    inner = v1.GradientDescentOptimizer(0.5) if library == "tf1" else sonnet.optimizers.SGD(0.5)
    optimizer = LossScaleOptimizer(inner, initial_scale=8, jit_compile=True)
    for _ in range(4):  # more than are compiled at a time
        variable = tf.Variable([1.0, 2.0])
        take(optimizer, [[1.0, 1.0]], [variable], library == "sonnet")
        assert variable.numpy().tolist() == [0.5, 1.5]
        assert len(optimizer._compiled_steps) == 1
        del variable
        gc.collect()
    assert not optimizer._compiled_steps._steps
    assert not optimizer._compiled_steps._logged


def test_eight_settings_are_compiled_and_steps_with_further_ones_run_without_xla():
    inner = sonnet.optimizers.SGD(0.0)
    optimizer = LossScaleOptimizer(inner, initial_scale=8, jit_compile=True)
    variable = tf.Variable([0.0, 1.0])
    for rate in range(10):
        inner.learning_rate = float(rate)
        take(optimizer, [[1.0, 1.0]], [variable], True)
    assert variable.numpy().tolist() == [-45.0, -44.0]
    assert len(optimizer._compiled_steps) == 8


@all_families
def test_an_optimizer_that_is_thrown_away_leaves_nothing(family):
    def train():
        optimizer, variable = (
            LossScaleOptimizer(family.sgd(), initial_scale=8, jit_compile=True),
            tf.Variable([1.0, 2.0]),
        )
        take(optimizer, [[1.0, 1.0]], [variable], family.name == "sonnet")
        [(step, _)] = optimizer._compiled_steps._steps.values()
        return [
            weakref.ref(each) for each in (optimizer, optimizer._compiled_steps, optimizer._loss_scale, variable, step)
        ]

    left = train()
    gc.collect()
    assert [each() for each in left] == [None] * 5


@all_families
def test_a_copy_after_a_compiled_step_trains_like_a_copy_after_a_plain_one(family):
    found = []
    for optimizer in pair(family.adam):
        variable = tf.Variable([1.0, 2.0])
        for _ in range(2):
            take(optimizer, [[1.0, -1.0]], [variable], family.name == "sonnet")
        take(copy.deepcopy(optimizer), [[0.5, 0.5]], [variable], family.name == "sonnet")
        take(optimizer, [[0.5, 0.5]], [variable], family.name == "sonnet")
        found.append(variable.numpy())
    np.testing.assert_allclose(*found, rtol=1e-5)


# Replicas. ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["eager", "function"])
@pytest.mark.parametrize("how", ["nadam", "function"])
def test_replicas_take_the_steps_of_the_bare_optimizer(mode, how):
    strategy, rate = strategies.get("mirrored_2"), [0.5]
    if (mode, how) == ("function", "function"):
        pytest.skip("a tf.function calls a Python function once, with or without XLA")

    def train(kind):
        with strategy.scope():
            variable = tf.Variable([1.0, 2.0])
            inner = legacy.Nadam(0.1) if how == "nadam" else legacy.SGD(lambda: rate[0])
            if kind == "bare":
                optimizer = inner
            else:
                optimizer = LossScaleOptimizer(inner, initial_scale=8, jit_compile=kind == "compiled")
        run = lambda: strategy.run(lambda: take(optimizer, [[0.5, 0.5]], [variable]))  # noqa: E731
        run = tf.function(run) if mode == "function" else run
        for rate[0] in (0.5, 0.25, 0.125):
            run()
        return variable.numpy()

    for kind in ("plain", "compiled"):
        np.testing.assert_allclose(train(kind), train("bare"), rtol=1e-5)


# Keys. ----------------------------------------------------------------------------------------------------------------

DIFFERENT = [
    *(None, False, 0, 0.0, -0.0, float("nan"), "0", b"0", (), [], {}, {"a": 1}, {"a": 1.0}, {1: "a"}, set(), 1j),
    *(np.float32(0), np.float64(0), np.array([0.0]), np.array(0.0), np.array([[0.0]]), tf.constant(0.0), tf.float32),
    *(tf.constant([0.0]), tf.constant(0), tf.float16, tf.TensorShape([2]), int, np.float32, [0, 1], [[0], 1], (0, 1)),
    *({0, 1}, frozenset(), tf.nn.relu, tf.Variable(0.0), tf.Variable(0.0), tf.distribute.get_strategy()),
]


def test_different_values_have_different_keys():
    keys = [constants.key(value) for value in DIFFERENT]
    assert len(set(keys)) == len(DIFFERENT)
    kept = (tf.Variable, tf.distribute.Strategy, tf.compat.v1.distribute.Strategy)
    copies = [value if isinstance(value, kept) else copy.copy(value) for value in DIFFERENT]
    assert keys == [constants.key(value) for value in copies]


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (lambda: 1.0, "a Python function"),
        (functools.partial(int, 1), "a Python function"),
        (np.zeros(65), "more than 64 values"),
        (tf.zeros([65]), "more than 64 values"),
        (iter([1.0]), "a list_iterator"),
        (np.array([None]), "an array of objects"),
        (tf.function(lambda: 1.0), "function"),
    ],
    ids=["lambda", "partial", "large_array", "large_tensor", "iterator", "objects", "tf_function"],
)
def test_what_is_not_understood_is_named(value, what):
    holder = type("Optimizer", (), {})()
    holder.parts = {"rate": value}
    with pytest.raises(constants.Unknown, match=rf"`parts\.rate[^`]*` is .*{what}"):
        constants.key(holder)


@pytest.mark.parametrize("made", [np.zeros, tf.zeros], ids=["NumPy", "tensor"])
def test_an_array_of_sixty_four_values_is_compared_and_a_larger_one_is_not(made):
    assert constants.key(made([64])) == constants.key(made([64]))
    assert constants.key(made([64])) != constants.key(made([8, 8]))
    with pytest.raises(constants.Unknown, match="an array of more than 64 values"):
        constants.key(made([65]))


def test_an_object_that_holds_itself_has_a_key():
    one, other = {"a": 1}, {"a": 1}
    one["self"], other["self"] = one, other
    assert constants.key(one) == constants.key(other)


def test_what_a_trace_sets_is_put_back():
    inner = type("Optimizer", (), {})()
    inner.cache, inner.values, inner.parts = {1: 2}, [1, 2], type("Part", (), {})()
    before = constants.key(inner)
    with constants.put_back(inner):
        inner.cache[3], inner.parts.count, inner.new = 4, 5, 6
        inner.values.append(7)
        del inner.cache[1]
    assert constants.key(inner) == before
