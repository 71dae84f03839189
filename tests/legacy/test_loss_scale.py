"""The old loss scales where one object meets several graphs, replicas, savers and a user's own subclass."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf

from tests import strategies
from tf_lossscale import LossScaleOptimizer, legacy
from tf_lossscale.legacy import contrib

train = tf.compat.v1.train


@pytest.mark.parametrize("graph_mode", [False, True])
def test_a_variable_of_a_users_own_loss_scale_has_the_dtype_of_its_value_as_in_tensorflow(graph_mode):
    from tensorflow.python.training.experimental import loss_scale as original

    values = {"counter": 0, "scale": 64.0, "double": np.float64(1), "flag": False, "long": np.int64(2**40)}

    def dtypes(base):
        class Own(base):
            def __init__(self):
                super().__init__()
                self.made = {name: self._add_weight(name, value) for name, value in values.items()}
                self.made["given"] = self._add_weight("given", 0, dtype="int64")

            __call__ = update = get_config = None

        return {name: variable.dtype for name, variable in Own().made.items()}

    with tf.Graph().as_default() if graph_mode else contextlib.nullcontext():
        made = dtypes(legacy.LossScale)
        assert made == dtypes(original.LossScale)
    assert made["counter"] == tf.int32
    assert made["given"] == tf.int64


def test_an_overridden_update_of_a_dynamic_loss_scale_decides():
    class Stubborn(legacy.DynamicLossScale):
        def update(self, grads):
            return super().update(grads)[0], tf.constant(True)

    weight = tf.Variable(1.0)
    optimizer = legacy.from_loss_scale(tf.keras.optimizers.SGD(0.5), Stubborn(64.0))
    optimizer.apply_gradients([(tf.constant(np.inf), weight)])
    assert (weight.numpy(), float(optimizer.loss_scale)) == (-np.inf, 32.0)


@pytest.mark.slow
@pytest.mark.parametrize("loss_scale", ["dynamic", legacy.DynamicLossScale(64.0)], ids=["dynamic", "object"])
def test_one_optimizer_serves_two_graphs_and_needs_the_global_initializer_only(loss_scale):
    optimizer = legacy.MixedPrecisionLossScaleOptimizer(train.MomentumOptimizer(0.5, 0.9), loss_scale)
    for _ in range(2):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            weight, factor = tf.Variable(1.0, name="w"), tf.compat.v1.placeholder(tf.float32, [])
            operation = optimizer.minimize(weight * factor, var_list=[weight])
            session.run(tf.compat.v1.global_variables_initializer())
            start = session.run(optimizer.loss_scale)
            session.run(operation, {factor: np.inf})
            assert session.run([weight, optimizer.loss_scale]) == [1.0, start / 2]
            session.run(operation, {factor: 1.0})
            assert session.run(weight) == 0.5
            assert session.run(optimizer.skipped_steps) == 1
            names = [v.name for v in tf.compat.v1.global_variables()]
            assert sorted(names) == ["current_loss_scale:0", "good_steps:0", "w/Momentum:0", "w:0"]


def test_an_abstract_loss_scale_cannot_be_made():
    class Partial(legacy.LossScale):
        def __call__(self):
            return 1.0

    with pytest.raises(TypeError, match="abstract"):
        Partial()


def test_variables_answer_as_a_property_and_as_a_call_and_without_a_gradient_get_no_slots():
    optimizer = legacy.MixedPrecisionLossScaleOptimizer(train.MomentumOptimizer(0.5, 0.9), "dynamic")
    unused, weight = tf.Variable(1.0, name="unused"), tf.Variable(1.0, name="w")
    optimizer.apply_gradients([(None, unused), (tf.constant(1.0), weight)])
    names = ["w/Momentum:0", "current_loss_scale:0", "good_steps:0"]
    assert [v.name for v in optimizer.variables] == [v.name for v in optimizer.variables()] == names
    assert optimizer.get_slot_names() == ["momentum"]
    assert optimizer.get_slot(unused, "momentum") is None


def test_checkpoints_have_the_names_of_tensorflow_1_and_bare_ones_are_read(tmp_path):
    def trained(optimizer):
        weight = tf.Variable([1.0, 2.0], name="w")
        optimizer.apply_gradients([(tf.ones(2), weight)])
        return tf.train.Checkpoint(optimizer=optimizer, weight=weight)

    names = {n for n, _ in tf.train.list_variables(trained(LossScaleOptimizer(train.AdamOptimizer(0.1))).write(
        str(tmp_path / "wrapped")))}  # fmt: skip
    for part in ("base_optimizer/beta1_power", "loss_scale/current_loss_scale", "loss_scale/good_steps"):
        assert f"optimizer/{part}/.ATTRIBUTES/VARIABLE_VALUE" in names
    assert "weight/.OPTIMIZER_SLOT/optimizer/base_optimizer/m/.ATTRIBUTES/VARIABLE_VALUE" in names

    bare = train.AdamOptimizer(0.1)
    path = trained(bare).write(str(tmp_path / "bare"))
    wrapped = LossScaleOptimizer(train.AdamOptimizer(0.1))
    checkpoint = trained(wrapped)
    wrapped.apply_gradients([(tf.ones(2), checkpoint.weight)])
    checkpoint.read(path).expect_partial()
    for mine, theirs in zip(wrapped.weights, bare.variables()):
        np.testing.assert_array_equal(mine, theirs)


def test_the_learning_rate_of_a_tensorflow_1_optimizer_is_read_and_set_and_steps_are_not_counted():
    for inner in (train.AdamOptimizer(0.25), train.GradientDescentOptimizer(0.25)):
        optimizer = LossScaleOptimizer(inner)
        assert optimizer.learning_rate == optimizer.lr == 0.25
        optimizer.lr = 0.5
        assert optimizer.learning_rate == 0.5
        with pytest.raises(AttributeError, match="global_step"):
            _ = optimizer.iterations


def test_tensorflow_1_optimizers_sum_dense_and_sparse_gradients_once_over_the_replicas():
    strategy = strategies.get("mirrored_4")
    with strategy.scope():
        dense, sparse = tf.Variable(1.0), tf.Variable([[1.0], [1.0]])
        optimizer = LossScaleOptimizer(train.GradientDescentOptimizer(0.5), initial_scale=8.0)

    @tf.function
    def step(gradients):
        def replica():
            mine = tf.gather(gradients, tf.distribute.get_replica_context().replica_id_in_sync_group)
            rows = tf.IndexedSlices(tf.reshape(mine, [1, 1]), tf.constant([1]), tf.constant([2, 1]))
            optimizer.apply_gradients([(mine, dense), (rows, sparse)])

        strategy.run(replica)

    for gradients, scale in (([1.0, 2.0, 3.0, 4.0], 8.0), ([1.0, 1.0, 1.0, np.inf], 4.0)):
        step(tf.constant(gradients))
        assert float(optimizer.loss_scale) == scale
        assert [float(copy) for copy in strategy.experimental_local_results(dense)] == [-4.0] * 4
        for copy in strategy.experimental_local_results(sparse):
            np.testing.assert_array_equal(copy, [[1.0], [-4.0]])


ORIGINAL = tf.compat.v1.mixed_precision


@pytest.mark.parametrize("name", ["none", "one_device", "mirrored_1", "mirrored_2", "central_storage"])
def test_a_loss_scale_is_printed_as_the_original_under_every_strategy(name):
    strategy = strategies.get(name)
    with strategy.scope() if strategy else contextlib.nullcontext():
        scales = [library.DynamicLossScale(8, 3, 2) for library in (ORIGINAL, legacy)]
        for scale in scales:
            scale.update([tf.constant(1.0)])
        assert repr(scales[1]) == repr(scales[0])
    assert repr(scales[1]) == repr(scales[0])
    assert "current_loss_scale=8.0, num_good_steps=1" in repr(scales[1])
    assert repr(legacy.FixedLossScale(8)) == repr(ORIGINAL.FixedLossScale(8))


libraries = pytest.mark.parametrize("library", [ORIGINAL, legacy], ids=["original", "ours"])
mirrored = pytest.mark.parametrize("devices", [1, 2])


@pytest.mark.slow
@libraries
@pytest.mark.parametrize("control_flow", ["v2", "v1"])
def test_an_update_in_a_graph_is_a_tensor_to_evaluate_to_wait_for_and_to_return(library, control_flow):
    tensor_of = {
        "update": lambda scale, bad: scale.update([bad])[0],
        "identity": lambda scale, bad: tf.identity(scale.update([bad])[0]),
        "in a cond": lambda scale, bad: tf.cond(bad > 0, lambda: False, lambda: scale.update([bad])[0]),
        "waited for": lambda scale, bad: after(scale.update([bad])[0]),
    }

    def after(update):
        with tf.control_dependencies([update]):
            return tf.constant(True)

    for how, make in tensor_of.items():
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            if control_flow == "v1":
                tf.compat.v1.disable_control_flow_v2()
            try:
                scale = library.DynamicLossScale(8)
                tensor = make(scale, tf.constant(np.nan))
            finally:
                tf.compat.v1.enable_control_flow_v2()
            session.run(tf.compat.v1.global_variables_initializer())
            assert isinstance(tensor, tf.Tensor), how
            assert isinstance(session.run(tensor), np.bool_), how
            assert session.run(scale()) == 4, how


@libraries
def test_an_update_in_a_tf_function_can_be_returned(library):
    scale = library.DynamicLossScale(8)
    returned, apply = tf.function(lambda gradient: scale.update([gradient]))(tf.constant(np.inf))
    assert returned.dtype == apply.dtype == tf.bool
    assert (bool(apply), float(scale())) == (False, 4.0)


def in_a_mirrored_graph(devices):
    """A session of a graph, and the strategy of that graph alone."""
    stack = contextlib.ExitStack()
    stack.enter_context(tf.Graph().as_default())
    session = stack.enter_context(tf.compat.v1.Session())
    return stack, session, tf.distribute.MirroredStrategy([f"cpu:{i}" for i in range(devices)])


@libraries
@mirrored
def test_an_update_in_a_mirrored_graph_looks_at_all_replicas(library, devices):
    stack, session, strategy = in_a_mirrored_graph(devices)
    with stack, strategy.scope():
        scale, given = library.DynamicLossScale(8, 2), tf.compat.v1.placeholder(tf.float32, [])

        def replica():
            is_last = tf.equal(tf.distribute.get_replica_context().replica_id_in_sync_group, devices - 1)
            return tf.where(is_last, given, 1.0)

        update, apply = scale.update([strategy.extended.call_for_each_replica(replica)])
        with tf.control_dependencies([update]):
            apply = tf.identity(apply)
        session.run(tf.compat.v1.global_variables_initializer())
        moves = [
            (bool(session.run(apply, {given: value})), session.run(scale())) for value in (1, np.nan, 1, 1, np.inf)
        ]
    assert moves == [(True, 8), (False, 4), (True, 4), (True, 8), (False, 4)]


@pytest.mark.slow
@libraries
@mirrored
def test_an_optimizer_of_tensorflow_1_trains_and_skips_in_a_mirrored_graph(library, devices):
    stack, session, strategy = in_a_mirrored_graph(devices)
    with stack, strategy.scope():
        weight, factor = tf.Variable([1.0, 2.0]), tf.compat.v1.placeholder(tf.float32, [])
        scale = library.DynamicLossScale(2, 1, 4)
        optimizer = library.MixedPrecisionLossScaleOptimizer(train.MomentumOptimizer(1.0, 1.0), scale)

        def replica():
            return optimizer.minimize(lambda: weight * factor / devices, var_list=[weight])

        operation = strategy.group(strategy.extended.call_for_each_replica(replica))
        session.run(tf.compat.v1.global_variables_initializer())
        moves = []
        for value in (1, 1, np.nan, 1):
            session.run(operation, {factor: value})
            moves.append((*session.run(weight), session.run(scale())))
    assert moves == [(0, 1, 8), (-2, -1, 32), (-2, -1, 8), (-5, -4, 32)]


@libraries
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_a_scale_is_a_tensor_and_a_fixed_one_applies_every_step_without_a_conditional(library, graph):
    with tf.Graph().as_default() if graph else contextlib.nullcontext():
        for scale in (library.FixedLossScale(8), library.DynamicLossScale(8)):
            assert isinstance(scale(), tf.Tensor)
        for gradient in (0.0, np.nan):
            operation, apply = library.FixedLossScale(8).update([tf.constant(gradient)])
            assert apply is True
            assert (operation is None) is not graph


WRAPPED = {
    "contrib": lambda inner: contrib.LossScaleOptimizer(inner, legacy.FixedLossScaleManager(1e4)),
    "fixed": lambda inner: legacy.MixedPrecisionLossScaleOptimizer(inner, 1e4),
    "dynamic": lambda inner: legacy.MixedPrecisionLossScaleOptimizer(inner, "dynamic"),
}


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("kind", [None, *WRAPPED])
def test_a_gradient_that_vanishes_in_float16_arrives_with_a_scale(kind, graph):
    with tf.Graph().as_default() if graph else contextlib.nullcontext():
        session = tf.compat.v1.Session() if graph else None
        weight = tf.Variable(1.0)

        def loss():
            return tf.cast(weight, tf.float16) * 1e4 * 1e-4 * 1e-4

        inner = train.GradientDescentOptimizer(1.0)
        optimizer = WRAPPED[kind](inner) if kind else inner
        pairs = optimizer.compute_gradients(loss() if graph else loss, [weight])
        assert [variable is weight for _, variable in pairs] == [True]
        done = optimizer.apply_gradients(pairs)
        if graph:
            session.run(tf.compat.v1.global_variables_initializer())
            session.run(done)
        after = session.run(weight) if graph else weight.numpy()
    assert 1 - after == pytest.approx(1e-4 if kind else 0, abs=1e-6)
