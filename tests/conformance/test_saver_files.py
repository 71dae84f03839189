"""TensorFlow 1.15's files restore into graphs of today, and training goes on as it did there."""

import numpy as np
import pytest
import tensorflow as tf

from tests.cases import combinations
from tests.conformance import checkpoints, recordings
from tf_lossscale import legacy, migrate

train = tf.compat.v1.train


class Graph:
    """The recorded program: two variables, a loss with placeholders for its gradients, a wrapped optimizer."""

    def __init__(self, meta):
        initial = {name: np.zeros_like(recordings.array(meta["initial"][name], "float32")) for name in ("w0", "w1")}
        self.weights = [tf.compat.v1.get_variable(name, initializer=value) for name, value in initial.items()]
        self.global_step = train.create_global_step()
        name, kwargs = meta["optimizer"]
        inner = getattr(train, name)(**kwargs)
        if "contrib" in meta["wrapper"]:
            scale = legacy.ExponentialUpdateLossScaleManager(**meta["wrapper_kwargs"])
            self.optimizer, self.scale = legacy.contrib.LossScaleOptimizer(inner, scale), scale.get_loss_scale
        else:
            self.scale = legacy.DynamicLossScale(**meta["wrapper_kwargs"])
            self.optimizer = legacy.MixedPrecisionLossScaleOptimizer(inner, self.scale)
        self.fed = [tf.compat.v1.placeholder(tf.float32, weight.shape) for weight in self.weights]
        loss = tf.add_n([tf.reduce_sum(w * g) for w, g in zip(self.weights, self.fed)])
        self.step = self.optimizer.minimize(loss, global_step=self.global_step, var_list=self.weights)

    def check(self, session, expected, where):
        step, scale, *weights = session.run([self.global_step, self.scale(), *self.weights])
        assert step == expected["global_step"], where
        np.testing.assert_allclose(scale, expected["loss_scale"], 1e-6, err_msg=where)
        for name, weight in zip(("w0", "w1"), weights):
            np.testing.assert_allclose(weight, recordings.array(expected[name]), 1e-5, 1e-6, err_msg=f"{where}: {name}")

    def go_on(self, session, meta):
        self.check(session, meta["at_save"], "after the restore")
        for i, (event, expected) in enumerate(zip(meta["steps_after"], meta["trace_after"])):
            values = [recordings.array(g, "float32") for g in event["grads"]]
            session.run(self.step, dict(zip(self.fed, values)))
            self.check(session, expected, f"step {i}")


@pytest.mark.parametrize(
    "name", combinations(checkpoints.OF_TF1, usual=["tf1.15.5_mpls_adam_checkpoint"], others=pytest.mark.slow)
)
def test_training_goes_on_in_a_graph(name):
    folder, meta = recordings.checkpoint(name)
    path = str(folder / "ckpt")
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        graph = Graph(meta)
        session.run([tf.compat.v1.global_variables_initializer(), tf.compat.v1.local_variables_initializer()])
        if name.endswith("_saver"):
            train.Saver(migrate.saver_names(path)).restore(session, path)
        else:
            w0, w1 = graph.weights
            checkpoint = tf.train.Checkpoint(optimizer=graph.optimizer, w0=w0, w1=w1, global_step=graph.global_step)
            status = checkpoint.read(path)
            status.assert_consumed()
            status.run_restore_ops(session)
        graph.go_on(session, meta)


def saved(path, names):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variables = [tf.compat.v1.get_variable(name, initializer=0.5) for name in names]
        session.run(tf.compat.v1.global_variables_initializer())
        return train.Saver(variables).save(session, str(path / "ckpt"))


def test_powers_of_one_optimizer_are_found_whatever_they_were_in(tmp_path):
    path = saved(tmp_path, ["w", "cond_1/beta1_power"])
    with tf.Graph().as_default():
        variables = [tf.compat.v1.get_variable(name, initializer=0.0) for name in ("w", "training/beta1_power")]
        found = migrate.saver_names(path)
    assert found == {"w": variables[0], "cond_1/beta1_power": variables[1]}


def test_what_the_file_lacks_or_has_twice_is_an_error(tmp_path):
    path = saved(tmp_path, ["w", "cond/beta1_power", "cond_1/beta1_power"])
    with tf.Graph().as_default():
        power = tf.compat.v1.get_variable("beta1_power", initializer=0.0)
        with pytest.raises(
            ValueError, match=r"no variable 'beta1_power', but several variables that may correspond to it: cond/beta"
        ):
            migrate.saver_names(path, [power])
        other = tf.compat.v1.get_variable("bias", initializer=0.0)
        with pytest.raises(ValueError, match=r"no variable 'bias'\. Pass only `variables` that are in the file"):
            migrate.saver_names(path, [other])
    one_power = saved(tmp_path / "one", ["cond/beta1_power"])
    with tf.Graph().as_default():
        powers = [tf.compat.v1.get_variable(name, initializer=0.0) for name in ("beta1_power", "beta1_power_1")]
        with pytest.raises(ValueError, match=r"no variable 'beta1_power_1'\. Pass only"):
            migrate.saver_names(one_power, powers)
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        migrate.saver_names(tmp_path / "nothing", [])
