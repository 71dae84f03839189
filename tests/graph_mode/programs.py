"""Programs in graph mode, each run with an original wrapper and with ours.

`disable_eager_execution` and `disable_v2_behavior` change TensorFlow for good, so each runs in a process of its own:
`python -m tests.graph_mode.programs disable_eager_execution` prints the results of all programs as JSON, and with a
number as a second argument those of one program in so many.
"""

import contextlib
import functools
import json
import os
import sys
import tempfile
import traceback

import numpy as np
import tensorflow as tf

import tf_lossscale
from tf_lossscale import legacy
from tf_lossscale.libraries import keras_versions

v1 = tf.compat.v1
tf_keras = keras_versions.keras_2()
backend = tf_keras.backend

X = np.linspace(-1, 1, 24, dtype="float32").reshape(8, 3)
Y = X.sum(axis=1, keepdims=True) + 0.5
BAD = np.full_like(X, np.inf)


# Optimizers. ----------------------------------------------------------------------------------------------------------


def _by_name(module, *names, suffix=""):
    return {name: lambda name=name: getattr(module, name + suffix)(0.05) for name in names}


_NAMES = ("Adadelta", "Adagrad", "Adam", "Ftrl")
#: Family -> name -> a function that makes an optimizer.
OPTIMIZERS = {
    "legacy": {
        "SGD": lambda: tf_keras.optimizers.legacy.SGD(0.05, momentum=0.5),
        **_by_name(tf_keras.optimizers.legacy, *_NAMES, "Adamax", "Nadam", "RMSprop"),
    },
    "new": _by_name(tf_keras.optimizers, "SGD", "Adam"),
    "tf1": {
        "Momentum": lambda: v1.train.MomentumOptimizer(0.05, 0.5),
        **_by_name(v1.train, *_NAMES, "GradientDescent", "ProximalAdagrad", "RMSProp", suffix="Optimizer"),
    },
}


# Wrappers: functions of an optimizer and of whether the scale is dynamic. ---------------------------------------------


def _arguments(dynamic):
    return dict(initial_scale=8.0, dynamic_growth_steps=3) if dynamic else dict(dynamic=False, initial_scale=8.0)


def _old_scale(dynamic, module=legacy):
    return module.DynamicLossScale(8.0, 3) if dynamic else module.FixedLossScale(8.0)


def _manager(dynamic):
    if not dynamic:
        return legacy.FixedLossScaleManager(8.0)
    return legacy.ExponentialUpdateLossScaleManager(8.0, 3, decr_every_n_nan_or_inf=1, incr_ratio=2, decr_ratio=0.5)


def _ours(inner, dynamic):
    return tf_lossscale.LossScaleOptimizer(inner, **_arguments(dynamic))


def _rewrite(inner, dynamic):
    wrapped = legacy.enable_mixed_precision_graph_rewrite(inner, _old_scale(dynamic))
    legacy.disable_mixed_precision_graph_rewrite()
    return wrapped


def _original_of_keras(inner, dynamic):
    return tf_keras.mixed_precision.LossScaleOptimizer(inner, **_arguments(dynamic))


def _original_of_tf1(inner, dynamic):
    return v1.mixed_precision.MixedPrecisionLossScaleOptimizer(inner, _old_scale(dynamic, v1.mixed_precision))


_KERAS = {
    "LossScaleOptimizer": _ours,
    "experimental": lambda inner, dynamic: legacy.experimental.LossScaleOptimizer(inner, _old_scale(dynamic)),
    "graph rewrite": _rewrite,
}

ORIGINALS = {"legacy": _original_of_keras, "new": _original_of_keras, "tf1": _original_of_tf1}
WRAPPERS = {
    "legacy": _KERAS,
    "new": _KERAS,
    "tf1": {
        "LossScaleOptimizer": _ours,
        "MixedPrecisionLossScaleOptimizer": lambda inner, dynamic: legacy.MixedPrecisionLossScaleOptimizer(
            inner, _old_scale(dynamic)
        ),
        "contrib": lambda inner, dynamic: legacy.contrib.LossScaleOptimizer(inner, _manager(dynamic)),
        "graph rewrite": _rewrite,
    },
}


# Programs: functions of a function that makes a wrapped optimizer. They return numbers, lists and strings. ------------


def _model():
    layers = tf_keras.layers
    constant = tf_keras.initializers.Constant
    return tf_keras.Sequential(
        [
            layers.Dense(2, "relu", kernel_initializer=constant(0.5), bias_initializer=constant(0.1), input_shape=(3,)),
            layers.Dense(1, kernel_initializer=constant(0.25), dtype="float32"),
        ]
    )


def _scale_of(optimizer):
    optimizer = getattr(optimizer, "optimizer", optimizer)  # Keras's TFOptimizer
    scale = optimizer._loss_scale if isinstance(optimizer, v1.train.Optimizer) else optimizer.loss_scale
    return scale() if callable(scale) else scale


