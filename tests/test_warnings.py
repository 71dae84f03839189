"""Every warning comes in a wrong program, and not in the nearest right programs: false alarms hide true ones."""

import ast
import copy
import pathlib
import tempfile
import warnings
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

import tf_lossscale
from tests import loops
from tests.families import FAMILIES, tf_keras
from tests.rules import RULES
from tf_lossscale import LossScaleOptimizer, amp, legacy
from tf_lossscale.core import replicas
from tf_lossscale.libraries import optional
from tf_lossscale.optimizers import Adafactor
from tf_lossscale.wrapper import registry

KERAS_3 = FAMILIES[0]
# The words that identify a warning, its wrong program, and for each right program the arguments that set it right.
ROWS = []


def row(words, *rights, **wrong):
    """Add a program to the table. With the arguments `wrong`, it is wrong."""

    def add(program):
        ROWS.append((words, program, wrong, rights))
        return program

    return add


def wrapped(inner=None, **options):
    return LossScaleOptimizer(tf.keras.optimizers.SGD(0.5) if inner is None else inner, **options)


def halving(optimizer, weight):
    """Return a function that takes a step."""
    return lambda: loops.step(optimizer, lambda: weight * 0.5, [weight])


def traced(inner=None):
    """An optimizer whose steps a function was traced with."""
    optimizer = wrapped(inner)
    tf.function(halving(optimizer, tf.Variable(1.0)))()
    return optimizer


def model_of(*layers, keras=tf.keras, **options):
    model = keras.Sequential([keras.Input((2,)), *layers, keras.layers.Dense(1)])
    model.compile(wrapped(keras.optimizers.SGD(0.01), **options), "mse")
    return model


def fit(model, steps, bad, **options):
    """Train with batches of one row, of which some are infinite."""
    x = np.ones((steps, 2), np.float32)
    x[list(bad)] = np.inf
    model.fit(x, np.zeros((steps, 1)), 1, shuffle=False, verbose=0, **options)


# Losses and gradients. --------------------------------------------------------------------------------------------


CHANGES = {
    "nothing": lambda gradients, bound: gradients,
    "norm": lambda gradients, bound: tf.clip_by_global_norm(gradients, bound)[0],
    "values": lambda gradients, bound: [tf.clip_by_value(gradient, -bound, bound) for gradient in gradients],
    "quotient": lambda gradients, bound: [gradient / bound for gradient in gradients],
}


@row(
    "while the loss scale multiplied it",
    {"bound": "number"},
    {"unscales": "not"},
    unscales="first",
    bound="scaled",
    clips="quotient",
)
@row("while the loss scale multiplied it", {"unscales": "first"}, {"bound": "scaled"})
@row("while the loss scale multiplied it", {"clips": "nothing"}, unscales="apply")
@row("while the loss scale multiplied it", {"clips": "nothing"}, unscales="apply_gradients", clips="values")
def clips_the_gradients(unscales="last", bound="number", clips="norm"):
    optimizer, weight = wrapped(), tf.Variable([1.0, 2.0])
    optimizer.build([weight])

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight**2)
            loss = optimizer.scale_loss(loss) if "apply" in unscales else optimizer.get_scaled_loss(loss)
        gradients = tape.gradient(loss, [weight])
        gradients = optimizer.get_unscaled_gradients(gradients) if unscales == "first" else gradients
        gradients = CHANGES[clips](gradients, optimizer.loss_scale if bound == "scaled" else 1.0)
        gradients = optimizer.get_unscaled_gradients(gradients) if unscales == "last" else gradients
        if unscales == "apply":
            optimizer.apply(gradients, [weight])
        else:
            optimizer.apply_gradients(zip(gradients, [weight]))

    step()


@row("while the loss scale multiplied it", {"steps_with": "unscaled"}, steps_with="clipped")
@row("a loss scale still multiplies these gradients", {"steps_with": "unscaled"}, {"steps_with": "divided"})
def steps_without_an_optimizer(steps_with="scaled"):
    scale, weight = tf_lossscale.DynamicLossScale(8.0), tf.Variable([1.0, 2.0])
    choices = {
        "scaled": lambda gradient: gradient,
        "unscaled": lambda gradient: scale.unscale([gradient])[0],
        "divided": lambda gradient: gradient / scale(),
        "clipped": lambda gradient: scale.unscale([tf.clip_by_norm(gradient, 1.0)])[0],
    }

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = scale.scale(tf.reduce_sum(weight**2))
        gradient = choices[steps_with](tape.gradient(loss, weight))
        scale.step([gradient], lambda gradients: weight.assign_sub(gradients[0]))

    step()


