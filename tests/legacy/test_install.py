"""install() puts every old name back where old code looks for it, and undo() takes it away again."""

import contextlib
import importlib
import importlib.util
import json
import sys
import textwrap

import numpy as np
import pytest
import tensorflow as tf
import tensorflow.compat.v1 as tf1

import tf_lossscale
from tests.families import FAMILIES, families, tf_keras, with_keras_3
from tests.processes import printed
from tf_lossscale import legacy
from tf_lossscale.legacy import experimental, old_names, table, wrap_in_compile
from tf_lossscale.legacy.policy import policies_of
from tf_lossscale.libraries import keras_versions


@pytest.fixture
def installed():
    with tf_lossscale.install():
        yield
        for library in {keras_versions.keras_of_tensorflow(), "tf_keras"}:
            policies_of(library).set_policy("float32")


@pytest.fixture(params=["keras", "tf_keras"])
def keras(installed, request):
    return {"keras": tf.keras, "tf_keras": tf_keras}[request.param]


def fresh(code, **environment):
    """Runs code in a process of its own; returns what it prints as JSON."""
    return json.loads(printed("-c", textwrap.dedent(code), **environment).splitlines()[-1])


def test_strategies_run_a_step_by_the_old_name_of_the_method(installed):
    class Twice(tf.distribute.OneDeviceStrategy):
        def run(self, fn, args=(), kwargs=None, options=None):
            return 2 * super().run(fn, args, kwargs, options)

    def step(x, y):
        if x > 0:  # AutoGraph makes a conditional of it
            return x + y
        return y

    @tf.function
    def train(strategy, x):
        return strategy.experimental_run_v2(step, args=(x,), kwargs={"y": 3})

    mirrored = tf.distribute.MirroredStrategy(["CPU:0"])
    assert int(train(mirrored, tf.constant(2))) == 5
    assert int(train(Twice("CPU:0"), tf.constant(-2))) == 6
    assert int(tf.compat.v1.distribute.get_strategy().experimental_run_v2(step, (1, 2))) == 3


# Where the names are. -------------------------------------------------------------------------------------------------

SCALES = ["LossScale", "FixedLossScale", "DynamicLossScale"]
REWRITE = [
    "MixedPrecisionLossScaleOptimizer",
    "enable_mixed_precision_graph_rewrite",
    "disable_mixed_precision_graph_rewrite",
]
MANAGERS = ["LossScaleManager", "FixedLossScaleManager", "ExponentialUpdateLossScaleManager", "LossScaleOptimizer"]
EXPERIMENTAL_NAMES = ["LossScaleOptimizer", "Policy", "global_policy", "set_policy", "get_layer_policy"]

