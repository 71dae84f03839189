"""Configs, copies, pickles and classes derived from the wrapper."""

import copy
import inspect
import pickle
import warnings

import numpy as np
import pytest
import tensorflow as tf

from tests import strategies
from tests.families import FAMILIES, IDS, families
from tf_lossscale import FixedLossScale, LossScaleOptimizer, SharedLossScale
from tf_lossscale.core.rules import KEYWORDS

CONFIGS = [
    {},
    {"initial_scale": 8.0, "dynamic_growth_steps": 5},
    {"dynamic": False, "initial_scale": 0.5},
    {"dynamic": False, "initial_scale": 1.0, "skip_nonfinite": True},
    {"diagnose": True},
    {"growth_factor": 4.0, "backoff_factor": 0.25, "hysteresis": 3, "min_scale": 0.5, "max_scale": 2.0**16},
]
DEFAULTS = {"dynamic": True, "initial_scale": 2.0**15, "dynamic_growth_steps": 2000}


@families
@pytest.mark.parametrize("config", CONFIGS, ids=["default", "dynamic", "fixed", "skip", "diagnose", "all"])
@pytest.mark.parametrize("way", ["from_config", "LossScaleOptimizer.from_config", "serialize"])
def test_a_config_goes_round(family, config, way):
    optimizer = LossScaleOptimizer(family.optimizers.Adam(0.25, beta_1=0.75), **config)
    written = optimizer.get_config()
    before = copy.deepcopy(written)
    if way == "serialize":
        written = family.keras.optimizers.serialize(optimizer)
        again = family.keras.optimizers.deserialize(written)
    else:
        again = (type(optimizer) if way == "from_config" else LossScaleOptimizer).from_config(written)
        assert written == before, "the argument was changed"
    assert type(again) is type(optimizer)
    assert again.get_config() == optimizer.get_config()
    assert (float(again.learning_rate), float(again.beta_1)) == (0.25, 0.75)
    for name, value in {**(DEFAULTS if config.get("dynamic", True) else {}), **config}.items():
        assert again.get_config()[name] == value


def test_every_argument_of_the_constructor_goes_round():
    tested = {name for config in CONFIGS for name in config}
    arguments = set(inspect.signature(LossScaleOptimizer.__init__).parameters)
    # Own loss scales have their own table: tests/wrapper/test_rules_and_ways.py.
    assert tested == arguments - {"self", "inner_optimizer", "loss_scale", "kwargs"}


@families
def test_a_config_holds_plain_values_that_json_can_write(family):
    optimizer = LossScaleOptimizer(family.adam(), initial_scale=tf.constant(8.0), dynamic_growth_steps=np.int64(5))
    config = optimizer.get_config()
    assert {type(config[name]) for name in ("dynamic", "initial_scale", "dynamic_growth_steps")} == {bool, float, int}
    # What the original did not have is not there unless it is used: the original can read the config too.
    assert not set(KEYWORDS) & set(config)


@pytest.mark.parametrize("cls", [LossScaleOptimizer, SharedLossScale], ids=lambda cls: cls.__name__)
def test_every_rule_is_a_keyword_with_the_default_of_the_rules_and_reaches_them(cls):
    parameters = inspect.signature(cls).parameters
    assert {name: parameters[name].default for name in KEYWORDS} == KEYWORDS
    given = CONFIGS[-1]
    assert set(given) == set(KEYWORDS), "a config with every rule goes round, see above"
    scale = cls(**given) if cls is SharedLossScale else cls(FAMILIES[1].sgd(), **given)._loss_scale
    for name, default in KEYWORDS.items():
        assert getattr(scale._rules, name) == given[name] != default


def test_a_shared_scale_takes_no_other_keywords():
    for name in ("growth_steps", "growth"):
        with pytest.raises(TypeError, match=f"'{name}'"):
            SharedLossScale(**{name: 2})


OLD_SGD = {"class_name": "SGD", "config": {"name": "SGD", "learning_rate": 0.25, "momentum": 0.0, "nesterov": False}}
OLD_SCALES = [
    ("dynamic", (True, 2.0**15, 2000)),
    (128.0, (False, 128.0, None)),
    ({"class_name": "FixedLossScale", "config": {"loss_scale_value": 8.0}}, (False, 8.0, None)),
    (
        {
            "class_name": "DynamicLossScale",
            "config": {"initial_loss_scale": 64.0, "increment_period": 5, "multiplier": 2},
        },
        (True, 64.0, 5),
    ),
]


