"""A family answers the questions that Family declares; a new family needs nothing else."""

import abc
import pathlib
import re
import shutil
import subprocess
import sys
import types
import typing

import numpy as np
import pytest
import tensorflow as tf

import tf_lossscale
from tests.families import RATE, ApplyOnly, all_families
from tf_lossscale import LossScaleOptimizer, migrate
from tf_lossscale.wrapper import registry as families
from tf_lossscale.wrapper.family import Family

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize("adapter", [row.adapter for row in families._FAMILIES])
def test_the_wrapper_hides_no_private_name_of_the_library(adapter):
    names = {name for base in LossScaleOptimizer.__mro__[:-1] for name in vars(base)}
    meant = {"_create_all_weights", "_compute_gradients", "_decayed_lr", "_get_hyper", "_set_hyper"}
    meant.add("_trackable_children")  # calls the library's method, and adds to what it returns
    private = {name for name in names if name.startswith("_") and not name.startswith("__")}
    bases = families.wrapper_class_in(adapter).__mro__[:-1]
    of_library = {name for base in bases if not base.__module__.startswith("tf_lossscale") for name in vars(base)}
    assert private & of_library <= meant


def test_a_question_without_an_answer_is_an_error_that_names_the_question_and_the_optimizer():
    class Mine:
        pass

    class MyFamily(Family):
        optimizer_class = Mine

        def build(self, variables):
            pass

    with pytest.raises(TypeError, match=r"MyFamily must define apply\(\) for optimizers of class Mine"):
        tf_lossscale.register_family(MyFamily)
    with pytest.raises(TypeError, match="Pass an optimizer from"):
        LossScaleOptimizer(Mine())  # nothing was registered
    with pytest.raises(TypeError, match=r"must be a class derived from tf_lossscale\.Family, but got: 3"):
        tf_lossscale.register_family(3)
    with pytest.raises(TypeError, match="optimizer_class must be the base class of the optimizers, but is: None"):
        tf_lossscale.register_family(type("Unfinished", (Family,), {}))


@pytest.mark.parametrize("question", ["build", "apply", "count_skipped_step"])
def test_a_question_without_an_answer_is_an_error_when_an_optimizer_is_wrapped(tiny, question, monkeypatch):
    inner, family = tiny.sgd(), families.wrapper_class_in("tiny")._family_class
    if question == "count_skipped_step":
        inner.iterations = 0
    else:
        monkeypatch.setattr(family, "__abstractmethods__", frozenset({question}))
    with pytest.raises(TypeError, match=rf"Family must define {question}\(\) for a SGD"):
        LossScaleOptimizer(inner)
    assert not families.is_wrapped(inner)


@all_families
@pytest.mark.parametrize("metaclass", [abc.ABCMeta, type("Registering", (type,), {})])
def test_a_derived_class_may_have_a_metaclass(family, metaclass):
    mine = metaclass("Mine", (LossScaleOptimizer,), {})
    optimizer, weight = mine(family.sgd(), initial_scale=8.0), tf.Variable(1.0)
    assert isinstance(optimizer, mine)
    assert isinstance(type(optimizer), metaclass)
    optimizer.minimize(lambda: 1.0 * weight, [weight])
    assert weight.numpy() == 0.5


def test_a_keyword_of_a_derived_class_reaches_its_other_base_class():
    class Keyed:
        def __init_subclass__(cls, key, **kwargs):
            super().__init_subclass__(**kwargs)
            cls.key = key

    class Mine(LossScaleOptimizer, Keyed, key="a"):
        pass

    assert Mine.key == "a"


@pytest.fixture
def descent(monkeypatch):
    """A registered family of optimizers that have only a `rate`, with the variables that it was built for."""
    monkeypatch.setattr(families, "REGISTERED", dict(families.REGISTERED))

    class Descent:
        rate = 0.5

    @tf_lossscale.register_family
    class DescentFamily(tf_lossscale.Family):
        optimizer_class = Descent
        delegated = ("rate",)
        built: typing.ClassVar = []

        def build(self, variables):
            self.built.append([variable.name for variable in variables])

        def apply(self, gradients, variables, times=1.0):
            return [v.assign_sub(times * self.inner.rate * g) for g, v in zip(gradients, variables)]

        def count_skipped_step(self):
            return None

    return DescentFamily


def test_a_registered_family_trains_skips_and_is_asked_for_subclasses_too(descent):
    class Faster(descent.optimizer_class):
        rate = 1.0

    for inner, after in ((descent.optimizer_class(), 0.5), (Faster(), 0.0)):
        optimizer, weight = LossScaleOptimizer(inner, initial_scale=8.0), tf.Variable(1.0)
        assert isinstance(families.family_of(inner), descent)
        for factor in (1.0, np.inf):
            optimizer.minimize(lambda factor=factor, weight=weight: weight * factor, [weight])
        assert (weight.numpy(), optimizer.loss_scale.numpy()) == (after, 4.0)
        optimizer.rate = 0.25
        assert inner.rate == 0.25
        optimizer.apply_gradients([(tf.constant(1.0), weight)], times=2.0)
        assert weight.numpy() == after - 0.5
        with pytest.raises(TypeError, match="unexpected keyword argument 'often'"):
            optimizer.apply_gradients([(tf.constant(1.0), weight)], often=2.0)


