"""The README's comparison: every cell is the outcome of running that library, here or when it was recorded."""

import importlib.metadata
import math
import pathlib
import re
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_lossscale
from tests import loops, strategies
from tests.cases import combinations

README = pathlib.Path(__file__).parents[1] / "README.md"
NOT_APPLICABLE = "-"


class Ours:
    """This package around an optimizer of Keras 3."""

    title = "tf-lossscale"
    optimizers = tf.keras.optimizers
    adams = (tf.keras.optimizers.Adam,)
    variable = staticmethod(tf.Variable)
    wrapper = tf_lossscale.LossScaleOptimizer
    keras = tf.keras

    def wrap(self, inner=None, growth_steps=2000, **kwargs):
        return self.wrapper(inner or self.optimizers.SGD(0.5), dynamic_growth_steps=growth_steps, **kwargs)

    def scale_of(self, optimizer):
        return float(optimizer.loss_scale)

    def step(self, optimizer, gradients, variables):
        """Takes a step of gradients as they are before scaling."""
        pairs = list(zip(variables, gradients))
        loops.step(optimizer, lambda: tf.add_n([tf.reduce_sum(v * g) for v, g in pairs]), variables)

    def fixed(self):
        return self.wrap(growth_steps=None, dynamic=False, initial_scale=8)


class TfKeras(Ours):
    """tf_keras's own."""

    title = "tf_keras 2.21"
    optimizers = tf_keras.optimizers
    adams = (tf_keras.optimizers.Adam, tf_keras.optimizers.legacy.Adam)
    wrapper = staticmethod(tf_keras.mixed_precision.LossScaleOptimizer)
    keras = tf_keras


class Keras3(Ours):
    """Keras 3's own."""

    title = "Keras 3.15"
    wrapper = staticmethod(keras.optimizers.LossScaleOptimizer)
    variable = staticmethod(keras.Variable)

    def scale_of(self, optimizer):
        return float(optimizer.dynamic_scale)

    def step(self, optimizer, gradients, variables):
        if not optimizer.built:
            with tf.init_scope():
                optimizer.build(variables)
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(v * g) for v, g in zip(variables, gradients)])
            loss = optimizer.scale_loss(loss)
        optimizer.apply(tape.gradient(loss, variables), variables)


class TensorFlow1:
    """What TensorFlow 1.15 had, and TensorFlow 2.21 still has under compat.v1."""

    title = "TensorFlow 1.x"
    variable = staticmethod(tf.Variable)
    module = tf.compat.v1.mixed_precision

    def wrap(self, inner=None, growth_steps=2000, initial_scale=2.0**15):
        scale = self.module.DynamicLossScale(initial_scale, growth_steps, 2.0)
        inner = inner or tf.compat.v1.train.GradientDescentOptimizer(0.5)
        return self.module.MixedPrecisionLossScaleOptimizer(inner, scale)

    def scale_of(self, optimizer):
        return float(optimizer._loss_scale())

    def step(self, optimizer, gradients, variables):
        def loss():
            return tf.add_n([tf.reduce_sum(v * g) for v, g in zip(variables, gradients)])

        optimizer.minimize(loss, var_list=variables)

    def fixed(self):
        return self.module.FixedLossScale(8.0)


class Torch:
    """torch's GradScaler, on the CPU."""

    title = "torch 2.13 GradScaler"
    variable = staticmethod(tf.Variable)

    def wrap(self, growth_steps=2000, initial_scale=2.0**15, **kwargs):
        import torch

        return torch.amp.GradScaler("cpu", init_scale=initial_scale, growth_interval=growth_steps, **kwargs)

    def fixed(self):
        return self.wrap(growth_factor=1.0, backoff_factor=1.0)

    def scale_of(self, scaler):
        return scaler.get_scale()

    def step(self, scaler, gradients, variables):
        import torch

        weights = [torch.nn.Parameter(torch.tensor(v.numpy())) for v in variables]
        optimizer = torch.optim.SGD(weights, 0.5)
        loss = sum((w * torch.tensor(np.asarray(g))).sum() for w, g in zip(weights, gradients))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        for variable, weight in zip(variables, weights):
            variable.assign(weight.detach().numpy())


def scaling_by_hand(library):
    """scale a loss and unscale gradients yourself"""
    optimizer = library.wrap()
    for names in (("get_scaled_loss", "get_unscaled_gradients"), ("scale", "unscale_")):
        if all(hasattr(optimizer, name) for name in names):
            return ", ".join(f"`{name}`" for name in names)
    return "no"


def a_fixed_scale(library):
    """a fixed scale"""
    try:
        library.fixed()
    except (AssertionError, ValueError, TypeError):
        return "no"
    return "yes"