def _state(model):
    optimizer = model.optimizer
    state = {"weights": _numbers(model.get_weights()), "scale": _numbers(backend.get_value(_scale_of(optimizer)))}
    state["iterations"] = int(backend.get_value(optimizer.iterations))
    if getattr(optimizer, "dynamic_counter", None) is not None:
        state["counter"] = int(backend.get_value(optimizer.dynamic_counter))
    return state


def _numbers(values):
    return [np.asarray(value).tolist() for value in values] if isinstance(values, list) else np.asarray(values).tolist()


def _fit(model, x=X, epochs=2, **kwargs):
    return _numbers(model.fit(x, Y, batch_size=4, epochs=epochs, shuffle=False, verbose=0, **kwargs).history["loss"])


def fit(make):
    """Train, overflow, go on."""
    model = _model()
    model.compile(make(), "mse", metrics=["mae"])
    losses = _fit(model)
    states = [_state(model)]
    _fit(model, BAD, epochs=1)
    states.append(_state(model))
    losses += _fit(model)
    return losses, states, _state(model), _numbers(model.evaluate(X, Y, verbose=0)), _numbers(model.predict(X))


def fit_with_a_fixed_scale(make):
    model = _model()
    model.compile(make(dynamic=False), "mse")
    return _fit(model, epochs=3), _state(model)


def fit_in_mixed_float16(make):
    tf_keras.mixed_precision.set_global_policy("mixed_float16")
    return fit(make)


def let_compile_wrap(make):
    """Under mixed_float16 `compile` wraps a bare optimizer; after `wrap_in_compile` it does so in our class."""
    tf_keras.mixed_precision.set_global_policy("mixed_float16")
    with contextlib.nullcontext() if make.is_original else tf_lossscale.wrap_in_compile():
        model = _model()
        model.compile(make.inner(), "mse")
    if isinstance(model.optimizer, tf_lossscale.LossScaleOptimizer) == make.is_original:
        raise TypeError(f"compile made a {type(model.optimizer)}")
    losses = _fit(model)
    _fit(model, BAD, epochs=1)
    return losses, _state(model)


def fit_with_clipping(make):
    optimizer = make()
    optimizer.clipnorm = 0.125
    model = _model()
    model.compile(optimizer, "mse")
    return _fit(model), _state(model)


def fit_with_callbacks_that_set_the_learning_rate(make):
    model = _model()
    model.compile(make(), "mse")
    callbacks = [
        tf_keras.callbacks.LearningRateScheduler(lambda epoch, rate: float(rate) / 2 if epoch == 1 else float(rate)),
        tf_keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=100.0),
    ]
    losses = _fit(model, epochs=4, validation_data=(X, Y), callbacks=callbacks)
    return losses, float(backend.get_value(model.optimizer.lr)), _state(model)


def a_learning_rate_schedule(make):
    optimizer = make()
    optimizer.learning_rate = tf_keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)
    model = _model()
    model.compile(optimizer, "mse")
    return _fit(model), _state(model)


def save_and_load_weights(make):
    """In both formats; the training goes on with the optimizer's slots."""
    states = []
    for name in ("weights", "weights.h5"):
        model = _model()
        model.compile(make(), "mse")
        _fit(model)
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, name)
            model.save_weights(path)
            _fit(model)
            model.load_weights(path)
        states.append(_numbers(model.get_weights()))
        optimizer = model.optimizer
        optimizer.set_weights([np.zeros_like(each) for each in optimizer.get_weights()])
        states.append(_numbers(optimizer.get_weights()))
        _fit(model)
        states.append(_numbers(model.get_weights()))
    return states


def save_and_load_the_model(make):
    """As HDF5: the loaded model goes on as if nothing had happened. Originals start again with their first scale."""
    model = _model()
    model.compile(make(), "mse")
    _fit(model, epochs=1)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.h5")
        model.save(path)
        loaded = tf_keras.models.load_model(path)
    _fit(loaded)
    return _numbers(loaded.get_weights()), int(backend.get_value(loaded.optimizer.iterations))


def save_as_a_saved_model(make):
    model = _model()
    model.compile(make(), "mse")
    _fit(model, epochs=1)
    with tempfile.TemporaryDirectory() as folder:
        model.save(folder, save_format="tf")
        loaded = tf_keras.models.load_model(folder)
        predicted = _numbers(loaded.predict(X))
    return predicted


def clone_by_config(make):
    optimizer = make()
    model = _model()
    model.compile(type(optimizer).from_config(optimizer.get_config()), "mse")
    return _fit(model), _state(model)