ATTRIBUTES = {
    "tf.train.experimental": SCALES + REWRITE,
    "tf.compat.v1.train.experimental": SCALES + REWRITE,
    "tf.compat.v2.train.experimental": SCALES + REWRITE,
    "tf1.train.experimental": SCALES + REWRITE,
    "tf1.mixed_precision": SCALES + REWRITE,
    "tf.compat.v1.mixed_precision": SCALES + REWRITE,
    "tf.compat.v1.mixed_precision.experimental": SCALES,
    "tf.mixed_precision.experimental": SCALES,
    "tf.compat.v2.mixed_precision.experimental": SCALES,
    "tf.contrib.mixed_precision": MANAGERS,
    "tf1.contrib.mixed_precision": MANAGERS,
    "tf.keras.mixed_precision": ["LossScaleOptimizer", "Policy", "global_policy", "set_global_policy"],
    "tf.keras.mixed_precision.experimental": EXPERIMENTAL_NAMES,
    "tf1.keras.mixed_precision.experimental": EXPERIMENTAL_NAMES,
    "tf_keras.mixed_precision.experimental": EXPERIMENTAL_NAMES,
}
IMPORTS = {
    "tensorflow.keras.mixed_precision": ["LossScaleOptimizer", "experimental"],
    "tensorflow.keras.mixed_precision.experimental": EXPERIMENTAL_NAMES,
    "keras.mixed_precision.experimental": EXPERIMENTAL_NAMES,
    f"{tf_keras.__name__}.mixed_precision.experimental": EXPERIMENTAL_NAMES,
    f"{tf_keras.__name__}.api._v2.keras.mixed_precision.experimental": EXPERIMENTAL_NAMES,
    "tensorflow.contrib.mixed_precision": MANAGERS,
    "tensorflow.contrib.mixed_precision.python.loss_scale_manager": MANAGERS[:3],
    "tensorflow.contrib.mixed_precision.python.loss_scale_optimizer": MANAGERS[3:],
    "tensorflow.mixed_precision.experimental": SCALES,
    "tensorflow.train.experimental": SCALES + REWRITE,
    "tensorflow.compat.v1.train.experimental": SCALES + REWRITE,
    "tensorflow.compat.v1.mixed_precision": SCALES + REWRITE,
    "tensorflow.python.keras.mixed_precision.loss_scale_optimizer": ["LossScaleOptimizer", "_DynamicLossScaleState"],
    "tensorflow.python.keras.mixed_precision.experimental.loss_scale_optimizer": ["LossScaleOptimizer"],
    "tensorflow.python.keras.mixed_precision.experimental.policy": ["Policy", "set_policy", "global_policy"],
    "tensorflow.python.training.experimental.loss_scale": [*SCALES, "get"],
    "tensorflow.python.training.experimental.loss_scale_optimizer": ["MixedPrecisionLossScaleOptimizer"],
    "tensorflow.python.training.experimental.mixed_precision": REWRITE[1:],
}


def is_ours(value):
    return not isinstance(value, type) or value.__module__.startswith("tf_lossscale.")


@pytest.mark.parametrize("path", ATTRIBUTES)
def test_attributes_lead_to_the_names(installed, path):
    place = eval(path)
    for name in ATTRIBUTES[path]:
        assert is_ours(getattr(place, name)), name


@pytest.mark.parametrize("path", IMPORTS)
def test_imports_lead_to_the_names(installed, path):
    module = importlib.import_module(path)
    for name in IMPORTS[path]:
        assert is_ours(getattr(module, name)) or name.startswith("_"), name
    scope = {}
    exec(f"import {path} as module\nfrom {path} import {IMPORTS[path][0]} as name", scope)
    assert scope["module"] is module
    assert scope["name"] is getattr(module, IMPORTS[path][0])


def test_an_attribute_and_an_import_are_the_same(installed):
    from tensorflow.keras import mixed_precision
    from tensorflow.keras.mixed_precision import LossScaleOptimizer
    from tensorflow.keras.mixed_precision import experimental as imported

    assert imported.LossScaleOptimizer is tf.keras.mixed_precision.experimental.LossScaleOptimizer
    assert imported.LossScaleOptimizer is tf_keras.mixed_precision.experimental.LossScaleOptimizer
    assert mixed_precision.LossScaleOptimizer is LossScaleOptimizer is tf.keras.mixed_precision.LossScaleOptimizer
    assert imported.LossScaleOptimizer is experimental.LossScaleOptimizer
    assert not hasattr(imported, "set_global_policy"), "tf.keras has it; in the experimental module it was set_policy"
    assert LossScaleOptimizer is not imported.LossScaleOptimizer, "two generations, two meanings of the arguments"


def test_a_module_that_is_in_no_file_says_its_name_and_can_be_looked_for(installed):
    assert tf.contrib.mixed_precision.__name__ == "tensorflow.contrib.mixed_precision"
    assert importlib.util.find_spec("tensorflow.contrib").name == "tensorflow.contrib"
    with pytest.raises(ImportError, match="layers"):
        importlib.import_module("tensorflow.contrib.layers")


@with_keras_3
def test_each_library_has_its_own_policies(installed):
    tf_keras.mixed_precision.experimental.set_policy("mixed_float16")
    assert tf.keras.layers.Dense(1).compute_dtype == "float32"
    assert tf_keras.layers.Dense(1).compute_dtype == "float16"