FIXED = {"dynamic": False, "initial_scale": 1.0}


@row("You forgot to call", {"scales": "around"}, {"scales": "inside"}, {**FIXED, "skip_nonfinite": True}, FIXED)
@row("You forgot to call", dynamic=False, initial_scale=8.0)
@row("You forgot to call", {"scales": "around"}, scales="loss")
def applies_gradients(scales="nowhere", **options):
    optimizer, weight = wrapped(**options), tf.Variable(1.0)
    loss_fn = lambda: weight * 0.5  # noqa: E731
    with tf.GradientTape() as tape:
        loss = (optimizer.scale_inside(loss_fn) if scales == "inside" else loss_fn)()
        loss = optimizer.get_scaled_loss(loss) if scales in ("loss", "around") else loss
    gradients = tape.gradient(loss, [weight])
    gradients = optimizer.get_unscaled_gradients(gradients) if scales == "around" else gradients
    optimizer.apply_gradients(zip(gradients, [weight]))


@row("training will stall", {"scales": "scale_loss"}, {"scales": "get_scaled_loss"}, {"scales": "by hand"}, FIXED)
def applies(scales="nowhere", **options):
    optimizer, weight = wrapped(**options), tf.Variable(1.0)
    optimizer.build([weight])

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = weight * (optimizer.loss_scale if scales == "by hand" else 0.5)
            loss = loss if scales in ("nowhere", "by hand") else getattr(optimizer, scales)(loss)
        gradients = tape.gradient(loss, [weight])
        if scales == "get_scaled_loss":
            optimizer.apply_gradients(zip(optimizer.get_unscaled_gradients(gradients), [weight]))
        else:
            optimizer.apply(gradients, [weight])

    step()


@row("they may be divided twice", {"method": "apply_gradients"}, {"scales": True})
def applies_what_may_be_unscaled(method="apply", scales=False):
    optimizer, weight = wrapped(), tf.Variable(1.0)
    for _ in range(2):
        halving(optimizer, weight)()
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(weight * 0.5) if scales else weight * 0.5
        gradient = 0.5 * tape.gradient(loss, weight)
        optimizer.apply([gradient], [weight]) if method == "apply" else optimizer.apply_gradients([(gradient, weight)])


@row("but a function that was traced before", {"unscales": True})
def passes_gradients_to_a_traced_function(unscales=False):
    optimizer, weight = wrapped(), tf.Variable(1.0)
    optimizer.build([weight])
    apply = tf.function(lambda gradient: optimizer.apply_gradients([(gradient, weight)]), autograph=False)
    apply(loops.unscaled_gradients(optimizer, lambda: weight * 0.5, [weight])[0])
    with tf.GradientTape() as tape:
        loss = weight * 0.5
        loss = optimizer.get_scaled_loss(loss) if unscales else optimizer.scale_loss(loss)
    gradients = tape.gradient(loss, [weight])
    apply(*(optimizer.get_unscaled_gradients(gradients) if unscales else gradients))


@row("passed to scale_gradient() are float16", {"dtype": "float32"})
def scales_the_gradient_of_outputs(dtype="float16"):
    optimizer, weight = wrapped(), tf.Variable(1.0)
    with tf.GradientTape() as tape:
        loss = tf.cast(optimizer.scale_gradient(tf.cast(weight, dtype)), tf.float32)
    optimizer.apply_gradients([(tape.gradient(loss, weight), weight)])


@row("the scaled loss overflows", {"dtype": "float32"}, {"scale": 2.0**15})
def scales_a_loss(dtype="float16", scale=2.0**17):
    wrapped(initial_scale=scale).get_scaled_loss(tf.constant(1e-3, dtype))


@row("Use the dtype policy mixed_", {"dtype": "float32"}, {"is_trained": False})
@row("Use the dtype policy mixed_", {"dtype": "float32"}, dtype="bfloat16")
def trains_a_variable(dtype="float16", is_trained=True):
    weight, other = tf.Variable(tf.ones([2], dtype)), tf.Variable(1.0)
    loss = lambda: other + (tf.reduce_sum(tf.cast(weight, tf.float32)) if is_trained else 0.0)  # noqa: E731
    loops.step(wrapped(), loss, [weight, other])


# Settings. --------------------------------------------------------------------------------------------------------


