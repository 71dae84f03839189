"""Optimizers of every form that a user writes train, skip, save and report as an optimizer of a library does."""

import copy
import dataclasses
import pickle

import pytest
import tensorflow as tf

import tf_lossscale
from tests import strategies
from tests.cases import combinations
from tf_lossscale import LossScaleOptimizer
from tf_lossscale.wrapper import registry

INF = float("inf")
FACTORS = (1.0, INF, 2.0, INF, 1.0)


def descend(rate, gradients, variables):
    return [variable.assign_sub(rate * gradient) for gradient, variable in zip(gradients, variables)]


class PlainObject:
    def __init__(self):
        self.lr = 0.5

    def update(self, gradients, variables):
        return descend(self.lr, gradients, variables)


@dataclasses.dataclass
class DataClass:
    """It is not hashable."""

    rate: float = 0.5

    def update(self, gradients, variables):
        return descend(self.rate, gradients, variables)


class WithSlots:
    """It has no `__dict__`, and cannot be referenced weakly."""

    __slots__ = ("learning_rate",)

    def __init__(self):
        self.learning_rate = 0.5

    def update(self, gradients, variables):
        return descend(self.learning_rate, gradients, variables)


class Module(tf.Module):
    """It has a step count and a momentum."""

    def __init__(self):
        super().__init__()
        self.learning_rate = 0.5
        self.iterations = tf.Variable(0, dtype=tf.int64, trainable=False)
        self.momentum = None

    def build(self, variables):
        if self.momentum is None:
            self.momentum = [tf.Variable(tf.zeros_like(variable), trainable=False) for variable in variables]

    def update(self, gradients, variables):
        updates = [self.iterations.assign_add(1)]
        for gradient, momentum, variable in zip(gradients, self.momentum, variables):
            moved = momentum.assign(0.5 * momentum + gradient)
            with tf.control_dependencies([] if tf.executing_eagerly() else [moved]):
                updates += [moved, variable.assign_sub(self.learning_rate * momentum.read_value())]
        return updates


OPTIMIZERS = {cls.__name__: cls for cls in (PlainObject, DataClass, WithSlots, Module)}
each_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def register(cls, **methods):
    def apply(family, gradients, variables):
        return family.inner.update(gradients, variables)

    methods = {"build": lambda family, variables: build(family.inner, variables), "apply": apply, **methods}
    tf_lossscale.register_family(
        type(f"{cls.__name__}Family", (tf_lossscale.Family,), {"optimizer_class": cls, **methods})
    )


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(registry, "REGISTERED", dict(registry.REGISTERED))
    for cls in OPTIMIZERS.values():
        register(cls)


def build(inner, variables):
    if hasattr(inner, "build"):
        with tf.init_scope():
            inner.build(variables)


def expected(name):
    weights = (0.5, 0.5, -0.75, -0.75, -1.875) if name == "Module" else (0.5, 0.5, -0.5, -0.5, -1.0)
    counts = (1, 2, 3, 4, 5) if name == "Module" else (0,) * 5
    return list(zip(weights, (64, 32, 32, 16, 16), counts))


@pytest.mark.parametrize(
    ("way", "name"),
    combinations(
        ["eager", "function", "XLA"],
        OPTIMIZERS,
        usual=["function-Module", "XLA-PlainObject", "eager-WithSlots", "eager-DataClass"],
    ),
)
def test_it_trains_and_skips(name, way):
    inner = OPTIMIZERS[name]()
    optimizer, weight = LossScaleOptimizer(inner, initial_scale=64), tf.Variable(1.0)
    function = {"eager": lambda step: step, "XLA": tf.function(jit_compile=True)}.get(way, tf.function)
    step, found = function(lambda factor: optimizer.minimize(lambda: weight * factor, [weight])), []
    for factor in FACTORS:
        step(tf.constant(factor))
        count = int(inner.iterations) if name == "Module" else 0
        found.append((float(weight), float(optimizer.loss_scale), count))
    assert found == expected(name)


@pytest.mark.parametrize("name", combinations(OPTIMIZERS, usual=["WithSlots", "Module"]))
def test_an_overflow_on_the_second_replica_alone_skips_the_step_and_each_step_counts_once(name):
    strategy = strategies.get("mirrored_2")
    with strategy.scope():
        inner = OPTIMIZERS[name]()
        optimizer, weight = LossScaleOptimizer(inner, initial_scale=64), tf.Variable(1.0)

    def on_replica(factor):
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        optimizer.minimize(lambda: weight * tf.where(replica == 1, factor, 0.0), [weight])

    step, found = tf.function(lambda factor: strategy.run(on_replica, (factor,))), []
    for factor in FACTORS:
        step(tf.constant(factor))
        (of_first, of_second) = (float(each) for each in strategy.experimental_local_results(weight))
        assert of_first == of_second
        count = int(inner.iterations.values[0]) if name == "Module" else 0
        found.append((of_first, float(optimizer.loss_scale), count))
    assert found == expected(name)


def stepped_outside_of_the_scope(inner):
    """A weight of 1 under a strategy, and a step with an optimizer that was created outside of its scope."""
    strategy, optimizer = strategies.get("mirrored_2"), LossScaleOptimizer(inner, initial_scale=64)
    with strategy.scope():
        weight = tf.Variable(1.0)
    return weight, lambda: strategy.run(lambda: optimizer.minimize(lambda: 0.5 * weight, [weight]))