def a_nan_on_the_second_replica_only(library):
    """NaN on the second replica only"""
    if isinstance(library, Torch):
        return NOT_APPLICABLE
    strategy = strategies.get("mirrored_4")
    if isinstance(library, TensorFlow1):
        scale = library.module.DynamicLossScale()
        per_replica = strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(np.nan if context.replica_id_in_sync_group == 1 else 1.0)
        )
        with strategy.scope():
            return "weights are NaN" if scale.update([per_replica])[1] else "step skipped"
    with strategy.scope():
        weight, optimizer = library.variable([1.0]), library.wrap()
        optimizer.build([weight])

    def step():
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        library.step(optimizer, [tf.where(replica == 1, [np.nan], [1.0])], [weight])

    tf.function(lambda: strategy.run(step))()
    return "step skipped" if np.isfinite(weight.numpy()).all() else "weights are NaN"


def the_lowest_scale(library):
    """scale after 200 overflows in a row"""
    optimizer, weight = library.wrap(), library.variable([1.0])
    for _ in range(200):
        library.step(optimizer, [tf.constant([np.inf])], [weight])
    return _number(library.scale_of(optimizer))


def the_highest_scale(library):
    """scale after growing 200 times"""
    optimizer, weight = library.wrap(growth_steps=1), library.variable([1.0])
    for _ in range(200):
        library.step(optimizer, [tf.constant([0.0])], [weight])
    return _number(library.scale_of(optimizer))


def _number(value):
    if value in (0, math.inf):
        return "0" if value == 0 else "infinity"
    return "1" if value == 1 else f"2**{round(math.log2(value))}"


def a_bad_initial_scale(library):
    """an initial scale of 0, NaN or infinity"""
    outcomes = set()
    for scale in (0.0, math.nan, math.inf):
        try:
            library.wrap(initial_scale=scale)
            outcomes.add("accepted")
        except ValueError:
            outcomes.add("ValueError")
    return ", ".join(outcomes)


def an_overflow_that_only_the_scaling_causes(library):
    """overflow that only the scaling causes, in `tf.function`"""
    if isinstance(library, Torch):
        return NOT_APPLICABLE
    optimizer, weight = library.wrap(), library.variable([1.0, 1.0])
    tf.function(lambda g: library.step(optimizer, [g], [weight]))(tf.constant([1e36, 1.0]))
    return "step skipped" if weight.numpy()[0] == 1 else "not seen, applied"


def an_overflow_that_is_masked(library):
    """overflow that a mask after unscaling makes finite"""
    if isinstance(library, Torch):
        return _torch_mask()
    optimizer, weight = library.wrap(), library.variable([1.0, 1.0])
    if not hasattr(optimizer, "get_unscaled_gradients"):
        return NOT_APPLICABLE
    with tf.GradientTape() as tape:
        loss = optimizer.get_scaled_loss(tf.reduce_sum(weight * tf.constant([np.inf, 1.0])))
    [gradient] = optimizer.get_unscaled_gradients(tape.gradient(loss, [weight]))
    optimizer.apply_gradients([(tf.where(tf.math.is_finite(gradient), gradient, 0.0), weight)])
    return "step skipped" if weight.numpy()[1] == 1 else "not seen, applied"


def _torch_mask():
    import torch

    scaler, weight = Torch().wrap(), torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], 0.5)
    scaler.scale((weight * torch.tensor([math.inf, 1.0])).sum()).backward()
    scaler.unscale_(optimizer)
    weight.grad.nan_to_num_(posinf=0.0)
    scaler.step(optimizer)
    return "step skipped" if float(weight[1]) == 1 else "not seen, applied"


def a_nan_in_a_row_that_comes_twice(library):
    """NaN in a sparse row, and a finite one for the same index"""
    if isinstance(library, Torch):
        return _torch_rows()
    optimizer, weight = library.wrap(), library.variable([[1.0], [1.0]])

    def loss():
        return tf.reduce_sum(tf.gather(weight, [0, 0]) * tf.constant([[np.nan], [1.0]]))

    if isinstance(library, TensorFlow1):
        optimizer.minimize(loss, var_list=[weight])
    else:
        optimizer.build([weight])
        with tf.GradientTape() as tape:
            value = loss()
            value = optimizer.scale_loss(value) if isinstance(library, Keras3) else optimizer.get_scaled_loss(value)
        gradients = tape.gradient(value, [weight])
        assert isinstance(gradients[0], tf.IndexedSlices)
        if isinstance(library, Keras3):
            optimizer.apply(gradients, [weight])
        else:
            optimizer.apply_gradients(zip(optimizer.get_unscaled_gradients(gradients), [weight]))
    return "step skipped" if np.array_equal(weight.numpy(), [[1.0], [1.0]]) else "not seen, applied"


def _torch_rows():
    import torch

    scaler, weight = Torch().wrap(), torch.nn.Parameter(torch.ones(2, 1))
    scaler.scale(torch.ones(1))
    weight.grad = torch.sparse_coo_tensor([[0, 0]], [[math.nan], [1.0]], (2, 1), check_invariants=True)
    scaler.step(torch.optim.SGD([weight], 0.5))
    return "step skipped" if bool((weight == 1).all()) else "not seen, applied"