def fit_mirrored(make):
    """`fit` under a strategy with two replicas."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice())
    with strategy.scope():
        model = _model()
        model.compile(make(), "mse")
    losses = _fit(model)
    bad = X.copy()
    bad[-1] = np.inf  # on one replica, in the last step
    _fit(model, bad, epochs=1)
    return losses, _state(model)


# Loops with a Session.


def _graph_of_a_step(train):
    weight = v1.get_variable("w", [3, 1], initializer=v1.ones_initializer(), use_resource=True)
    rows = v1.get_variable("rows", [4, 1], initializer=v1.ones_initializer(), use_resource=True)
    x = v1.placeholder(tf.float32, [None, 3])

    def loss():
        error = tf.matmul(x, weight) - Y
        return tf.reduce_mean(error**2) + tf.reduce_sum(tf.gather(rows, [0, 2, 0]) ** 2)

    return weight, rows, x, train(loss, [weight, rows])


def _run(session, x, weight, rows, operation, scale, steps=5):
    values = []
    for step in range(steps):
        session.run(operation, {x: BAD if step == 1 else X})
        values.append(_numbers(session.run([weight, rows, scale])))
    return values


def _minimize(optimizer, loss, variables):
    if isinstance(optimizer, v1.train.Optimizer):
        return optimizer.minimize(loss(), v1.train.get_or_create_global_step(), variables)
    return optimizer.minimize(loss, variables)


def _session_loop(make, train, **kwargs):
    optimizer = make(**kwargs)
    weight, rows, x, operation = _graph_of_a_step(lambda *step: train(optimizer, *step))
    scale = _scale_of(optimizer)
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        return _run(session, x, weight, rows, operation, scale)


def minimize_in_a_session(make):
    return _session_loop(make, _minimize)


def clip_in_a_session(make):
    """Gradients are taken, clipped and applied."""

    def train(optimizer, loss, variables):
        if isinstance(optimizer, v1.train.Optimizer):
            gradients = [gradient for gradient, _ in optimizer.compute_gradients(loss(), variables)]
        else:
            gradients = optimizer.get_gradients(loss(), variables)
        gradients, _ = tf.clip_by_global_norm(gradients, 0.5)
        return optimizer.apply_gradients(zip(gradients, variables))

    return _session_loop(make, train)


def a_monitored_session(make):
    """The second session goes on where the first one stopped."""
    values = []
    with tempfile.TemporaryDirectory() as folder:
        for last in (3, 6):
            with tf.Graph().as_default():
                optimizer = make()
                step = v1.train.get_or_create_global_step()
                weight, rows, x, operation = _graph_of_a_step(functools.partial(_minimize, optimizer))
                scale = _scale_of(optimizer)
                hooks = [v1.train.StopAtStepHook(last_step=last), v1.train.NanTensorHook(tf.reduce_sum(weight))]
                with v1.train.MonitoredTrainingSession(
                    checkpoint_dir=folder, hooks=hooks, save_checkpoint_steps=1, log_step_count_steps=None
                ) as session:
                    tries = 0
                    while not session.should_stop():
                        session.run(operation, {x: BAD if tries == 1 else X})
                        tries += 1
                        if not session.should_stop():
                            values.append(_numbers(session.run([step, weight, rows, scale], {x: X})))
    return values


def _replicas(make, devices, dynamic=True, sparse=False):
    strategy = tf.distribute.MirroredStrategy(devices, tf.distribute.ReductionToOneDevice())
    with strategy.scope():
        weight = v1.get_variable("w", [2, 1], initializer=v1.ones_initializer(), use_resource=True)
        other = v1.get_variable("other", [], initializer=v1.ones_initializer(), use_resource=True)
        # 0: all finite; -1: a NaN on the last replica; otherwise finite gradients that differ
        kind = v1.placeholder_with_default(0, [])
        optimizer = make(dynamic=dynamic)

        def step():
            here = tf.distribute.get_replica_context().replica_id_in_sync_group
            bad = tf.logical_and(tf.equal(kind, -1), tf.equal(here, len(devices) - 1))
            factor = tf.where(bad, float("nan"), 1.0 + tf.cast(here, tf.float32))

            def loss():
                used = tf.gather(weight, [0, 0]) if sparse else weight
                return factor * (tf.reduce_sum(used**2) + other**2) / 2

            return tf.group(_minimize(optimizer, loss, [weight, other]))

        operation = strategy.experimental_local_results(strategy.run(step))
        scale = None if not dynamic else _scale_of(optimizer)
    with v1.Session() as session:
        session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
        values = []
        for bad in (0, -1 if dynamic else 0, 0, 0, 0):
            session.run(operation, {kind: bad})
            copies = [strategy.experimental_local_results(each) for each in (weight, other)]
            values.append(_numbers(session.run([*copies[0], *copies[1], *([] if scale is None else [scale])])))
    return values


def two_replicas(make):
    """A NaN is on the second replica only."""
    return _replicas(make, ["CPU:0", "CPU:1"])


def two_replicas_with_sparse_gradients(make):
    return _replicas(make, ["CPU:0", "CPU:1"], sparse=True)


def two_replicas_with_a_fixed_scale(make):
    return _replicas(make, ["CPU:0", "CPU:1"], dynamic=False)


# The table. -----------------------------------------------------------------------------------------------------------

_IN_A_SESSION = [minimize_in_a_session, two_replicas]

#: Family -> the programs that each wrapper runs in each mode.
FOR_EACH_WRAPPER = {
    "legacy": [fit_in_mixed_float16, *_IN_A_SESSION],
    "new": [fit, minimize_in_a_session],
    "tf1": [fit, *_IN_A_SESSION],
}
_SAVED = [save_and_load_weights, save_and_load_the_model]
#: Family -> further programs, for `tf_lossscale.LossScaleOptimizer`, in each mode.
FOR_OURS = {
    "legacy": [fit, let_compile_wrap, *_SAVED, fit_mirrored, clip_in_a_session],
    "new": [fit_in_mixed_float16, clip_in_a_session, two_replicas],
    "tf1": [clip_in_a_session, a_monitored_session],
}
_IN_ONE_MODE = [fit_with_a_fixed_scale, two_replicas_with_sparse_gradients, two_replicas_with_a_fixed_scale]
_OF_KERAS = [fit_with_clipping, fit_with_callbacks_that_set_the_learning_rate, a_learning_rate_schedule]
#: Family -> programs that run only after `disable_eager_execution`.
IN_ONE_MODE = {
    "legacy": [*_IN_ONE_MODE, *_OF_KERAS, save_as_a_saved_model, clone_by_config],
    "new": [],
    "tf1": _IN_ONE_MODE,
}
#: Family -> a program that every optimizer of the family runs, after `disable_eager_execution`.
FOR_EACH_OPTIMIZER = {"legacy": fit, "tf1": minimize_in_a_session}
#: The modes that change TensorFlow for good.
MODES = ("disable_eager_execution", "disable_v2_behavior")
_USUAL = {"legacy": "Adam", "new": "Adam", "tf1": "Momentum"}


def rows(mode):
    """Return (family, optimizer, program, names of wrappers) for a mode."""
    found = []
    for family, usual in _USUAL.items():
        for program in FOR_EACH_WRAPPER[family]:
            # Every original refuses the rewrite under a mixed policy: tests/legacy/test_graph_rewrite.py.
            refused = {"graph rewrite"} if program is fit_in_mixed_float16 else set()
            found.append((family, usual, program, [name for name in WRAPPERS[family] if name not in refused]))
        further = FOR_OURS[family] + (IN_ONE_MODE[family] if mode == MODES[0] else [])
        found += [(family, usual, program, ["LossScaleOptimizer"]) for program in further]
    if mode == MODES[0]:
        for family, program in FOR_EACH_OPTIMIZER.items():
            others = [name for name in OPTIMIZERS[family] if name != _USUAL[family]]
            found += [(family, name, program, ["LossScaleOptimizer"]) for name in others]
    return found


class _Make:
    """Makes the optimizer of a program."""

    def __init__(self, inner, wrapper, is_original):
        self.inner, self._wrapper, self.is_original = inner, wrapper, is_original

    def __call__(self, dynamic=True):
        return self._wrapper(self.inner(), dynamic)


def outcome(family, optimizer, program, wrapper=None):
    """Return what a program returns, as JSON has it, or a text with its error; without a wrapper the original's."""
    inner = OPTIMIZERS[family][optimizer]
    make = _Make(inner, WRAPPERS[family][wrapper] if wrapper else ORIGINALS[family], wrapper is None)
    backend.clear_session()
    try:
        with np.errstate(all="ignore"), tf.Graph().as_default() if tf.executing_eagerly() else contextlib.nullcontext():
            return json.loads(json.dumps(program(make)))
    except Exception as error:
        if os.environ.get("TRACE"):
            traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    finally:
        tf_keras.mixed_precision.set_global_policy("float32")
        backend.clear_session()


def main(mode, share="1"):
    getattr(v1, mode)()
    devices = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(devices[0], [tf.config.LogicalDeviceConfiguration()] * 2)
    if mode == "disable_v2_behavior":
        v1.keras.layers.enable_v2_dtype_behavior()  # for mixed_float16
    found = {}
    for family, optimizer, program, wrappers in rows(mode)[:: int(share)]:
        original = outcome(family, optimizer, program)
        for wrapper in wrappers:
            key = f"{family} {optimizer} {program.__name__} {wrapper}"
            found[key] = original, outcome(family, optimizer, program, wrapper)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], *sys.argv[2:])