def state_of_the_modules():
    """What is in every module that install() knows, and the list of all modules."""
    places = [*old_names.places(), *wrap_in_compile.places()]
    modules = {name: sys.modules[name] for name in places if name in sys.modules}
    content = {name: {key: id(value) for key, value in vars(module).items()} for name, module in modules.items()}
    return content, {name: id(module) for name, module in sys.modules.items()}, list(sys.meta_path)


def test_undo_leaves_everything_as_it_was():
    importlib.import_module("tensorflow.keras.mixed_precision")
    importlib.import_module("tensorflow.python.keras.mixed_precision.loss_scale_optimizer")
    for path in ATTRIBUTES:  # lazy modules are loaded by looking
        for name in ATTRIBUTES[path]:
            with contextlib.suppress(AttributeError):
                getattr(eval(path), name)
    before = state_of_the_modules()
    for _ in range(2):
        installation = tf_lossscale.install()
        assert state_of_the_modules()[0] != before[0]
        installation.undo()
        content, modules, finders = state_of_the_modules()
        for name in before[0]:
            ignored = {"_tfmw_deprecated_checked", "_tfmw_warning_count"}
            changed = {k for k in {*content[name], *before[0][name]} if content[name].get(k) != before[0][name].get(k)}
            assert changed <= ignored, (name, changed)
        assert modules == before[1]
        assert finders == before[2]
    for path in ("tf.contrib", "tf.mixed_precision", "tf.keras.mixed_precision.experimental"):
        with pytest.raises(AttributeError):
            eval(path)
    with pytest.raises(ImportError):
        importlib.import_module("tensorflow.contrib.mixed_precision")
    assert "DynamicLossScale" not in dir(tf.train.experimental)
    assert "contrib" not in dir(tf1)


def test_installing_twice_is_installing_once():
    before = tf.keras.mixed_precision.LossScaleOptimizer
    installation = tf_lossscale.install()
    names = vars(tf.keras.mixed_precision).copy()
    tf_lossscale.install()
    assert vars(tf.keras.mixed_precision) == names
    with tf_lossscale.install():
        pass
    assert hasattr(tf.keras.mixed_precision, "experimental"), "a block inside an installation took it away"
    installation.undo()
    installation.undo()
    assert tf.keras.mixed_precision.LossScaleOptimizer is before


def test_a_block_takes_the_names_away_at_its_end_and_after_an_error():
    before = vars(tf.distribute.Strategy).copy()
    with pytest.raises(RuntimeError), tf_lossscale.install():
        assert hasattr(tf, "contrib")
        raise RuntimeError
    assert not hasattr(tf, "contrib")
    assert vars(tf.distribute.Strategy) == before


def test_what_somebody_else_set_meanwhile_stays():
    with tf_lossscale.install():
        tf.mixed_precision = "mine"
    assert tf.mixed_precision == "mine"
    del tf.mixed_precision


def test_a_name_that_a_library_lacks_is_said_and_the_others_are_set(caplog, monkeypatch):
    trainer = pytest.importorskip("keras.src.trainers.trainer", reason="TensorFlow 2.15: its Keras is Keras 2")
    monkeypatch.delattr(trainer, "optimizers")
    monkeypatch.setitem(table.OLD, "tensorflow.contrib.mixed_precision.Gone", table.Old(table.LEGACY, "keras.Gone"))
    with tf_lossscale.install():
        assert trainer.LossScaleOptimizer is wrap_in_compile.stand_in_for("keras")
        assert tf.keras.Model.compile.__wrapped__
        assert not hasattr(tf.contrib.mixed_precision, "Gone")
        for path in ATTRIBUTES:
            assert all(is_ours(getattr(eval(path), name)) for name in ATTRIBUTES[path])
    said = [record.getMessage() for record in caplog.records]
    for name in ("keras.src.trainers.trainer.optimizers", "tensorflow.contrib.mixed_precision.Gone"):
        assert any(message.startswith(f"tf_lossscale leaves {name} as it is: ") for message in said), name


