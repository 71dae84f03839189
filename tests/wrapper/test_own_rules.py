"""A loss scale by a user's own rule: what `check` and `move` are passed, under every way to take a step."""

import numpy as np
import pytest
import tensorflow as tf

import tf_lossscale
from tests import strategies
from tests.families import all_families
from tf_lossscale import LossScaleOptimizer


class SkipsLargeNorms(tf_lossscale.DynamicLossScale):
    """Skips a step whose gradient norm is above 6; keeps the last norm."""

    def __init__(self):
        super().__init__(8.0)
        self.checked = tf.Variable(0.0, trainable=False)

    def check(self, gradients):
        norm = tf.linalg.global_norm(gradients)
        noted = self.checked.assign(norm)
        with tf.control_dependencies([] if tf.executing_eagerly() else [noted]):
            return tf.logical_and(super().check(gradients), norm <= 6.0)

    def move(self, applied):
        return super().move(tf.math.is_finite(self.checked))


@pytest.mark.parametrize("way", ["eager", "function", "mirrored_2"])
def test_check_is_passed_the_summed_unscaled_gradients(way):
    strategy = strategies.get("mirrored_2") if way == "mirrored_2" else tf.distribute.get_strategy()
    with strategy.scope():
        scale = SkipsLargeNorms()
        optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(0.5), loss_scale=scale)
        weights = [tf.Variable([1.0]), tf.Variable([2.0])]

    def take(factor):
        share = factor / strategy.num_replicas_in_sync
        optimizer.minimize(lambda: share * (3.0 * weights[0] + 4.0 * weights[1]), weights)

    ways = {"eager": take, "function": tf.function(take)}
    step = ways.get(way) or tf.function(lambda factor: strategy.run(take, (factor,)))
    first, seen = lambda value: strategy.experimental_local_results(value)[0], []
    for factor in (1.0, 2.0, np.nan, 0.5):
        step(tf.constant(factor))
        skipped = bool(first(optimizer.last_step_skipped))
        seen.append(
            (float(first(scale.checked)), skipped, float(optimizer.loss_scale), first(weights[0]).numpy().item())
        )
        copies = strategy.experimental_local_results(scale.checked)
        assert len({float(copy) for copy in copies if not np.isnan(copy)}) <= 1
    np.testing.assert_allclose(seen, [(5, 0, 8, -0.5), (10, 1, 8, -0.5), (np.nan, 1, 4, -0.5), (2.5, 0, 4, -1.25)])


@all_families
def test_a_rule_sees_sparse_gradients_and_missing_ones_and_runs_once_in_a_step(family):
    calls = []

    class Noting(tf_lossscale.LossScale):
        may_skip = True

        def __call__(self):
            return tf.constant(8.0)

        def check(self, gradients):
            calls.append(gradients)
            return super().check(gradients)

        def move(self, applied):
            calls.append(bool(applied))
            return []

    optimizer = LossScaleOptimizer(family.sgd(), loss_scale=Noting())
    table, weight, unused = tf.Variable([[1.0], [2.0]]), tf.Variable(1.0), tf.Variable(1.0)
    sparse = tf.IndexedSlices(tf.constant([[8.0]]), tf.constant([1]), tf.constant([2, 1]))
    optimizer.get_scaled_loss(0.0)
    gradients = optimizer.get_unscaled_gradients([sparse, tf.constant(16.0), None])
    optimizer.apply_gradients(zip(gradients, [table, weight, unused]))
    (seen, applied) = calls
    assert applied is True
    assert isinstance(seen[0], tf.IndexedSlices) and seen[0].values.numpy().item() == 1.0
    assert (seen[1].numpy(), seen[2]) == (2.0, None)
    assert weight.numpy() == 0.0


@pytest.mark.parametrize(
    ("returned", "error"),
    [
        (lambda: None, "must return whether to apply the step"),
        (lambda: tf.constant([True, False]), "must return a bool scalar tensor"),
    ],
)
def test_a_check_that_returns_no_truth_value_is_named_and_changes_nothing(returned, error):
    class Wrong(tf_lossscale.DynamicLossScale):
        def check(self, gradients):
            return returned()

    scale, weight = Wrong(8.0), tf.Variable(1.0)
    with pytest.raises((TypeError, ValueError), match=f"Wrong.check.. {error}"):
        scale.step([tf.constant(1.0)], lambda gradients: weight.assign_sub(gradients[0]))
    assert (weight.numpy(), scale().numpy(), scale.state()["total_steps"]) == (1.0, 8.0, 0)


@all_families
def test_a_rule_that_cannot_create_its_variables_leaves_the_inner_optimizer_unchanged(family):
    class Broken(tf_lossscale.LossScale):
        may_skip = True

        def __call__(self):
            return tf.constant(8.0)

        def prepare(self):
            raise ValueError("no room")

    inner = family.sgd()
    before = dict(vars(inner))
    with pytest.raises(ValueError, match="no room"):
        LossScaleOptimizer(inner, loss_scale=Broken())
    assert vars(inner) == before
    LossScaleOptimizer(inner)


