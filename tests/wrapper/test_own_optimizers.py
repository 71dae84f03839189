"""Optimizers of every form that a user writes train, skip, save and report as an optimizer of a library does."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest
import tensorflow as tf

import tf_lossscale
from tests import strategies
from tf_lossscale import LossScaleOptimizer
from tf_lossscale.families import registry

INF = float("inf")
FACTORS = (1.0, INF, 2.0, INF, 1.0)


class PlainObject:
    def __init__(self):
        self.lr = 0.5

    def update(self, gradients, variables):
        return [variable.assign_sub(self.lr * gradient) for gradient, variable in zip(gradients, variables)]


@dataclasses.dataclass
class DataClass:
    """It is not hashable."""

    rate: float = 0.5

    def update(self, gradients, variables):
        return [variable.assign_sub(self.rate * gradient) for gradient, variable in zip(gradients, variables)]


class WithSlots:
    """It has no `__dict__`, and cannot be referenced weakly."""

    __slots__ = ("learning_rate",)

    def __init__(self):
        self.learning_rate = 0.5

    def update(self, gradients, variables):
        return [variable.assign_sub(self.learning_rate * gradient) for gradient, variable in zip(gradients, variables)]


class Callable(PlainObject):
    def __call__(self, gradients, variables):
        return super().update(gradients, variables)

    update = __call__


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


class Counting:
    """It has a step count, and no other state."""

    def __init__(self):
        self.lr = 0.5
        self.iterations = tf.Variable(0, dtype=tf.int64, trainable=False)

    def update(self, gradients, variables):
        return [self.iterations.assign_add(1), *PlainObject.update(self, gradients, variables)]


OPTIMIZERS = {cls.__name__: cls for cls in (PlainObject, DataClass, WithSlots, Callable, Module, Counting)}
COUNT = ("Module", "Counting")
RATES = {
    "PlainObject": "lr",
    "DataClass": "rate",
    "WithSlots": "learning_rate",
    "Callable": "lr",
    "Module": "learning_rate",
}
each_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(registry, "REGISTERED", dict(registry.REGISTERED))
    for name, cls in OPTIMIZERS.items():
        counts = {} if name in COUNT else {"count_skipped_step": lambda self: None}
        methods = {
            "build": lambda self, variables: build(self.inner, variables),
            "apply": lambda self, gradients, variables: self.inner.update(gradients, variables),
        }
        family = type(f"{name}Family", (tf_lossscale.Family,), {"optimizer_class": cls, **methods, **counts})
        tf_lossscale.register_family(family)


def build(inner, variables):
    if hasattr(inner, "build"):
        with tf.init_scope():
            inner.build(variables)


def taken(name, way, **kwargs):
    """The weight, the scale and the step count after each step."""
    inner = OPTIMIZERS[name]()
    optimizer, weight = LossScaleOptimizer(inner, initial_scale=64, **kwargs), tf.Variable(1.0)
    step, found = way(lambda factor: optimizer.minimize(lambda: weight * factor, [weight])), []
    for factor in FACTORS:
        step(tf.constant(factor))
        count = int(inner.iterations) if name in COUNT else 0
        found.append((float(weight), float(optimizer.loss_scale), count))
    return found


def expected(name):
    weights = (0.5, 0.5, -0.75, -0.75, -1.875) if name == "Module" else (0.5, 0.5, -0.5, -0.5, -1.0)
    counts = (1, 2, 3, 4, 5) if name in COUNT else (0,) * 5
    return list(zip(weights, (64, 32, 32, 16, 16), counts))


@pytest.mark.table(
    "function-Counting",
    "eager-Callable",
    "XLA-PlainObject",
    "jit_compile-DataClass",
    "eager-WithSlots",
    "eager-Module",
    every=1,
)
@each_optimizer
@pytest.mark.parametrize("way", ["eager", "function", "XLA", "jit_compile"])
def test_it_trains_and_skips(name, way):
    function = {"eager": lambda step: step, "XLA": tf.function(jit_compile=True)}.get(way, tf.function)
    assert taken(name, function, jit_compile=way == "jit_compile") == expected(name)


@pytest.mark.table("WithSlots", "Counting", "Callable", every=1)
@each_optimizer
def test_an_overflow_on_the_second_replica_alone_skips_the_step_and_each_step_counts_once(name):
    strategy = strategies.get("mirrored_2")
    with strategy.scope():
        inner = OPTIMIZERS[name]()
        optimizer, weight = LossScaleOptimizer(inner, initial_scale=64), tf.Variable(1.0)

    @tf.function
    def step(factor):
        def on_replica():
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            optimizer.minimize(lambda: weight * tf.where(replica == 1, factor, 0.0), [weight])

        strategy.run(on_replica)

    found = []
    for factor in FACTORS:
        step(tf.constant(factor))
        (of_first, of_second) = (float(each) for each in strategy.experimental_local_results(weight))
        assert of_first == of_second
        count = int(inner.iterations.values[0]) if name in COUNT else 0
        found.append((of_first, float(optimizer.loss_scale), count))
    assert found == expected(name)


@each_optimizer
def test_outside_of_the_strategys_scope_a_variable_of_the_optimizer_is_an_error_before_the_step(name):
    strategy, inner = strategies.get("mirrored_2"), OPTIMIZERS[name]()
    optimizer = LossScaleOptimizer(inner, initial_scale=64)
    with strategy.scope():
        weight = tf.Variable(1.0)

    def step():
        strategy.run(lambda: optimizer.minimize(lambda: 0.5 * weight, [weight]))

    if name not in COUNT:
        step()
        assert float(weight.values[0]) == 0.5
        return
    with pytest.raises(ValueError, match=rf"{name} was created outside of strategy.scope\(\)"):
        step()
    assert (float(weight.values[0]), int(inner.iterations)) == (1.0, 0)


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
@pytest.mark.parametrize("option", ["clipnorm", "clipvalue", "global_clipnorm", "weight_decay", "ema_momentum"])
def test_an_option_that_it_does_not_have_is_refused(name, option):
    with pytest.raises(ValueError, match=f"`{option}` is not supported for {name}"):
        LossScaleOptimizer(OPTIMIZERS[name](), **{option: 0.5})


@pytest.mark.table("WithSlots", every=1)
@each_optimizer
def test_it_is_wrapped_once(name):
    inner = OPTIMIZERS[name]()
    optimizer = LossScaleOptimizer(inner)
    with pytest.raises(ValueError, match="already wrapped"):
        LossScaleOptimizer(inner)
    del optimizer
    LossScaleOptimizer(inner)


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
def test_a_deep_copy_is_independent(name):
    optimizer, weight = LossScaleOptimizer(OPTIMIZERS[name](), initial_scale=64), tf.Variable(1.0)
    optimizer.minimize(lambda: weight * INF, [weight])
    again = copy.deepcopy(optimizer)
    again.minimize(lambda: weight * INF, [weight])
    assert (float(optimizer.loss_scale), float(again.loss_scale)) == (32.0, 16.0)
    assert again.inner_optimizer is not optimizer.inner_optimizer


@each_optimizer
def test_a_config_is_refused_with_the_name_of_the_class(name):
    with pytest.raises(NotImplementedError, match=f"{name} has no config"):
        LossScaleOptimizer(OPTIMIZERS[name]()).get_config()


@each_optimizer
def test_the_diagnosis_and_a_stall_work(name):
    inner = OPTIMIZERS[name]()
    optimizer = LossScaleOptimizer(inner, diagnose=True, on_stall="raise", stall_steps=2)
    weight = tf.Variable(1.0)
    optimizer.minimize(lambda: weight * INF, [weight])
    with pytest.raises(FloatingPointError):
        optimizer.minimize(lambda: weight * INF, [weight])
    assert [row.steps for row in optimizer.overflow_report()] == [2]
    assert np.isinf(optimizer.gradient_norm.numpy())


@each_optimizer
def test_a_rule_of_the_users_own_works_with_it(name):
    class Eighths(tf_lossscale.LossScale):
        def __init__(self):
            super().__init__()
            self.value = tf.Variable(64.0, trainable=False)

        def __call__(self):
            return self.value.read_value()

        def move(self, applied):
            return [self.value.assign(tf.where(applied, self.value, self.value / 8.0))]

    optimizer, weight = LossScaleOptimizer(OPTIMIZERS[name](), loss_scale=Eighths()), tf.Variable(1.0)
    for factor in (1.0, INF):
        optimizer.minimize(lambda factor=factor: weight * factor, [weight])
    assert (float(weight), float(optimizer.loss_scale)) == (0.5, 8.0)


def test_a_tf1_graph_needs_a_family_that_returns_operations():
    with tf.Graph().as_default():
        optimizer = LossScaleOptimizer(PlainObject(), initial_scale=64)
        weight = tf.compat.v1.get_variable("weight", initializer=1.0, use_resource=True)
        with pytest.raises(RuntimeError, match="cannot train in graph mode"):
            optimizer.minimize(lambda: weight * 1.0, [weight])


class Rated(tf.Module):
    def __init__(self, rate):
        super().__init__()
        self.rate = rate


class RatedFamily(tf_lossscale.Family):
    optimizer_class = Rated
    learning_rate_name = "rate"

    def build(self, variables):
        pass

    def apply(self, gradients, variables):
        for gradient, variable in zip(gradients, variables):
            variable.assign_sub(self.inner.rate * gradient)

    def count_skipped_step(self):
        return None


@pytest.mark.parametrize("kind", ["variable", "number"])
def test_a_learning_rate_set_after_the_trace_reaches_the_function_or_a_warning_says_not(kind, monkeypatch):
    said = []
    monkeypatch.setattr("absl.logging.warning", lambda message, *values: said.append(message % values))
    tf_lossscale.register_family(RatedFamily)
    rate = tf.Variable(1.0, trainable=False) if kind == "variable" else 1.0
    optimizer, weight = tf_lossscale.LossScaleOptimizer(Rated(rate)), tf.Variable(0.0)

    @tf.function
    def step():
        optimizer.minimize(lambda: weight * 1.0, [weight])

    step()
    optimizer.learning_rate = 0.0
    step()
    assert float(optimizer.learning_rate) == 0.0
    assert weight.numpy() == (-1.0 if kind == "variable" else -2.0)
    assert [text for text in said if "traced function keeps the old value" in text] == said[: kind == "number"]
    assert len(said) == (kind == "number")


@pytest.mark.parametrize("slots", [False, True])
def test_a_step_count_that_cannot_be_assigned_is_refused_when_the_optimizer_is_wrapped(slots):
    if slots:

        class Counting:
            __slots__ = ("iterations",)

            def __init__(self):
                self.iterations = 0
    else:

        class Counting:
            def __init__(self):
                self.iterations = 0

    class CountingFamily(tf_lossscale.Family):
        optimizer_class = Counting

        def build(self, variables):
            pass

        def apply(self, gradients, variables):
            pass

    tf_lossscale.register_family(CountingFamily)
    with pytest.raises(TypeError, match=r"must define count_skipped_step\(\) for a Counting"):
        tf_lossscale.LossScaleOptimizer(Counting())


def test_a_wrapper_around_an_own_optimizer_that_is_pickled_names_the_way_to_save_it():
    tf_lossscale.register_family(RatedFamily)
    optimizer = tf_lossscale.LossScaleOptimizer(Rated(1.0))
    with pytest.raises(TypeError, match=r"around a Rated cannot be pickled. Save it with tf.train.Checkpoint"):
        pickle.dumps(optimizer)
    assert copy.deepcopy(optimizer).inner_optimizer.rate == 1.0