def test_objects_made_meanwhile_stay_usable():
    with tf_lossscale.install():
        optimizer = tf.keras.mixed_precision.experimental.LossScaleOptimizer(tf.keras.optimizers.SGD(1.0), 8)
    variable = tf.Variable(1.0)
    optimizer.minimize(lambda: variable * 1.0, [variable])
    assert float(variable) == 0.0


# Before TensorFlow is imported, and with the other Keras. -------------------------------------------------------------

BEFORE = """
    import json, sys
    import tf_lossscale
    installation = tf_lossscale.install()
    facts = {"early": sorted({"tensorflow", "keras", "tf_keras"} & set(sys.modules))}
    from tensorflow.keras.mixed_precision import experimental as mixed_precision
    import tensorflow as tf
    from tensorflow.contrib.mixed_precision import FixedLossScaleManager
    mixed_precision.set_policy("mixed_float16")
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, dtype="float32")])
    model.compile("sgd", "mse")
    model.fit(tf.ones((4, 2)), tf.ones((4, 1)), verbose=0)
    facts["library"] = type(model.optimizer.inner_optimizer).__module__.split(".")[0]
    facts["compiled"] = isinstance(model.optimizer, tf_lossscale.LossScaleOptimizer)
    facts["isinstance"] = isinstance(model.optimizer, tf.keras.mixed_precision.LossScaleOptimizer)
    facts["same"] = mixed_precision.LossScaleOptimizer is tf.keras.mixed_precision.experimental.LossScaleOptimizer
    facts["v1"] = tf.compat.v1.train.experimental.DynamicLossScale().__class__.__module__
    facts["v1 keras"] = hasattr(tf.compat.v1.keras.mixed_precision, "experimental")
    facts["scale"] = int(model.optimizer.loss_scale())
    installation.undo()
    facts["left"] = hasattr(tf.keras.mixed_precision, "experimental")
    print(json.dumps(facts))
"""


def test_what_runs_before_tensorflow_imports_no_other_library():
    facts = fresh(
        """
        import json, sys
        import tf_lossscale.legacy.run, tf_lossscale.legacy.table
        tf_lossscale.install()
        print(json.dumps(sorted({"absl", "keras", "numpy", "tensorflow", "tf_keras"} & set(sys.modules))))
        """
    )
    assert facts == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "legacy_keras"),
    [
        ("", ""),
        pytest.param("", "1", marks=with_keras_3),
        pytest.param("import tensorflow", "", marks=pytest.mark.exhaustive),
        pytest.param("import keras", "", marks=pytest.mark.exhaustive),
        pytest.param("import keras", "1", marks=[with_keras_3, pytest.mark.exhaustive]),
    ],
)
def test_installing_before_tensorflow_is_the_same_as_after_it(first, legacy_keras):
    facts = fresh(f"    {first}\n{BEFORE}", TF_USE_LEGACY_KERAS=legacy_keras)
    if not first:
        assert facts["early"] == [], "install() imported TensorFlow"
    del facts["early"]
    assert facts == {
        "library": "tf_keras" if legacy_keras else "keras",
        "compiled": True,
        "isinstance": True,
        "same": True,
        "v1": "tf_lossscale.legacy.loss_scale",
        "v1 keras": True,
        "scale": 2**15,
        "left": False,
    }


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_saved_model_loads_in_a_process_that_only_imports_the_package(installed, tmp_path):
    for name, make in {
        "experimental": tf.keras.mixed_precision.experimental.LossScaleOptimizer,
        "stable": tf.keras.mixed_precision.LossScaleOptimizer,
    }.items():
        model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
        model.compile(make(tf.keras.optimizers.SGD(), "dynamic"), "mse")
        model.save(tmp_path / f"{name}.keras")
    facts = fresh(
        f"""
        import json
        import tf_lossscale
        import tensorflow as tf
        load = tf.keras.models.load_model
        optimizers = [load(f"{tmp_path}/{{name}}.keras").optimizer for name in ("experimental", "stable")]
        print(json.dumps([isinstance(o, tf_lossscale.LossScaleOptimizer) for o in optimizers]))
        """
    )
    assert facts == [True, True]