def test_build_is_called_in_each_trace_and_strategy_and_in_eager_mode_for_each_new_list_of_variables(descent):
    optimizer = LossScaleOptimizer(descent.optimizer_class(), initial_scale=8.0)
    both = [tf.Variable(1.0, name="a"), tf.Variable(2.0, name="b")]
    first, a, ab = both[:1], ["a:0"], ["a:0", "b:0"]

    def builds(step, *lists):
        descent.built.clear()
        for variables in lists:
            step(variables)
        return descent.built

    def step(variables):
        optimizer.minimize(lambda: tf.add_n([1.0 * variable for variable in variables]), variables)

    def traced(variables):
        tf.function(lambda: step(variables))()

    assert builds(step, first, first, both, both, first) == [a, ab, a]
    assert builds(traced, both, both) == [ab, ab]
    assert builds(step, both, both) == [ab], "an eager step after a trace builds, too"
    run = tf.distribute.OneDeviceStrategy("CPU:0").run
    assert builds(lambda variables: run(step, (variables,)), both, both) == [ab, ab]


@pytest.fixture
def tiny(monkeypatch):
    """The family that CONTRIBUTING.md adds."""
    library, adapter, row, row_of_tests = walk_through()
    for name, code in (("tiny", library), ("tf_lossscale.families.tiny", adapter)):
        module = types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        exec(compile(code, name, "exec"), vars(module))
    monkeypatch.setattr(families, "_FAMILIES", [*families._FAMILIES, eval(row, vars(families))])
    return eval(row_of_tests, {"ApplyOnly": ApplyOnly, "RATE": RATE, "tiny": sys.modules["tiny"]})


def walk_through():
    """The four blocks of code of CONTRIBUTING.md."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_the_walk_through_works_as_written_in_a_copy_of_the_checkout(tmp_path):
    library, adapter, row, row_of_tests = walk_through()
    for name in ("tf_lossscale", "tests", "tf_function_tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "data"))
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "tiny.py").write_text(library)
    (tmp_path / "tf_lossscale" / "families" / "tiny.py").write_text(adapter)
    registry, table = tmp_path / "tf_lossscale" / "wrapper" / "registry.py", tmp_path / "tests" / "families.py"
    insert(registry, "_FAMILIES = [\n", row.rstrip() + ",\n")
    insert(table, "ALL_FAMILIES = (\n", row_of_tests.rstrip() + ",\n")
    insert(table, "import tensorflow as tf\n", "import tiny\n")
    suites = ["tests/test_families.py", "tf_function_tests/test_promises.py"]
    chosen = ["-k", "tiny and not mirrored_4 and not loop", "-m", "not tpu and not gpu"]
    environment = {"PATH": "", "PYTHONPATH": str(tmp_path), "TF_CPP_MIN_LOG_LEVEL": "3", "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-rp", "-p", "no:cacheprovider", *chosen, *suites]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert {*re.findall(r"^PASSED (.*?)::", done.stdout, re.MULTILINE)} == {*suites}
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 10, done.stdout[-500:]


def insert(path, place, text):
    assert path.read_text().count(place) == 1
    path.write_text(path.read_text().replace(place, place + text))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_the_family_of_the_walk_through_applies_skips_and_goes_on_from_a_checkpoint(tiny, compiled, tmp_path):
    weight = tf.Variable([1.0])
    optimizer = LossScaleOptimizer(tiny.sgd(momentum=0.5), initial_scale=8.0, dynamic_growth_steps=2)

    def step(factor):
        return optimizer.minimize(lambda: tf.reduce_sum(weight * factor), [weight])

    step = tf.function(step) if compiled else step
    for factor in (1.0, np.inf):
        step(tf.constant(factor))
        np.testing.assert_array_equal(weight, [0.5])
    assert (float(optimizer.loss_scale), int(optimizer.iterations), optimizer.momentum) == (4.0, 2, 0.5)
    path = tf.train.Checkpoint(optimizer=optimizer, weight=weight).save(str(tmp_path / "ckpt"))
    for _ in range(2):
        step(tf.constant(1.0))
    after = weight.numpy()

    again = LossScaleOptimizer(tiny.sgd(momentum=0.5), initial_scale=64.0, dynamic_growth_steps=2)
    again.build([weight])
    tf.train.Checkpoint(optimizer=again, weight=weight).restore(path).assert_consumed()
    assert (float(again.loss_scale), int(again.iterations)) == (4.0, 2)
    for _ in range(2):
        again.minimize(lambda: tf.reduce_sum(weight), [weight])
    np.testing.assert_array_equal(weight, after)
    assert float(again.loss_scale) == float(optimizer.loss_scale) == 8.0


def test_what_the_family_of_the_walk_through_has_not_is_said(tiny, tmp_path):
    optimizer = LossScaleOptimizer(tiny.sgd())
    with pytest.raises(NotImplementedError, match=r"SGD has no config.*tf\.train\.Checkpoint"):
        optimizer.get_config()
    with pytest.raises(ValueError, match="`clipnorm` is not supported for SGD"):
        LossScaleOptimizer(tiny.sgd(), clipnorm=1.0)
    weight = tf.Variable(1.0)
    path = tf.train.Checkpoint(optimizer=tf.keras.optimizers.SGD(), weight=weight).write(str(tmp_path / "ckpt"))
    with pytest.raises(TypeError, match="`optimizer` must be"):
        migrate.restore(path, optimizer, [weight])