@row("is set on the wrapper alone", {"where": "inner"}, {"name": "anything"}, {"value": 1e-7})
def sets_what_is_no_hyperparameter(where="wrapper", name="epsilon", value=1e-4):
    optimizer = wrapped(tf.keras.optimizers.Adam())
    setattr(optimizer if where == "wrapper" else optimizer.inner_optimizer, name, value)


RATES = tf.keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)


@row("was set after a tf.function with this", {"first": True}, {"value": 0.0}, {"of_copy": True})
@row("was set after a tf.function with this", {"value": 0.25}, name="learning_rate", value=RATES)
def sets_a_hyperparameter(name="momentum", value=0.5, first=False, of_copy=False):
    optimizer = wrapped() if first else traced()
    setattr(copy.deepcopy(optimizer) if of_copy else optimizer, name, value)
    tf.function(halving(optimizer, tf.Variable(1.0)))


@row("change_rules() was called after", {"first": True}, {"factor": 2.0}, {"of_copy": True})
def changes_a_rule(factor=4.0, first=False, of_copy=False):
    optimizer = wrapped() if first else traced()
    (copy.deepcopy(optimizer) if of_copy else optimizer).scaler.change_rules(growth_factor=factor)


@row("of a parameter group was set after", {"first": True}, {"option": "lr"}, {"value": 1.0}, {"of_copy": True})
def sets_an_option_of_a_group(option="d", value=2.0, first=False, of_copy=False):
    inner = Adafactor([weight := tf.Variable(1.0)])
    optimizer = wrapped(inner)
    if not first:
        tf.function(halving(optimizer, weight))()
    inner = copy.deepcopy(optimizer).inner_optimizer if of_copy else inner
    inner.param_groups[0][option] = value


@row("A step hook was registered after", {"first": True}, {"of_copy": True})
def registers_a_hook(first=False, of_copy=False):
    inner = Adafactor()
    optimizer = wrapped(inner) if first else traced(inner)
    inner = copy.deepcopy(optimizer).inner_optimizer if of_copy else inner
    inner.register_step_post_hook(lambda optimizer, args, kwargs: None)


@row("contains a parameter twice", {"times": 1})
def lists_a_parameter(times=2):
    Adafactor([tf.Variable(1.0)] * times)


BY_NAME = {"scale_factor": 4, "scale_window": 3000}


@row(
    "the first overflow lowers the scale to 1",
    BY_NAME,
    {"init_loss_scale": 1, "scale_factor": 4},
    {"scale_factor": 2.5},
)
def makes_a_manager(**arguments):
    amp.DynamicLossScaleManager(**(arguments if arguments else {"init_loss_scale": 4, "scale_factor": 3000}))


@row("of the inner optimizer is ignored", {"of_wrapper": True})
def sets_kerass_factor(of_wrapper=False):
    factor = {"loss_scale_factor": 8.0}
    wrapped(KERAS_3.sgd(**({} if of_wrapper else factor)), **(factor if of_wrapper else {}))


@row("Keras 3's model.fit fails under", {"keras": tf_keras}, {"several": False})
def trains_in_several_processes(keras=None, several=True):
    with mock.patch.object(replicas, "several_processes", lambda: several):
        wrapped((keras or KERAS_3.keras).optimizers.SGD())


@row("tf_lossscale leaves", {"name": "Variable"})
def looks_for_a_name(name="NoSuchName"):
    with optional.missing_names_reported("keras"):
        getattr(tf, name)


@row("only float16 gradients need", {"name": "float16"}, {"name": "mixed_float16"}, {"scale": None}, {"scale": "auto"})
@row("only float16 gradients need", {"scale": None}, name="float32")
def makes_a_policy(name="mixed_bfloat16", scale=2):
    legacy.policy.policies_of("keras").Policy(name, scale)


@row("A Session was created before", {"first": True})
def makes_a_session(first=False):
    from tensorflow.python.training.experimental import mixed_precision_global_state as state

    state.set_non_mixed_precision_session_created(False)
    for enables in (first, not first):
        if enables:
            legacy.enable_mixed_precision_graph_rewrite(tf.compat.v1.train.GradientDescentOptimizer(0.1))
        else:
            tf.compat.v1.Session(graph=tf.Graph()).close()
    legacy.disable_mixed_precision_graph_rewrite()


# Training. --------------------------------------------------------------------------------------------------------