def test_outside_of_the_strategys_scope_a_variable_of_the_optimizer_is_an_error_before_the_step():
    inner = OPTIMIZERS["Module"]()
    weight, step = stepped_outside_of_the_scope(inner)
    with pytest.raises(ValueError, match=r"of the inner Module, .*, was created outside of strategy.scope\(\)"):
        step()
    assert (float(weight.values[0]), int(inner.iterations)) == (1.0, 0)


@pytest.mark.parametrize("name", sorted({*OPTIMIZERS} - {"Module"}))
def test_outside_of_the_strategys_scope_an_optimizer_that_creates_its_variables_later_steps(name):
    weight, step = stepped_outside_of_the_scope(OPTIMIZERS[name]())
    step()
    assert float(weight.values[0]) == 0.5


@each_optimizer
def test_the_learning_rate_reaches_the_attribute_that_the_optimizer_reads_or_raises(name):
    inner = OPTIMIZERS[name]()
    optimizer, weight = LossScaleOptimizer(inner, initial_scale=64), tf.Variable(1.0)
    if name == "DataClass":
        for attribute in ("lr", "learning_rate"):
            with pytest.raises(AttributeError, match="neither a `learning_rate` nor an `lr`"):
                setattr(optimizer, attribute, 0.25)
            assert not hasattr(optimizer, attribute)
        return
    for attribute, rate in (("lr", 0.25), ("learning_rate", 0.125)):
        setattr(optimizer, attribute, rate)
        assert (optimizer.lr, optimizer.learning_rate) == (rate, rate)
    optimizer.minimize(lambda: 1.0 * weight, [weight])
    assert float(weight) == 0.875


@each_optimizer
def test_a_checkpoint_or_the_state_restores_the_scale(name, tmp_path):
    def used():
        optimizer, weight = LossScaleOptimizer(OPTIMIZERS[name](), initial_scale=64), tf.Variable(1.0)
        for factor in (INF, 1.0):
            optimizer.minimize(lambda factor=factor: weight * factor, [weight])
        return optimizer

    optimizer = used()
    other = LossScaleOptimizer(OPTIMIZERS[name](), initial_scale=64)
    if name == "Module":
        build(other.inner_optimizer, [tf.Variable(1.0)])
        path = tf.train.Checkpoint(optimizer=optimizer).write(str(tmp_path / "checkpoint"))
        tf.train.Checkpoint(optimizer=other).read(path).assert_existing_objects_matched()
        assert int(other.inner_optimizer.iterations) == 2
        assert float(other.inner_optimizer.momentum[0]) == 1.0
    else:
        with pytest.raises(ValueError, match=r"[Tt]rackable"):
            tf.train.Checkpoint(optimizer=optimizer)
        other.set_state(optimizer.state())
    assert (float(other.loss_scale), int(other.dynamic_counter)) == (32.0, 1)


@each_optimizer
def test_the_diagnosis_and_a_copy_work_and_a_config_is_refused_with_the_name_of_the_class(name):
    inner = OPTIMIZERS[name]()
    optimizer = LossScaleOptimizer(inner, diagnose=True)
    weight = tf.Variable(1.0)
    optimizer.minimize(lambda: weight * INF, [weight])
    again = copy.deepcopy(optimizer)
    optimizer.minimize(lambda: weight * INF, [weight])
    assert [row.steps for row in optimizer.overflow_report()] == [2]
    assert again.inner_optimizer is not optimizer.inner_optimizer
    assert (float(optimizer.loss_scale), float(again.loss_scale)) == (2.0**13, 2.0**14)
    with pytest.raises(NotImplementedError, match=f"{name} has no config"):
        optimizer.get_config()
    with pytest.raises(TypeError, match=rf"around a {name} cannot be pickled. Save it with tf.train.Checkpoint"):
        pickle.dumps(optimizer)
    with pytest.raises(ValueError, match="already wrapped"):
        LossScaleOptimizer(inner)


@pytest.mark.parametrize("kind", ["variable", "number"])
def test_a_learning_rate_set_after_the_trace_reaches_the_function_or_a_warning_says_not(kind, warnings):
    register(DataClass, learning_rate_name="rate")
    rate = tf.Variable(1.0, trainable=False) if kind == "variable" else 1.0
    optimizer, weight = LossScaleOptimizer(DataClass(rate)), tf.Variable(0.0)

    @tf.function
    def step():
        optimizer.minimize(lambda: weight * 1.0, [weight])

    step()
    optimizer.learning_rate = 0.0
    step()
    assert float(optimizer.learning_rate) == 0.0
    assert weight.numpy() == (-1.0 if kind == "variable" else -2.0)
    of_the_rate = warnings[1:]  # the first is about checkpoints
    assert ["traced function keeps the old value" in text for text in of_the_rate] == [True] * (kind == "number")


@pytest.mark.parametrize("base", [PlainObject, WithSlots])
def test_a_step_count_that_cannot_be_assigned_is_refused_when_the_optimizer_is_wrapped(base):
    class Numbered(base):
        __slots__ = ("iterations",) if base is WithSlots else ()

        def __init__(self):
            super().__init__()
            self.iterations = 0

    register(Numbered)
    with pytest.raises(TypeError, match=r"must define count_skipped_step\(\) for a Numbered"):
        LossScaleOptimizer(Numbered())