# The calls. -----------------------------------------------------------------------------------------------------------

CALLS = [
    (lambda LSO, opt: LSO(opt), True, 2**15, 2000),
    (lambda LSO, opt: LSO(opt, True), True, 2**15, 2000),
    (lambda LSO, opt: LSO(opt, True, 1024), True, 1024, 2000),
    (lambda LSO, opt: LSO(opt, True, 1024, 500), True, 1024, 500),
    (lambda LSO, opt: LSO(opt, False, 1024), False, 1024, None),
    (lambda LSO, opt: LSO(opt, False, 1024, None), False, 1024, None),
    (lambda LSO, opt: LSO(opt, dynamic=False, initial_scale=0.5), False, 0.5, None),
    (lambda LSO, opt: LSO(opt, dynamic=True, initial_scale=1024), True, 1024, 2000),
    (lambda LSO, opt: LSO(opt, initial_scale=8, dynamic_growth_steps=3), True, 8, 3),
    (lambda LSO, opt: LSO(inner_optimizer=opt, dynamic_growth_steps=None), True, 2**15, 2000),
    (lambda LSO, opt: LSO(opt, "dynamic"), True, 2**15, 2000),
    (lambda LSO, opt: LSO(opt, loss_scale="dynamic"), True, 2**15, 2000),
    (lambda LSO, opt: LSO(optimizer=opt, loss_scale="dynamic"), True, 2**15, 2000),
    (lambda LSO, opt: LSO(opt, loss_scale=128), False, 128, None),
    (lambda LSO, opt: LSO(opt, 1024, 500), True, 1024, 500),
    (lambda LSO, opt: LSO(opt, tf.mixed_precision.experimental.DynamicLossScale(8, 1000)), True, 8, 1000),
    (lambda LSO, opt: LSO(opt, loss_scale=tf.mixed_precision.experimental.FixedLossScale(4)), False, 4, None),
]


@families
@pytest.mark.parametrize(("call", "dynamic", "scale", "growth"), CALLS)
def test_every_call_of_the_stable_name_means_what_it_meant(installed, family, call, dynamic, scale, growth):
    optimizer = call(family.keras.mixed_precision.LossScaleOptimizer, family.sgd())
    assert (optimizer.dynamic, float(optimizer.loss_scale), optimizer.dynamic_growth_steps) == (dynamic, scale, growth)
    assert tf.is_tensor(optimizer.loss_scale)
    assert type(optimizer) is type(tf_lossscale.LossScaleOptimizer(family.sgd()))
    variable = tf.Variable(1.0)
    optimizer.minimize(lambda: 1.0 * variable, [variable])
    assert float(variable) == 0.5


@pytest.mark.parametrize(
    ("arguments", "keywords"),
    [
        (("static",), {}),
        ((None,), {}),
        ((False,), {}),
        ((0,), {}),
        ((1024,), {}),
        ((1.0,), {}),
        ((8, 4, 2), {}),
        (("dynamic", 8), {}),
        ((8,), {"loss_scale": 8}),
        ((), {"loss_scale": "dynamic", "initial_scale": 8}),
        ((True,), {"dynamic": True}),
        ((), {"bogus": 1}),
    ],
)
def test_calls_that_mean_nothing_are_errors_and_leave_the_optimizer_free(installed, arguments, keywords):
    inner = tf.keras.optimizers.SGD()
    with pytest.raises((TypeError, ValueError)):
        tf.keras.mixed_precision.LossScaleOptimizer(inner, *arguments, **keywords)
    assert tf.keras.mixed_precision.LossScaleOptimizer(inner).inner_optimizer is inner


