"""Family declares every question: adapters override nothing else, and a new family needs nothing else."""

import pathlib
import re
import sys
import types

import numpy as np
import pytest
import tensorflow as tf
from absl import logging

from tests import test_families
from tests.families import ApplyOnly
from tf_lossscale import LossScaleOptimizer, migrate
from tf_lossscale.wrapper import families
from tf_lossscale.wrapper.family import Family

CONTRIBUTING = pathlib.Path(__file__).parents[2] / "CONTRIBUTING.md"
ADAPTERS = [pytest.param(row.adapter, id=row.adapter) for row in families._FAMILIES]
# Names that a library reads of instances, and no class of it declares.
READ_BY_A_LIBRARY = {
    "_is_wrapped_by_loss_scale_optimizer": "tf_keras, before its own wrapper wraps an optimizer",
    "built": "every Keras 3 optimizer sets this attribute",
    "dynamic_scale": "Keras 3's wrapper makes this attribute when it is built",
    "get_updates": "Keras 2's `fit` in graph mode, of every optimizer",
    "step_counter": "Keras 3's wrapper makes this attribute when it is built",
}


def of_library(adapter):
    return {
        name
        for base in adapter.__mro__
        if base is not object and not base.__module__.startswith("tf_lossscale")
        for name in vars(base)
    }


def undeclared(adapter):
    """Names that an adapter defines, and that Family, LossScaleOptimizer's API and the library do not declare."""
    own = {n for base in adapter.__mro__ if base.__module__ == adapter.__module__ for n in vars(base)}
    public = {name for name in dir(LossScaleOptimizer) if not name.startswith("_")}
    found = own - set(vars(Family)) - public - of_library(adapter) - set(READ_BY_A_LIBRARY)
    return {name for name in found if not name.startswith("__")}


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_adapter_defines_only_what_family_or_its_library_declares(adapter):
    assert undeclared(families.load(adapter)) == set()


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_no_question_hides_a_name_of_the_library(adapter):
    hooks = {name for name in vars(Family) if not name.startswith("__")}
    assert hooks & of_library(families.load(adapter)) == set()


def test_every_question_has_a_sentence_and_is_asked():
    source = pathlib.Path(sys.modules[Family.__module__].__file__).read_text()
    package = pathlib.Path(sys.modules["tf_lossscale"].__file__).parent
    asking = "".join(path.read_text() for path in package.rglob("*.py") if "adapters" not in path.parts)
    for name, value in vars(Family).items():
        if name.startswith("__"):
            continue
        if callable(value) or isinstance(value, (property, staticmethod, classmethod)):
            doc = (value.fget if isinstance(value, property) else value).__doc__
            assert doc and doc.endswith("."), name
        else:
            assert re.search(rf"#: .*\n    {name}\b", source), name
        assert len(re.findall(rf"\.{name}\b", asking)) >= 1, f"{name} is declared, but nothing asks for it"


def test_a_question_without_an_answer_says_what_the_adapter_must_define():
    for ask in (
        lambda: Family()._build_inner([]),
        lambda: Family()._apply_reduced([]),
        lambda: Family._slot_of(None, None, "m", "_m"),
    ):
        with pytest.raises(NotImplementedError, match=r"must define _\w+\(.*\) to .*CONTRIBUTING.md"):
            ask()


@pytest.fixture
def tiny(monkeypatch):
    """The family that CONTRIBUTING.md adds."""
    library, adapter, row, row_of_tests = re.findall(
        r"^```python\n(.*?)^```", CONTRIBUTING.read_text(), re.MULTILINE | re.DOTALL
    )
    for name, code in (("tiny", library), ("tf_lossscale.adapters.tiny", adapter)):
        module = types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        exec(compile(code, name, "exec"), vars(module))
    monkeypatch.setattr(families, "_FAMILIES", [*families._FAMILIES, eval(row, vars(families))])
    monkeypatch.setitem(test_families.ARGUMENTS, "tiny", {"SGD": test_families.RATE})
    return eval(row_of_tests, {"ApplyOnly": ApplyOnly, "tiny": sys.modules["tiny"]})


def test_the_family_of_the_walk_through_keeps_the_promises(tiny):
    suite = test_families
    suite.test_every_optimizer_takes_bit_for_bit_the_same_steps_with_a_power_of_two_scale_as_without(tiny, "SGD")
    suite.test_every_optimizer_is_left_as_it_was_by_skipped_first_steps(tiny, "SGD")
    assert undeclared(type(LossScaleOptimizer(tiny.sgd()))) == set()


@pytest.mark.parametrize("hook", ["_build_inner", "_apply_reduced", "_advance_iterations"])
def test_a_hook_that_is_missing_is_an_error_when_an_optimizer_is_wrapped(tiny, hook, monkeypatch):
    inner = tiny.sgd()
    if hook == "_advance_iterations":
        del inner.iterations
    else:
        monkeypatch.delattr(families.load("tiny"), hook)
    with pytest.raises(NotImplementedError, match=rf"must define {hook}\(.*\) to .*CONTRIBUTING.md"):
        LossScaleOptimizer(inner)
    assert not families.is_wrapped(inner)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_the_family_of_the_walk_through_applies_skips_and_goes_on_from_a_checkpoint(tiny, compiled, tmp_path):
    weight = tf.Variable([1.0])
    optimizer = LossScaleOptimizer(tiny.sgd(momentum=0.5), initial_scale=8.0, dynamic_growth_steps=2)

    def step(factor):
        return optimizer.minimize(lambda: tf.reduce_sum(weight * factor), [weight])

    step = tf.function(step) if compiled else step
    step(tf.constant(1.0))
    np.testing.assert_array_equal(weight, [0.5])
    step(tf.constant(np.inf))
    np.testing.assert_array_equal(weight, [0.5])
    assert (float(optimizer.loss_scale), int(optimizer.iterations), optimizer.momentum) == (4.0, 2, 0.5)
    path = tf.train.Checkpoint(optimizer=optimizer, weight=weight).save(str(tmp_path / "ckpt"))
    for _ in range(2):
        step(tf.constant(1.0))
    assert float(optimizer.loss_scale) == 8.0
    after = weight.numpy()

    weight.assign([9.0])
    again = LossScaleOptimizer(tiny.sgd(momentum=0.5), initial_scale=64.0, dynamic_growth_steps=2)
    again.build([weight])
    tf.train.Checkpoint(optimizer=again, weight=weight).restore(path).assert_consumed()
    assert (float(again.loss_scale), int(again.iterations)) == (4.0, 2)
    for _ in range(2):
        again.minimize(lambda: tf.reduce_sum(weight), [weight])
    np.testing.assert_array_equal(weight, after)
    assert (float(again.loss_scale), int(again.iterations)) == (8.0, 4)


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


def test_an_inner_optimizer_that_cannot_hold_the_loss_scale_is_warned_about(tiny, monkeypatch):
    said = []
    monkeypatch.setattr(logging, "warning", lambda message, *values: said.append(message % values))
    LossScaleOptimizer(tiny.sgd())
    library = re.search(r"^```python\n(.*?)^```", CONTRIBUTING.read_text(), re.MULTILINE | re.DOTALL)[1]
    exec(library.replace("tf.Module", "object"), vars(sys.modules["tiny"]))
    LossScaleOptimizer(tiny.sgd(), dynamic=False, initial_scale=8)
    assert not said
    LossScaleOptimizer(tiny.sgd())
    assert "A checkpoint of the inner SGD does not hold the loss scale" in said[0]