@families
@pytest.mark.parametrize(("loss_scale", "expected"), OLD_SCALES, ids=["string", "number", "fixed", "dynamic"])
def test_configs_of_tensorflow_2_3_and_older_are_read(family, loss_scale, expected):
    wrapper = type(LossScaleOptimizer(family.sgd()))
    made = wrapper.from_config({"optimizer": OLD_SGD, "loss_scale": loss_scale})
    assert (made.dynamic, made.initial_scale, made.dynamic_growth_steps) == expected
    assert float(made.learning_rate) == 0.25


def test_a_multiplier_of_tensorflow_2_3_below_2_is_both_factors():
    scale = {"class_name": "DynamicLossScale", "config": {**OLD_SCALES[3][0]["config"], "multiplier": 1.25}}
    made = LossScaleOptimizer.from_config({"optimizer": OLD_SGD, "loss_scale": scale})
    assert (made.scaler.growth_factor, made.scaler.backoff_factor) == (1.25, 0.8)


def test_a_loss_scale_of_an_unknown_class_is_refused_with_the_argument_that_would_name_it():
    config = {"optimizer": OLD_SGD, "loss_scale": {"class_name": "Mine>Rule", "config": {}}}
    with pytest.raises(ValueError, match=r"unknown class 'Mine>Rule'.*custom_objects=\{'Mine>Rule': Rule\}"):
        LossScaleOptimizer.from_config(config)


def gone_three_steps(family, cls=LossScaleOptimizer):
    weight = tf.Variable([1.0, 2.0])
    optimizer = cls(family.adam(), initial_scale=8.0)
    for gradient in (1.0, -0.5, np.inf, 0.25):
        optimizer.apply_gradients([(tf.constant([gradient, 1.0]), weight)])
    return optimizer, weight


@families
def test_a_deep_copy_goes_on_where_the_first_one_is_and_moves_alone(family):
    optimizer, weight = gone_three_steps(family)
    optimizer.mine = {"a": [1]}
    deep = copy.deepcopy(optimizer)
    assert deep.mine == {"a": [1]}
    assert deep.mine is not optimizer.mine
    start, after = weight.numpy(), []
    for each in (optimizer, deep):
        weight.assign(start)
        each.apply_gradients([(tf.constant([0.5, -1.0]), weight)])
        after.append(weight.numpy())
    np.testing.assert_array_equal(*after)
    deep.apply_gradients([(tf.constant([np.inf, 1.0]), weight)])
    assert (float(deep.loss_scale), float(optimizer.loss_scale)) == (2.0, 4.0)
    assert (int(deep.iterations), int(optimizer.iterations)) == (6, 5)
    assert (int(deep.dynamic_counter), int(optimizer.dynamic_counter)) == (0, 2)
    with pytest.raises(ValueError, match="already wrapped"):
        LossScaleOptimizer(deep.inner_optimizer)


@pytest.mark.parametrize("built", [False, True], ids=["not built", "built"])
@pytest.mark.parametrize("family", FAMILIES[:2], ids=IDS[:2])
def test_a_deep_copy_decays_the_weights_that_the_first_one_decays(family, built):
    optimizer = LossScaleOptimizer(family.sgd(weight_decay=0.5))
    weights = [family.variable([1.0], name=name) for name in ("kernel", "bias", "gain")]
    optimizer.exclude_from_weight_decay(var_list=weights[2:], var_names=["bias"])
    optimizer.iterations = 3
    if built:
        optimizer.build(weights)
    after = []
    for each in (optimizer, copy.deepcopy(optimizer)):
        for weight in weights:
            weight.assign([1.0])
        each.apply_gradients([(tf.constant([0.0]), weight) for weight in weights])
        after.append([float(tf.convert_to_tensor(weight)[0]) for weight in weights])
        assert int(each.iterations) == 4
    assert after == [[0.75, 1.0, 1.0]] * 2


@families
def test_it_pickles_with_its_scale_where_the_inner_optimizer_pickles(family):
    warnings.simplefilter("ignore")
    inner = family.adam()
    inner.apply_gradients([(tf.constant([1.0, 1.0]), tf.Variable([1.0, 2.0]))])
    try:
        bare = pickle.loads(pickle.dumps(inner))
    except (TypeError, AttributeError) as error:
        pytest.skip(f"{family.name}'s own optimizers do not pickle: {error}")
    optimizer, _ = gone_three_steps(family)
    again = pickle.loads(pickle.dumps(optimizer))
    assert again.get_config() == optimizer.get_config()
    assert (float(again.loss_scale), int(again.dynamic_counter)) == (4.0, 1)
    assert int(again.iterations) == (4 if int(bare.iterations) else 0), "the step count is lost, as the bare one's"
    assert len(again.weights) == len(bare.variables), "the slots are lost, as the bare one's"