def test_a_lone_number_is_refused_with_its_meanings(keras):
    with pytest.raises(TypeError, match=r"For a fixed scale, as in .* For a dynamic scale with this initial value"):
        keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD(), 1024)


def test_private_optimizers_of_tensorflow_keep_their_private_wrapper(installed):
    from tensorflow.python.keras.mixed_precision.loss_scale_optimizer import LossScaleOptimizer
    from tensorflow.python.keras.optimizer_v2 import gradient_descent

    private = LossScaleOptimizer(gradient_descent.SGD(0.5), initial_scale=8)
    assert type(private).__module__ == "tensorflow.python.keras.mixed_precision.loss_scale_optimizer"
    assert isinstance(private, LossScaleOptimizer)
    variable = tf.Variable(1.0)
    private.minimize(lambda: variable * 1.0, [variable])
    assert (float(variable), float(private.loss_scale)) == (0.5, 8)
    assert isinstance(LossScaleOptimizer(tf.keras.optimizers.SGD()), tf_lossscale.LossScaleOptimizer)


# isinstance. ----------------------------------------------------------------------------------------------------------


def every_name():
    from tensorflow.python.keras.mixed_precision.experimental.loss_scale_optimizer import LossScaleOptimizer as private
    from tensorflow.python.keras.mixed_precision.loss_scale_optimizer import LossScaleOptimizer as private_stable

    return {
        "tf.keras": tf.keras.mixed_precision.LossScaleOptimizer,
        "tf_keras": tf_keras.mixed_precision.LossScaleOptimizer,
        "tf.keras experimental": tf.keras.mixed_precision.experimental.LossScaleOptimizer,
        "tf_keras experimental": tf_keras.mixed_precision.experimental.LossScaleOptimizer,
        "private": private,
        "private stable": private_stable,
        "ours": tf_lossscale.LossScaleOptimizer,
    }


@families
def test_a_wrapper_made_by_any_name_is_an_instance_of_every_name(installed, family):
    names = every_name()
    makers = [lambda inner, LSO=LSO: LSO(inner) for name, LSO in names.items() if name in ("tf.keras", "ours")]
    makers += [lambda inner: names["tf.keras experimental"](inner, "dynamic")]
    for make in makers:
        made = make(family.sgd())
        for name, LSO in names.items():
            assert isinstance(made, LSO), name
            assert issubclass(type(made), LSO), name
            assert not isinstance(family.sgd(), LSO), name
            assert not isinstance(None, LSO), name
        assert isinstance(made, family.keras.optimizers.Optimizer) or family.name == "tf_keras_legacy"
        assert type(made).__name__ in ("LossScaleOptimizer", "LossScaleOptimizerV1")


def test_keras_s_own_wrapper_is_an_instance_of_every_old_name(installed):
    own = FAMILIES[0].optimizers.LossScaleOptimizer(tf.keras.optimizers.SGD())
    assert type(own).__module__.startswith("keras.")
    assert isinstance(own, tf.keras.mixed_precision.LossScaleOptimizer)
    assert isinstance(own, tf.keras.mixed_precision.experimental.LossScaleOptimizer)


def compiled(keras, set_policy, policy, optimizer="sgd"):
    """Returns a model that is made and compiled under a global policy."""
    set_policy(policy)
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1, dtype="float32")])
    model.compile(optimizer, "mse")
    return model


def test_an_optimizer_that_is_compiled_again_under_another_policy_gets_the_loss_scale_of_this_policy(keras):
    mixed_precision = keras.mixed_precision.experimental
    inner = keras.optimizers.SGD(0.125)

    def of(policy):
        return compiled(keras, mixed_precision.set_policy, policy, inner)

    first = of(mixed_precision.Policy("mixed_float16", loss_scale=8))
    second = of(mixed_precision.Policy("mixed_float16", loss_scale=16))
    assert second.optimizer.loss_scale() == 16
    again = of("mixed_float16").optimizer
    assert again.dynamic
    assert again.inner_optimizer is inner
    assert of("mixed_float16").optimizer is again
    assert first.optimizer.loss_scale() == 8
    losses = second.fit(np.ones((8, 1)), np.full((8, 1), 3.0), epochs=3, verbose=0).history["loss"]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("loss_scale", ["number", "dynamic", "object"])