@pytest.mark.parametrize("in_function", [False, True])
def test_a_scale_may_be_a_python_number_but_no_vector_and_nothing_else(in_function):
    class Constant(tf_lossscale.LossScale):
        def __init__(self, value):
            super().__init__()
            self.value = value

        def __call__(self):
            return self.value

        def check(self, gradients):
            return super().check(gradients)

    def step_with(value):
        weight = tf.Variable(1.0)
        optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(0.5), loss_scale=Constant(value))
        step = lambda: optimizer.minimize(lambda: weight * 1.0, [weight])  # noqa: E731
        (tf.function(step) if in_function else step)()
        return weight.numpy().item()

    assert step_with(1024.0) == 0.5
    with pytest.raises(ValueError, match=r"Constant\.__call__\(\) must return a scalar, but returned .* shape \(1,\)"):
        step_with(tf.constant([8.0]))
    for nothing in (None, "8"):
        with pytest.raises(TypeError, match=r"Constant\.__call__\(\) must return the scale"):
            Constant(nothing).scale(tf.constant(1.0))


def registered(cls):
    return tf.keras.utils.register_keras_serializable("own_rule", cls.__name__)(cls)


def own_rule(*names, **arguments):
    """Return a class whose variables have these names: the exponent of the scale, and counts."""

    @registered
    class Rule(tf_lossscale.LossScale):
        def __init__(self):
            super().__init__()
            self.exponent = tf.Variable(4.0, trainable=False, **arguments)
            for name in names:
                setattr(self, name, tf.Variable(0.0, trainable=False, **arguments))

        def __call__(self):
            return 2.0**self.exponent

        def move(self, applied):
            return [self.exponent.assign_add(1.0), *(getattr(self, name).assign_add(2.0) for name in names)]

        def get_config(self):
            return {}

    return Rule


def trained_with(loss_scale, fits=2):
    keras = tf.keras
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    optimizer = LossScaleOptimizer(keras.optimizers.Adam(0.1), **({"loss_scale": loss_scale} if loss_scale else {}))
    model.compile(optimizer, keras.losses.MeanSquaredError())
    optimizer.build(model.trainable_variables)
    for _ in range(fits):
        model.fit(tf.ones([2, 1]), tf.ones([2, 1]), verbose=0)
    return model


@pytest.mark.parametrize("file", ["model.keras", "model.h5", "model.weights.h5"])
@pytest.mark.parametrize("renamed", ["before", "zuletzt"])
def test_a_file_of_a_rule_with_unnamed_variables_loads_even_if_an_attribute_was_renamed(file, renamed, tmp_path):
    path = str(tmp_path / file)
    model = trained_with(own_rule("steps")())
    (model.save_weights if "weights" in file else model.save)(path)
    rule = own_rule(renamed)
    if "weights" in file:
        loaded = trained_with(rule(), fits=0)
        loaded.load_weights(path)
    else:
        loaded = tf.keras.models.load_model(path)
    scale = loaded.optimizer._loss_scale
    assert isinstance(scale, rule)
    assert (float(scale.exponent), float(getattr(scale, renamed))) == (6.0, 4.0)


@pytest.mark.parametrize(
    ("saved", "loading"), [((), ("a",)), (("a",), ("a", "b")), (("a", "b"), ("a",)), (None, ("a",)), (("a",), None)]
)
def test_weights_of_another_rule_load_all_but_its_state_and_a_warning_says_so(saved, loading, tmp_path, warnings):
    path = str(tmp_path / "model.weights.h5")
    rule = lambda names: None if names is None else own_rule(*names)()  # noqa: E731
    model = trained_with(rule(saved))
    model.save_weights(path)
    other = trained_with(rule(loading), fits=0)
    other.load_weights(path)
    (said,) = warnings
    assert "is not loaded: its own variables" in said
    for one, another in zip(model.optimizer.inner_optimizer.variables, other.optimizer.inner_optimizer.variables):
        np.testing.assert_array_equal(one, another)
    scale, names = other.optimizer._loss_scale, ["exponent", *(loading or ())]
    assert loading is None or [float(getattr(scale, name)) for name in names] == [4.0] + [0.0] * len(loading)


def test_the_rules_as_they_are_now_are_in_the_config_of_a_subclass_that_calls_super(tmp_path):
    @registered
    class Slow(tf_lossscale.DynamicLossScale):
        def __init__(self, every=1, **kwargs):
            super().__init__(**kwargs)
            self.every = every

        def get_config(self):
            return {**super().get_config(), "every": self.every}

    model = trained_with(Slow(every=3, initial_scale=64.0), fits=0)
    model.optimizer.scaler.change_rules(dynamic_growth_steps=5, max_scale=128.0)
    model.save(tmp_path / "model.keras")
    loaded = tf.keras.models.load_model(tmp_path / "model.keras").optimizer
    assert type(loaded._loss_scale) is Slow
    assert (loaded.scaler.every, loaded.dynamic_growth_steps, loaded.scaler.max_scale) == (3, 5, 128.0)
    assert loaded.loss_scale == 64.0