class NoUnscaling(LossScaleOptimizer):
    """Counts its calls, as a user's class may."""

    calls = 0

    def get_unscaled_gradients(self, grads):
        self.calls += 1
        return super().get_unscaled_gradients(grads)


@families
def test_a_derived_class_overrides_what_it_likes(family):
    weight = tf.Variable(1.0)
    optimizer = NoUnscaling(family.sgd(), initial_scale=8.0)
    optimizer.minimize(lambda: 1.0 * weight, [weight])
    assert (optimizer.calls, weight.numpy()) == (1, 0.5)
    assert type(optimizer).__name__ == "NoUnscaling"
    assert isinstance(optimizer, type(LossScaleOptimizer(family.sgd())))
    config = optimizer.get_config()
    for again in (
        optimizer,
        NoUnscaling.from_config(config),
        type(optimizer).from_config(config),
        copy.deepcopy(optimizer),
    ):
        assert isinstance(again, NoUnscaling)


@families
def test_a_class_made_from_the_instances_class_as_horovod_makes_it(family):
    optimizer = LossScaleOptimizer(family.sgd(), initial_scale=8.0)

    def get_unscaled_gradients(self, grads):
        return [2.0 * g for g in super(cls, self).get_unscaled_gradients(grads)]

    cls = type("LossScaleOptimizer", (type(optimizer),), {"get_unscaled_gradients": get_unscaled_gradients})
    distributed = cls.from_config(optimizer.get_config())
    weight = tf.Variable(2.0)
    distributed.minimize(lambda: 1.0 * weight, [weight])
    assert weight.numpy() == 1.0
    assert isinstance(distributed, (LossScaleOptimizer, family.optimizers.Optimizer))


@families
def test_the_loss_scale_can_be_replaced_by_another_and_by_nothing_else(family):
    optimizer = LossScaleOptimizer(family.sgd())
    with pytest.raises(TypeError, match="_loss_scale"):
        optimizer._loss_scale = 8.0
    optimizer._loss_scale = FixedLossScale(8.0)
    assert float(optimizer.get_scaled_loss(tf.constant(1.0))) == float(optimizer.loss_scale) == 8.0
    assert not optimizer.dynamic


@pytest.mark.parametrize("name", ["none", "mirrored_2"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_a_deep_copy_that_is_made_outside_of_the_scope_trains_in_the_optimizers_strategy(name, compiled):
    strategy = strategies.get(name) or tf.distribute.get_strategy()
    with strategy.scope():
        weight = tf.keras.Variable([1.0, 2.0])
        optimizer = LossScaleOptimizer(tf.keras.optimizers.Adam(0.1), initial_scale=4.0)

    def train(optimizer):
        def step():
            optimizer.apply_gradients([(optimizer.get_unscaled_gradients([4.0 * weight.value])[0], weight)])

        run = tf.function(lambda: strategy.run(step)) if compiled else lambda: strategy.run(step)
        for _ in range(2):
            run()
        return [value.numpy() for value in strategy.experimental_local_results(weight.value)]

    train(optimizer)
    start, deep, after = weight.numpy(), copy.deepcopy(optimizer), []
    for each in (optimizer, deep):
        weight.assign(start)
        after += train(each)
        assert int(each.iterations.numpy()) == 4
    for values in after[1:]:
        np.testing.assert_array_equal(values, after[0])


def test_a_deep_copy_keeps_what_no_config_has():
    @tf.keras.utils.register_keras_serializable()
    class Times(tf.keras.optimizers.SGD):
        factor = 1.0

        def update_step(self, gradient, variable, learning_rate):
            super().update_step(gradient * self.factor, variable, learning_rate)

    def multi():
        parts = {"a": tf.keras.optimizers.AdamW(0.1, weight_decay=0.5)}
        return tf.keras.optimizers.MultiOptimizer(tf.keras.optimizers.OptimizerMap(Times(0.125), parts))

    variables = [tf.keras.Variable([1.0, 2.0], name=name) for name in ("a", "b")]
    for variable in variables:
        variable._path = variable.name
    optimizer = LossScaleOptimizer(multi(), initial_scale=4.0)
    parts = optimizer.inner_optimizer.optimizers
    for part in parts:
        part.factor = 3.0
        part.exclude_from_weight_decay(var_names=["a"])
    found = []
    for each in (optimizer, copy.deepcopy(optimizer)):
        for variable in variables:
            variable.assign([1.0, 2.0])
        each.apply_gradients([(tf.zeros(2), variables[0]), (tf.ones(2), variables[1])])
        found.append([variable.numpy().tolist() for variable in variables])
    assert found == [[[1.0, 2.0], [0.625, 1.625]]] * 2