def test_each_model_under_a_policy_has_a_loss_scale_of_its_own(keras, loss_scale):
    mixed_precision = keras.mixed_precision.experimental
    given = {"number": 8, "dynamic": "dynamic", "object": legacy.DynamicLossScale(8, 2)}[loss_scale]
    policy = mixed_precision.Policy("mixed_float16", loss_scale=given)
    first, second = (compiled(keras, mixed_precision.set_policy, policy) for _ in range(2))
    start = float(first.optimizer.loss_scale())
    good, bad = np.ones((4, 1)), np.full((1, 1), np.inf)
    first.fit(good, np.ones((4, 1)), batch_size=1, verbose=0)
    second.fit(bad, np.ones((1, 1)), verbose=0)
    after = [float(model.optimizer.loss_scale()) for model in (first, second)]
    assert after == {"number": [8, 8], "dynamic": [start, start / 2], "object": [32, 4]}[loss_scale]


def test_compile_honours_the_policy_that_the_model_was_built_under(keras):
    mixed_precision = keras.mixed_precision.experimental
    Policy = mixed_precision.Policy

    class Own(keras.Model):
        def compile(self, optimizer):
            super().compile(optimizer, "mse")

    def compiled(built_under, compiled_under, **keywords):
        mixed_precision.set_policy(built_under)
        model = Own(**keywords)
        mixed_precision.set_policy(compiled_under)
        inner = keras.optimizers.SGD()
        model.compile(inner)
        return None if model.optimizer is inner else model.optimizer.loss_scale()

    eight, none = Policy("mixed_float16", loss_scale=8), Policy("mixed_float16", loss_scale=None)
    assert compiled(eight, "float32") == 8
    assert compiled(eight, Policy("mixed_float16", loss_scale=16)) == 8
    assert compiled(none, "mixed_float16") is None
    assert compiled("mixed_float16", eight) == 2**15
    assert compiled("float32", eight) is None
    assert compiled("float32", Policy("float32", loss_scale=4)) is None
    assert compiled(Policy("mixed_bfloat16", loss_scale=4), "float32") == 4
    assert compiled("float32", "float32", dtype=eight) == 8
    assert compiled("float32", "float32", dtype=Policy("float32", loss_scale=2)) == 2
    mixed_precision.set_policy(eight)
    layer = keras.layers.Dense(1)
    mixed_precision.set_policy("float32")
    assert mixed_precision.get_layer_policy(layer) is eight