@row("steps were all skipped", {"steps": 99})
@row("steps were all skipped", {"steps": 99}, way=tf.function)
def stalls(steps=100, way=lambda step: step):
    optimizer, weight = wrapped(), tf.Variable(1.0)
    step = way(lambda: loops.step(optimizer, lambda: weight * np.nan, [weight]))
    for _ in range(steps):
        step()


@row("To reset an optimizer, assign", {"resets": "inner"})
@row("To reset an optimizer, assign", {"resets": "inner"}, way=tf.function)
def resets_an_optimizer(resets="all", way=lambda step: step):
    optimizer, weight = wrapped(tf.keras.optimizers.SGD(0.5, momentum=0.5)), tf.Variable(1.0)
    step = way(halving(optimizer, weight))
    step()
    for variable in optimizer.variables if resets == "all" else optimizer.inner_optimizer.variables:
        variable.assign(tf.zeros_like(tf.convert_to_tensor(variable)))
    step()


@row("steps were skipped, more than", {"every": 6})
def skips_many_steps(every=4):
    fit(model_of(), 60, range(0, 60, every), callbacks=[tf_lossscale.LossScaleMonitor()])


def mask(keras):
    """A layer with a constant that is infinite."""
    layer = keras.layers.Normalization(mean=0.0, variance=1.0)
    layer.mask = tf.Variable(-np.inf, trainable=False)
    return layer


@row("and with them every prediction", {"keeps_state": True}, {"layer": mask})
def overflows_in_the_forward_pass(keeps_state=False, layer=lambda keras: keras.layers.BatchNormalization()):
    model = model_of(layer(tf.keras))
    if keeps_state:
        model.train_step = tf_lossscale.keep_state(model)(model.train_step)
    fit(model, 3, [1], callbacks=[tf_lossscale.LossScaleMonitor()])


@row("no step of a LossScaleOptimizer was taken inside", {"wraps": True}, {"wraps": True, "dynamic": False})
def keeps_the_state(wraps=False, **options):
    model, inner = model_of(tf.keras.layers.BatchNormalization()), tf.keras.optimizers.SGD()
    optimizer = wrapped(inner, initial_scale=8.0, **options) if wraps else inner
    optimizer.build(model.trainable_variables)

    @tf.function
    @tf_lossscale.keep_state(model)
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(tf.ones([4, 2]), training=True))
            loss = optimizer.get_scaled_loss(loss) if wraps else loss
        gradients = tape.gradient(loss, model.trainable_variables)
        gradients = optimizer.get_unscaled_gradients(gradients) if wraps else gradients
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    step()


# Saving and loading. ----------------------------------------------------------------------------------------------


@row("A config cannot contain the rule", {"rule": "described"}, {"saves": "weights"})
def saves_a_model(rule="quarters", saves="config"):
    model = model_of(loss_scale=RULES[rule]())
    fit(model, 2, [])
    if saves == "config":
        model.optimizer.get_config()
    else:
        with tempfile.TemporaryDirectory() as folder:
            model.save_weights(f"{folder}/model.weights.h5")
            tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(f"{folder}/checkpoint")


@row("does not hold the loss scale", {"base": tf.Module}, {"is_ours": False}, FIXED)
def wraps_an_optimizer_of_the_user(base=object, is_ours=True, **options):
    class Inner(base):
        learning_rate = 0.5

    class Family(tf_lossscale.Family):
        optimizer_class = Inner

        def build(self, variables):
            pass

        def apply(self, gradients, variables):
            pass

    with mock.patch.object(registry, "REGISTERED", dict(registry.REGISTERED)):
        tf_lossscale.register_family(Family)
        copy.deepcopy(wrapped(Inner(), loss_scale=None if is_ours else tf_lossscale.DynamicLossScale(), **options))


class Manager(amp.LossScaleManager):
    """A rule in Python."""

    def __init__(self, name):
        self.name_of_scale = name
        setattr(self, name, 64.0)

    def get_loss_scale(self):
        return getattr(self, self.name_of_scale)

    def update_loss_scale(self, overflow):
        setattr(self, self.name_of_scale, self.get_loss_scale() / 2 if overflow else self.get_loss_scale())


@row("and its rule continues from", {"name": "loss_scale"}, {"sets": True})
def restores_a_manager(name="scale", sets=False):
    weight, optimizers = tf.Variable(1.0), [wrapped(loss_scale=Manager(name)) for _ in range(2)]
    for optimizer in optimizers:
        optimizer.build([weight])
    loops.step(optimizers[0], lambda: weight * np.inf, [weight])
    with tempfile.TemporaryDirectory() as folder:
        path = tf.train.Checkpoint(optimizer=optimizers[0]).write(f"{folder}/checkpoint")
        tf.train.Checkpoint(optimizer=optimizers[1]).read(path)
    if sets:
        optimizers[1].scaler.scale = 32.0
    halving(optimizers[1], weight)()