def setting_a_hyperparameter(library):
    """`opt.beta_1 = 0.7` reaches the inner Adam"""
    if isinstance(library, (Torch, TensorFlow1)):
        return NOT_APPLICABLE
    reached = []
    for adam in library.adams:
        inner = adam(0.1)
        library.wrap(inner).beta_1 = 0.7
        reached.append(float(inner.beta_1) == pytest.approx(0.7))
    return "yes" if all(reached) else "legacy optimizers only" if any(reached) else "no, without a warning"


def a_saved_model(library, folder):
    """scale in a saved `.keras` file"""
    if isinstance(library, (Torch, TensorFlow1)):
        return NOT_APPLICABLE
    model = library.keras.Sequential([library.keras.Input((1,)), library.keras.layers.Dense(1)])
    model.compile(library.wrap(initial_scale=64), "mse", jit_compile=False)
    model.fit(np.full([4, 1], np.inf), np.ones([4, 1]), batch_size=4, verbose=0)
    assert library.scale_of(model.optimizer) == 32
    model.save(folder / "model.keras")
    loaded = library.keras.models.load_model(folder / "model.keras")
    return "kept" if library.scale_of(loaded.optimizer) == 32 else "lost"


def clipping_before_unscaling(library):
    """finds gradients that are clipped before they are unscaled"""
    if isinstance(library, TensorFlow1):
        return NOT_APPLICABLE
    with warnings.catch_warnings(record=True) as said:
        optimizer, weight = library.wrap(), library.variable([1.0])
        if isinstance(library, Torch):
            _clip_in_torch(optimizer)
        else:
            optimizer.build([weight])
            step = _clipping(optimizer, weight)
            step()
    if type(library) is Ours:
        return "no" if tf_lossscale.diagnosis.invariance_report(step, optimizer, weight).ok else "`invariance_report`"
    return "yes" if said else "no"


def _clipping(optimizer, weight):
    scale = optimizer.get_scaled_loss if hasattr(optimizer, "get_scaled_loss") else optimizer.scale_loss

    def step():
        with tf.GradientTape() as tape:
            loss = scale(tf.reduce_sum(weight**2))
        gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, [weight]), 1.0)
        if hasattr(optimizer, "get_unscaled_gradients"):
            optimizer.apply_gradients(zip(optimizer.get_unscaled_gradients(gradients), [weight]))
        else:
            optimizer.apply(gradients, [weight])

    return step


def _clip_in_torch(scaler):
    import torch

    weight = torch.nn.Parameter(torch.ones(1))
    scaler.scale((weight**2).sum()).backward()
    torch.nn.utils.clip_grad_norm_([weight], 1.0)
    scaler.step(torch.optim.SGD([weight], 0.5))
    scaler.update()


LIBRARIES = (Ours, Keras3, TfKeras, TensorFlow1, Torch)
ROWS = (
    scaling_by_hand,
    a_fixed_scale,
    a_nan_on_the_second_replica_only,
    a_nan_in_a_row_that_comes_twice,
    an_overflow_that_only_the_scaling_causes,
    an_overflow_that_is_masked,
    the_lowest_scale,
    the_highest_scale,
    a_bad_initial_scale,
    setting_a_hyperparameter,
    a_saved_model,
    clipping_before_unscaling,
)


def cells_of_the_readme():
    """Returns {row: {column: cell}} of the README's comparison."""
    section = README.read_text().split("\n## Compared\n")[1].split("\n## ")[0]
    lines = re.findall(r"^\|(.*)\|$", section, re.MULTILINE)
    (_, *columns), _, *rows = ([cell.strip() for cell in line.split("|")] for line in lines)
    return {row[0]: dict(zip(columns, row[1:])) for row in rows}


def test_the_readme_compares_what_is_tested_here_and_nothing_else():
    cells = cells_of_the_readme()
    assert list(cells) == [row.__doc__ for row in ROWS]
    assert all(list(row) == [library.title for library in LIBRARIES] for row in cells.values())


@pytest.mark.parametrize(
    ("row", "library"),
    combinations(
        ROWS,
        LIBRARIES,
        usual=[
            "setting_a_hyperparameter-TensorFlow1",
            "a_fixed_scale-TfKeras",
            "scaling_by_hand-Keras3",
            "a_bad_initial_scale-Ours",
            "a_saved_model-TensorFlow1",
            "a_nan_in_a_row_that_comes_twice-TensorFlow1",
            "a_nan_on_the_second_replica_only-TensorFlow1",
            "an_overflow_that_only_the_scaling_causes-Keras3",
            "clipping_before_unscaling-Ours",
        ],
    ),
)
def test_the_readme_says_what_happens(row, library, tmp_path):
    if library is Torch:
        pytest.importorskip("torch", reason="torch is not needed for anything else: pip install torch to check it")
    if library.title[-4:].replace(".", "").isdigit():
        name, version = library.title.split()
        installed = importlib.metadata.version(name.lower().replace("tf_keras", "tf-keras"))
        if not installed.startswith(version):
            pytest.skip(f"the README speaks of {library.title}; {installed} is installed")
    arguments = (tmp_path,) if row is a_saved_model else ()
    assert row(library(), *arguments) == cells_of_the_readme()[row.__doc__][library.title]