class Counted(tf_lossscale.LossScale):
    """Contains another loss scale."""

    def __init__(self):
        super().__init__()
        self.base = tf_lossscale.DynamicLossScale(1024.0)
        self.steps = tf.Variable(0, trainable=False)

    def __call__(self):
        return self.base()

    def check(self, gradients):
        return self.base.check(gradients)

    def move(self, applied):
        return [*self.base.move(applied), self.steps.assign_add(1)]


@pytest.mark.parametrize("read", ["saving", "loading", "both", "none"])
def test_reading_the_counts_of_a_loss_scale_in_a_rule_does_not_change_what_a_file_holds(read, tmp_path):
    model = trained_with(Counted())
    loaded = trained_with(Counted(), fits=0)
    for one, when in ((model, "saving"), (loaded, "loading")):
        if read in (when, "both"):
            one.optimizer._loss_scale.base.state()
    model.save_weights(tmp_path / "model.weights.h5")
    loaded.load_weights(tmp_path / "model.weights.h5")
    scale = loaded.optimizer._loss_scale
    assert (int(scale.steps), int(scale.base.good_steps)) == (2, 2)


def test_an_h5_file_holds_a_bfloat16_variable_of_a_rule(tmp_path):
    @registered
    class Half(tf_lossscale.DynamicLossScale):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.value = tf.Variable(0.0, dtype=tf.bfloat16, trainable=False, name="value")

        def move(self, applied):
            return [self.value.assign_add(tf.constant(1.0, tf.bfloat16)), *super().move(applied)]

        def get_config(self):
            return super().get_config()

    model = trained_with(Half())
    model.save(tmp_path / "model.h5")
    loaded = tf.keras.models.load_model(tmp_path / "model.h5").optimizer
    assert (float(loaded._loss_scale.value), int(loaded.dynamic_counter)) == (2.0, 2)


class Halved(tf_lossscale.DynamicLossScale):
    """Scales by half of the variable that the rules move."""

    def __call__(self):
        return 0.5 * super().__call__()

    def get_config(self):
        return super().get_config()


def test_the_state_of_a_rule_that_computes_its_scale_is_the_variable(tmp_path):
    model = trained_with(registered(Halved)(initial_scale=1024.0))
    optimizer = model.optimizer
    assert (float(optimizer.loss_scale), optimizer.state()["loss_scale"]) == (512.0, 1024.0)
    optimizer.set_state(optimizer.state())
    optimizer.scaler.change_rules(min_scale=2.0)
    model.save(tmp_path / "model.keras")
    for each in (optimizer, tf.keras.models.load_model(tmp_path / "model.keras").optimizer):
        assert float(each.loss_scale) == 512.0


@pytest.mark.parametrize("ending", [".keras", ".h5"])
def test_a_file_without_the_rule_keeps_the_inner_optimizers_values(ending, tmp_path, caplog):
    @registered
    class Counting(tf_lossscale.DynamicLossScale):
        def __init__(self, **rules):
            super().__init__(**rules)
            self.seen = tf.Variable(0, trainable=False, name="seen")

        def move(self, applied):
            return [*super().move(applied), self.seen.assign_add(1)]

    model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
    optimizer = LossScaleOptimizer(tf.keras.optimizers.Adam(0.1), loss_scale=Counting(initial_scale=64.0))
    model.compile(optimizer, tf.keras.losses.MeanSquaredError())
    x, y = np.random.default_rng(0).normal(size=(8, 2)), np.ones((8, 1))
    model.fit(x, y, batch_size=1, verbose=0, shuffle=False)
    model.save(tmp_path / f"model{ending}")
    loaded = tf.keras.models.load_model(tmp_path / f"model{ending}")
    assert int(loaded.optimizer.iterations) == 8
    for each in (model, loaded):
        each.fit(x, y, batch_size=1, verbose=0, shuffle=False)
    for mine, theirs in zip(model.get_weights(), loaded.get_weights()):
        np.testing.assert_array_equal(mine, theirs)
    assert "cannot contain the rule of the loss scale Counting" in caplog.text
    assert (float(loaded.optimizer.loss_scale), int(loaded.optimizer.dynamic_counter)) == (64.0, 16)


class WarmingUp(tf_lossscale.FixedLossScale):
    """Scales by one more after each step."""

    def __init__(self, initial_scale):
        super().__init__(initial_scale)
        self.steps = tf.Variable(0.0, trainable=False)

    def __call__(self):
        return self.initial_scale + self.steps

    def move(self, applied):
        return [self.steps.assign_add(1.0)]

    def get_config(self):
        return {"initial_scale": self.initial_scale}


def test_the_variables_of_a_fixed_scale_of_ones_own_are_saved(tmp_path):
    model = trained_with(registered(WarmingUp)(8.0))
    assert float(model.optimizer.loss_scale) == 10.0
    path = tf.train.Checkpoint(optimizer=model.optimizer).write(str(tmp_path / "ckpt"))
    model.save(tmp_path / "model.keras")
    restored = trained_with(WarmingUp(8.0), fits=0).optimizer
    tf.train.Checkpoint(optimizer=restored).read(path)
    for each in (restored, tf.keras.models.load_model(tmp_path / "model.keras").optimizer):
        assert float(each.loss_scale) == 10.0