@pytest.mark.slow
@pytest.mark.parametrize("name", ["float32", "mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("set_by", ["experimental.set_policy", "set_global_policy"])
def test_compile_honours_the_loss_scale_of_every_policy(keras, name, set_by, tmp_path):
    mixed_precision = keras.mixed_precision.experimental
    set_policy = mixed_precision.set_policy if "experimental" in set_by else keras.mixed_precision.set_global_policy

    def of(loss_scale, optimizer="sgd"):
        return compiled(keras, set_policy, mixed_precision.Policy(name, loss_scale=loss_scale), optimizer)

    for loss_scale, value in ((10, 10), ("dynamic", 2**15), (legacy.DynamicLossScale(64), 64)):
        model = of(loss_scale)
        assert isinstance(model.optimizer, mixed_precision.LossScaleOptimizer)
        assert model.optimizer.loss_scale() == value
    model.fit(np.ones((4, 1)), np.full((4, 1), np.nan), verbose=0)
    assert model.optimizer.loss_scale() == 32
    model.save(tmp_path / "model.keras")
    assert keras.models.load_model(tmp_path / "model.keras").optimizer.loss_scale() == 32
    assert not isinstance(of(None).optimizer, tf_lossscale.LossScaleOptimizer)
    explicit = mixed_precision.LossScaleOptimizer(keras.optimizers.SGD(), 5)
    assert of(10, explicit).optimizer is explicit
    by_name = compiled(keras, set_policy, name).optimizer
    assert isinstance(by_name, tf_lossscale.LossScaleOptimizer) is (name == "mixed_float16")


def test_the_stable_policy_takes_a_loss_scale_and_is_the_library_s_own_without_one(keras):
    Policy = keras.mixed_precision.Policy
    assert Policy("mixed_float16", loss_scale=8).loss_scale() == 8
    plain = Policy("mixed_float16")
    assert not type(plain).__module__.startswith("tf_lossscale")
    assert isinstance(plain, Policy)
    assert isinstance(keras.layers.Dense(1).dtype_policy, Policy)
    model = compiled(keras, keras.mixed_precision.set_global_policy, Policy("mixed_float16", loss_scale=8))
    assert float(model.optimizer.loss_scale) == 8

    class Mine(Policy):
        pass

    assert isinstance(Mine("float32"), Mine)
    assert not isinstance(plain, Mine)


# What else old code does around the names. ----------------------------------------------------------------------------


def test_the_result_of_a_graph_rewrite_is_not_wrapped_again_by_compile(installed):
    optimizer = tf.train.experimental.enable_mixed_precision_graph_rewrite(tf.keras.optimizers.SGD(0.5))
    tf.train.experimental.disable_mixed_precision_graph_rewrite()
    optimizer.lr = 0.25
    assert float(optimizer.inner_optimizer.learning_rate) == 0.25
    set_policy = tf.keras.mixed_precision.experimental.set_policy
    assert compiled(tf.keras, set_policy, "mixed_float16", optimizer).optimizer is optimizer


def test_contrib_s_names_wrap_an_optimizer_of_tensorflow_1(installed):
    manager = tf.contrib.mixed_precision.ExponentialUpdateLossScaleManager(1024, 2, decr_every_n_nan_or_inf=1)
    optimizer = tf.contrib.mixed_precision.LossScaleOptimizer(tf1.train.GradientDescentOptimizer(0.5), manager)
    variable = tf.Variable(1.0)
    optimizer.apply_gradients([(tf.constant(float("inf")), variable)])
    assert (float(variable), float(manager.get_loss_scale())) == (1.0, pytest.approx(1024 * 0.8))
    assert [name for name in dir(tf.contrib) if not name.startswith("_")] == ["mixed_precision"]


def test_a_subclass_that_divides_elsewhere_keeps_its_own_ways(installed):
    class Transformed(tf.keras.mixed_precision.LossScaleOptimizer):
        """Divides in a transformer of the inner optimizer, not in get_unscaled_gradients."""

        def __init__(self, optimizer, initial_scale):
            super().__init__(optimizer, dynamic=False, initial_scale=initial_scale, dynamic_growth_steps=None)
            optimizer.gradient_transformers = [self.divide]

        def get_unscaled_gradients(self, grads):
            return grads

        def divide(self, grads_and_vars):
            return [(g / self.loss_scale, v) for g, v in grads_and_vars]

        def _raise_if_strategy_unsupported(self):
            raise AssertionError("nobody asks")

    optimizer = Transformed(tf_keras.optimizers.legacy.SGD(0.5), 128)
    variable = tf.Variable(1.0)
    optimizer.minimize(lambda: variable * 1.0, [variable])
    assert float(variable) == 0.5
    assert isinstance(optimizer, Transformed)


def test_fit_under_the_installation_warns_of_no_name_that_the_user_did_not_write(installed, recwarn, caplog):
    model = compiled(tf.keras, tf.keras.mixed_precision.experimental.set_policy, "mixed_float16")
    model.fit(np.ones((4, 1)), np.ones((4, 1)), verbose=0)
    said = [str(w.message) for w in recwarn] + [record.getMessage() for record in caplog.records]
    # Python warns of Keras 2, which hands a float to `randrange`.
    assert not [x for x in said if "LossScale" in x or ("deprecated" in x.lower() and "randrange" not in x)]
