"""`fit` under strategies: compile, mixed_float16, jit_compile, an overflow on one replica."""

import contextlib
import functools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import strategies
from tests.cases import combinations
from tests.families import FAMILIES, families
from tf_function_tests.cell import why_not
from tf_lossscale import LossScaleOptimizer

STRATEGIES = strategies.here(
    "none", "one_device", "mirrored_2", "mirrored_2_apart", "mirrored_4", "central_storage", "tpu", strategies.GPU
)
BATCH = 8


@contextlib.contextmanager
def policy(family, name):
    """The dtype policy, for a while."""
    mixed = family.keras.mixed_precision
    before = mixed.global_policy() if hasattr(mixed, "global_policy") else mixed.dtype_policy()
    set_policy = getattr(mixed, "set_global_policy", None) or mixed.set_dtype_policy
    set_policy(name)
    try:
        yield
    finally:
        set_policy(before)


def fitted(family, name, x, y, dtype="mixed_float16", epochs=1, optimizer=None, **compile_options):
    """A model after `fit`, with its weights on every replica."""
    apart = name.endswith("_apart")
    strategy = strategies.get(name.removesuffix("_apart"))
    layers = family.keras.layers
    with policy(family, dtype), strategies.apart(strategy) if apart else contextlib.nullcontext():
        with contextlib.nullcontext() if strategy is None else strategy.scope():
            model = family.keras.Sequential(
                [
                    layers.Input((4,)),
                    layers.Dense(8, kernel_initializer="ones"),
                    layers.Dense(1, kernel_initializer="ones", dtype="float32"),
                ]
            )
            wrapped = LossScaleOptimizer(family.adam(), initial_scale=64.0, dynamic_growth_steps=3)
            optimizer = optimizer() if optimizer else wrapped
            model.compile(optimizer, "mse", **compile_options)
        model.fit(x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0)
    assert model.optimizer is optimizer, "not wrapped again"
    return model


def data(batches, bad_row=None):
    """Random rows and their sums; one of the rows overflows."""
    x = np.random.default_rng(0).normal(size=(BATCH * batches, 4)).astype("float32")
    y = x.sum(1, keepdims=True)
    if bad_row is not None:
        x[bad_row] = 1e38
    return x, y


@functools.cache
def learned_without(family, bad_row, **options):
    """The weights and the scale after a `fit` without a strategy, which XLA does not compile."""
    model = fitted(family, "none", *data(4, bad_row), jit_compile=False, **options)
    return model.get_weights(), float(model.optimizer.loss_scale)


def count(optimizer):
    return int(np.asarray(optimizer.iterations))


@pytest.mark.parametrize(
    ("name", "family"), combinations(STRATEGIES, FAMILIES, usual=["mirrored_2-keras3", "none-tf_keras_legacy"])
)
def test_fit_skips_the_step_of_a_batch_that_overflows_on_the_last_replica(family, name):
    if why_not(family, name, "fit"):
        pytest.skip(why_not(family, name, "fit"))
    x, y = data(4, bad_row=2 * BATCH - 1)  # the last one of the second batch
    # tf_keras refuses mixed precision in central storage.
    dtype = "float32" if name == "central_storage" else "mixed_float16"
    model = fitted(family, name, x, y, dtype, jit_compile=False)
    optimizer = model.optimizer
    assert all(np.isfinite(w).all() for w in model.get_weights())
    assert float(optimizer.loss_scale) == 32.0
    assert int(np.asarray(optimizer.dynamic_counter.numpy())) == 2
    # A skipped step counts by TensorFlow 2's contract, and does not by Keras 3's.
    assert count(optimizer) == (3 if family.name == "keras3" else 4)


@pytest.mark.parametrize(
    ("name", "family"),
    combinations([name for name in STRATEGIES if name != "none"], FAMILIES, usual=["mirrored_2-keras3"]),
)
def test_fit_learns_under_a_strategy_what_it_learns_without(family, name):
    if why_not(family, name, "fit"):
        pytest.skip(why_not(family, name, "fit"))
    mine = fitted(family, name, *data(4), dtype="float32", epochs=2, jit_compile=False)
    weights, scale = learned_without(family, None, dtype="float32", epochs=2)
    for a, b in zip(mine.get_weights(), weights):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)
    assert float(mine.optimizer.loss_scale) == scale


@pytest.mark.parametrize(
    ("name", "family"), combinations(["none", "one_device"], FAMILIES, usual=["one_device-keras3"])
)
def test_compiled_fit_in_float16_is_fit(family, name):
    mine = fitted(family, name, *data(4, bad_row=0), jit_compile=True)
    weights, scale = learned_without(family, 0)
    for a, b in zip(mine.get_weights(), weights):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)
    assert float(mine.optimizer.loss_scale) == scale == 64.0


class TestCompiledFitOverSeveralReplicas:
    """compile(jit_compile=True) and fit in mixed_float16 under MirroredStrategy: keras-team/keras issue 21366.

    On GPUs, replicas cannot meet in a function that XLA compiles, and Keras's own wrapper has them meet inside its
    tf.cond. On CPUs TensorFlow compiles no function whose variables are on a second virtual CPU, so what can be shown
    is two things: that such a function is traced up to there, and that it trains right where it is not compiled.
    """

    def test_it_crashes_with_the_wrapper_of_keras(self):
        family = FAMILIES[0]
        with pytest.raises(RuntimeError, match="merge_call"):
            fitted(
                family,
                "mirrored_2_apart",
                *data(1),
                optimizer=lambda: keras.optimizers.LossScaleOptimizer(family.adam()),
                jit_compile=True,
            )

    @families
    def test_it_is_traced(self, family):
        x, y = data(1)
        with pytest.raises(tf.errors.InvalidArgumentError, match="tfvariable_on_a_different_device"):
            fitted(family, "mirrored_2_apart", x, y, jit_compile=True)


@pytest.mark.skipif(strategies.ROLE != "worker", reason="test_processes.py runs it, in workers")
def test_keras_3_cannot_fit_over_workers_with_any_optimizer_and_the_wrapper_says_so(monkeypatch):
    seen = []
    monkeypatch.setattr("absl.logging.warning", lambda message, *values: seen.append(message % values))
    with pytest.raises(ValueError, match=r"(?s)PerReplica.*unsupported type"):
        fitted(FAMILIES[0], "workers_2", *data(1), dtype="float32", optimizer=FAMILIES[0].adam, jit_compile=False)
    assert len(seen) == 1  # of the wrapper that `fitted` makes as well
    assert re.match(r"Keras 3's model\.fit fails under .*Strategy.*custom training loop.*tf_keras", seen[0])
