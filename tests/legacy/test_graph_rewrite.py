"""The graph rewrite: what it tells TensorFlow, and what the optimizer it returns still answers."""

import pytest
import tensorflow as tf
import tf_keras

from tf_lossscale import LossScaleOptimizer, install, legacy

train = tf.compat.v1.train


@pytest.fixture
def enable():
    yield legacy.enable_mixed_precision_graph_rewrite
    legacy.disable_mixed_precision_graph_rewrite()


def rewrites(config):
    with tf.Graph().as_default(), tf.compat.v1.Session(config=config) as session:
        return session._config.graph_options.rewrite_options.auto_mixed_precision == 1


@pytest.mark.parametrize("config", [None, tf.compat.v1.ConfigProto()], ids=["no config", "a config"])
def test_sessions_rewrite_their_graphs_while_it_is_enabled(enable, config):
    enable(train.GradientDescentOptimizer(0.1))
    assert rewrites(config)
    legacy.disable_mixed_precision_graph_rewrite()
    assert not rewrites(config)


def test_the_wrapped_keras_optimizer_keeps_its_learning_rate_for_callbacks(keras, enable):
    optimizer = enable(keras.optimizers.SGD(0.5))
    assert isinstance(optimizer, LossScaleOptimizer)
    assert float(optimizer.loss_scale()) == float(optimizer.loss_scale) == 2.0**15
    assert float(optimizer.lr) == 0.5
    optimizer.lr = 0.25
    assert float(optimizer.inner_optimizer.learning_rate) == 0.25
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    halve = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    model.fit(tf.ones([4, 2]), tf.ones([4, 1]), epochs=2, callbacks=[halve], verbose=0)
    assert float(optimizer.inner_optimizer.learning_rate) == 0.0625


def is_enabled():
    return tf.config.optimizer.get_experimental_options().get("auto_mixed_precision", False)


def test_refusals_change_nothing(enable):
    inner, wrapped = train.GradientDescentOptimizer(0.1), legacy.from_loss_scale(train.GradientDescentOptimizer(0.1))
    own = tf.keras.mixed_precision.LossScaleOptimizer(tf.keras.optimizers.SGD())
    for arguments, said in (
        ((1,), "must be an instance"),
        ((wrapped,), "must not already be"),
        ((own,), "must not already be"),
        ((inner, None), "cannot be None"),
        ((inner, "static"), "Could not interpret"),
        ((inner, 0.5), "at least 1"),
    ):
        with pytest.raises(ValueError, match=said):
            enable(*arguments)
        assert not is_enabled()
    with pytest.raises(ValueError, match="must be an instance"):
        legacy.MixedPrecisionLossScaleOptimizer(tf.keras.optimizers.SGD(), 8)


OPTIMIZERS = {
    "tf1": lambda: train.GradientDescentOptimizer(0.1),
    "keras": lambda: tf.keras.optimizers.SGD(0.1),
    "tf_keras": lambda: tf_keras.optimizers.SGD(0.1),
}


@pytest.mark.parametrize("name", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_rewrite_is_refused_under_a_mixed_policy_of_either_keras(keras, policies, enable, name, optimizer):
    keras.mixed_precision.set_global_policy(name)
    inner = OPTIMIZERS[optimizer]()
    with pytest.raises(ValueError, match=rf"global dtype policy of \w+ is '{name}'"):
        enable(inner)
    assert not is_enabled()
    policies.set_policy("float32")
    assert enable(inner).inner_optimizer is inner, "the refused call had wrapped it"
    assert is_enabled()


@pytest.mark.parametrize("name", ["mixed_float16", "mixed_bfloat16"])
def test_a_mixed_policy_is_refused_once_graphs_are_rewritten(keras, policies, enable, name):
    with install():
        mixed_precision = keras.mixed_precision
        enable(train.GradientDescentOptimizer(0.1))
        for policy in (name, policies.Policy(name, loss_scale=8)):
            for set_policy in (mixed_precision.set_global_policy, mixed_precision.experimental.set_policy):
                with pytest.raises(ValueError, match="enable_mixed_precision_graph_rewrite"):
                    set_policy(policy)
        assert mixed_precision.global_policy().name == "float32"
        mixed_precision.set_global_policy("float16")  # is not mixed
        legacy.disable_mixed_precision_graph_rewrite()
        mixed_precision.set_global_policy(name)
        assert mixed_precision.global_policy().name == name


def test_sessions_that_were_made_before_are_warned_of_and_no_others(enable, caplog):
    from tensorflow.python.training.experimental import mixed_precision_global_state as state

    for exists in (False, True):
        state.set_non_mixed_precision_session_created(False)
        caplog.clear()
        if exists:
            with tf.Graph().as_default(), tf.compat.v1.Session():
                pass
        enable(train.GradientDescentOptimizer(0.1))
        assert ("A Session was created before" in caplog.text) is exists
        legacy.disable_mixed_precision_graph_rewrite()