@row("The loss scale that was loaded is", {"min_scale": 0.25}, {"initial_scale": 0.5}, {"scale": 8.0})
def sets_the_state(scale=0.5, **options):
    optimizer = wrapped(**options)
    optimizer.set_state({**optimizer.state(), "loss_scale": scale})


def loads(optimizer, saved, *variables):
    """Load the values that another optimizer saved. Each is built for variables with these values, if there are any."""
    for each, initial in zip((optimizer, saved), variables):
        each.build([tf.Variable(value) for value in initial])
    values = {}
    saved.save_own_variables(values)
    optimizer.load_own_variables({name: np.asarray(value) for name, value in values.items()})


@row("is not built, so the saved step count", {"variables": [1.0]})
@row("of other names or shapes", {"variables": [1.0]}, {"saved": []}, variables=[1.0, 2.0])
def loads_an_optimizer(variables=(), saved=(1.0,)):
    loads(wrapped(KERAS_3.adam()), wrapped(KERAS_3.adam()), variables, saved)


@row("its own variables have the shapes", {"saved": "counting"}, {"loading": "dynamic", "saved": "dynamic"})
def loads_a_rule(saved="dynamic", loading="counting"):
    one, another = (wrapped(KERAS_3.adam(), loss_scale=RULES[rule]()) for rule in (saved, loading))
    loads(another, one, [1.0], [1.0])


# The table. -------------------------------------------------------------------------------------------------------


@pytest.fixture
def warnings_of(caplog, capfd):
    """Return a function that runs a program, and returns the words of the warnings that came."""

    def run(program, arguments):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            program(**arguments)
        said = [*caplog.messages, *(str(each.message) for each in caught), capfd.readouterr().err]
        return {words for words, *_ in ROWS if any(words in text for text in said)}

    return run


def id_of(program, arguments):
    def shown(value):
        # The repr of other objects contains their addresses, which differ between the processes of pytest-xdist.
        is_plain = isinstance(value, (bool, int, float, str, tuple))
        return value if is_plain else getattr(value, "__name__", type(value).__name__)

    return "-".join([program.__name__, *(f"{name}={shown(value)}" for name, value in arguments.items())])


WRONG = [pytest.param(case, id=id_of(*case[1:3])) for case in ROWS]
# The first of a program's right ones runs in `make test`.
RIGHT_ONES = [
    pytest.param((program, wrong | right), id=id_of(program, wrong | right), marks=[pytest.mark.slow] * (i > 0))
    for _, program, wrong, rights in ROWS
    for i, right in enumerate(rights)
]


@pytest.mark.parametrize("case", WRONG)
def test_it_comes_alone_in_a_wrong_program(case, warnings_of):
    words, program, arguments, _ = case
    assert warnings_of(program, arguments) == {words}


@pytest.mark.parametrize("case", RIGHT_ONES)
def test_no_warning_comes_in_a_right_program(case, warnings_of):
    assert not warnings_of(*case)


def texts_in(source):
    """Return the text of each warning in a module, with the constants that its arguments name."""
    tree = ast.parse(source)
    assigned = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            assigned.setdefault(node.targets[0].id, []).extend(ast.walk(node.value))

    def text(call):
        parts = list(ast.walk(call))
        named = [part for name in parts if isinstance(name, ast.Name) for part in assigned.get(name.id, [])]
        return "".join(str(part.value) for part in [*parts, *named] if isinstance(part, ast.Constant))

    called = {"warning", "error", "warn", "_say", "warn_once", "print_unless"}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    texts = [text(call) for call in calls if getattr(call.func, "attr", getattr(call.func, "id", "")) in called]
    return [each for each in texts if " " in each]  # a function that logs the text of its caller has no text


def test_every_warning_of_the_package_has_a_row_and_every_row_a_warning():
    folder = pathlib.Path(tf_lossscale.__file__).parent
    texts = [text for path in folder.rglob("*.py") for text in texts_in(path.read_text("utf-8"))]
    known = {words for words, *_ in ROWS}
    assert [text for text in texts if len([words for words in known if words in text]) != 1] == []
    assert {words for words in known if not any(words in text for text in texts)} == set()
    assert len(texts) > 30
