"""Loss scales and managers of the user's own, and ours, wherever one is taken: what is asked, noted and traced."""

import numpy as np
import pytest
import tensorflow as tf

from tests import families, strategies
from tests.cases import MODES, combinations, named
from tf_lossscale import LossScaleOptimizer, amp, legacy
from tf_lossscale.core import loss_scale as state
from tf_lossscale.legacy import contrib, experimental

train = tf.compat.v1.train


class Careful(legacy.LossScale):
    """Applies gradients below 10. It does not call our constructor, as little old code did."""

    def __init__(self):
        self.moved = []

    def __call__(self):
        return tf.constant(4.0)

    def update(self, grads):
        return self.moved, tf.reduce_max(tf.stack([tf.reduce_max(g) for g in grads])) < 10

    def get_config(self):
        return {}


def outcomes(optimizer, gradients, compiled, weight=None):
    """(weight, last_step_skipped, skipped_steps) after each step."""
    weight = tf.Variable(1.0) if weight is None else weight

    def step(gradient):
        if hasattr(optimizer.inner_optimizer, "apply"):
            optimizer.get_unscaled_gradients([])
        optimizer.apply_gradients([(gradient, weight)])

    take = tf.function(step) if compiled else step
    states = []
    for gradient in gradients:
        take(tf.constant(gradient))
        states.append((float(weight), bool(optimizer.last_step_skipped), int(optimizer.skipped_steps)))
    return states


class Listing(legacy.LossScale):
    """Lists the gradients that it gets, and applies those below 10."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __call__(self):
        return tf.constant(4.0)

    def update(self, grads):
        self.seen.append(grads)
        dense = [tf.convert_to_tensor(g) for g in grads if g is not None]
        return None, tf.reduce_max(tf.stack([tf.reduce_max(tf.abs(g)) for g in dense])) < 10

    def get_config(self):
        return {}


class ListingInCheck(state.LossScale):
    """The same, by the methods of the core."""

    may_skip = True
    __call__, update = Listing.__call__, Listing.update

    def __init__(self):
        super().__init__()
        self.seen = []

    def check(self, gradients):
        return self.update(list(gradients))[1]


@pytest.mark.parametrize(
    ("family", "compiled", "make", "diagnose"),
    combinations(
        families.ALL_FAMILIES[:4],  # Sonnet needs its Replicator
        MODES,
        [Listing, ListingInCheck],
        named({"plain": False, "diagnose": True}),
        usual=["keras3-eager-Listing-diagnose", "tf1-function-ListingInCheck-plain"],
    ),
)
def test_a_loss_scale_gets_all_gradients_that_the_caller_has_summed_over_the_replicas(family, compiled, make, diagnose):
    strategy, scale = strategies.get("mirrored_2"), make()
    with strategy.scope():
        weights = [tf.Variable(tf.ones(shape)) for shape in ([2], [], [3, 2])]
        optimizer = LossScaleOptimizer(family.sgd(), loss_scale=scale, diagnose=diagnose)

    def replica(of_first, of_second):
        is_first = tf.equal(tf.distribute.get_replica_context().replica_id_in_sync_group, 0)
        own = tf.where(is_first, of_first, of_second)
        rows = tf.IndexedSlices(tf.fill([1, 2], 4.0 * own), tf.constant([1]), tf.constant([3, 2]))
        optimizer.get_scaled_loss(tf.constant(0.0))
        gradients = optimizer.get_unscaled_gradients([tf.stack([4.0 * own, 1.0]), None, rows])
        optimizer.apply_gradients(zip(gradients, weights), skip_gradients_aggregation=True)

    def step(*values):
        strategy.run(replica, values)

    take, skipped = tf.function(step) if compiled else step, []
    # Applied; refused by the loss scale; not finite on one replica; applied.
    for values in ((1.0, 1.0), (16.0, 16.0), (1.0, np.nan), (-np.inf, 1.0), (1.0, 1.0)):
        take(*map(tf.constant, values))
        skipped += [bool(copy) for copy in strategy.experimental_local_results(optimizer.last_step_skipped)[:1]]
    assert skipped == [False, True, True, True, False]
    for copy in strategy.experimental_local_results(weights[0]):
        np.testing.assert_array_equal(copy, [0.0, 0.75])
    for seen in scale.seen:
        assert [None if g is None else g.shape.as_list() for g in seen] == [[2], None, [3, 2]]
    if not compiled:
        np.testing.assert_array_equal([seen[0] for seen in scale.seen[:2]], [[1.0, 0.25], [16.0, 0.25]])
        np.testing.assert_array_equal(scale.seen[1][2].values, [[16.0, 16.0]])


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_an_update_may_return_any_structure_of_operations(compiled):
    class Counting(Careful):
        def __init__(self):
            self.steps = tf.Variable(0), tf.Variable(0)

        def update(self, grads):
            return [v.assign_add(1) for v in self.steps], True

    scale = Counting()
    outcomes(experimental.LossScaleOptimizer(tf.keras.optimizers.SGD(0.5), scale), [1.0, 20.0], compiled)
    assert [int(v) for v in scale.steps] == [2, 2]


def test_a_function_takes_a_loss_scale_for_the_object_it_is():
    traces = []

    @tf.function
    def update(scale, gradient):
        traces.append(scale)
        return scale.update([gradient])[1], scale()

    one, other = legacy.DynamicLossScale(8.0, 1), legacy.DynamicLossScale(4.0, 1)
    for scale, after in ((one, 16.0), (one, 32.0), (other, 8.0)):
        applied, now = update(scale, tf.constant(1.0))
        assert (bool(applied), float(now)) == (True, after)
    assert len(traces) == 2 and traces[0] is one and traces[1] is other
    default = tf.function(lambda scale=one: scale() * 2)
    assert (float(default()), float(default(legacy.FixedLossScale(3)))) == (64.0, 6.0)
    concrete = update.get_concrete_function(one, tf.TensorSpec([], tf.float32))
    assert float(concrete(gradient=tf.constant(1.0))[1]) == 64.0


@pytest.mark.parametrize("optimizer_of", [contrib.LossScaleOptimizer, legacy.MixedPrecisionLossScaleOptimizer])
def test_the_wrappers_of_tensorflow_1_take_amp_managers(optimizer_of):
    weight = tf.Variable(1.0)
    optimizer = optimizer_of(train.GradientDescentOptimizer(0.5), amp.DynamicLossScaleManager(64, 2, 2))
    for gradient, after in ((np.inf, (1.0, 32.0)), (1.0, (0.5, 32.0)), (1.0, (0.0, 64.0))):
        optimizer.apply_gradients([(tf.constant(gradient), weight)])
        assert (weight.numpy(), float(optimizer.loss_scale)) == after


def test_an_optimizer_of_tensorflow_1_may_be_wrapped_in_every_graph_that_is_built():
    inner = train.MomentumOptimizer(0.5, 0.9)
    for wrap in (
        lambda: contrib.LossScaleOptimizer(inner, legacy.FixedLossScaleManager(4)),
        lambda: legacy.MixedPrecisionLossScaleOptimizer(inner, "dynamic"),
        lambda: legacy.MixedPrecisionLossScaleOptimizer(inner, 8),
    ):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            weight = tf.Variable(1.0)
            operation = wrap().minimize(weight, var_list=[weight])
            session.run(tf.compat.v1.global_variables_initializer())
            session.run(operation)
            assert session.run(weight) == 0.5


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"init_loss_scale": None}, ValueError),
        ({"init_loss_scale": "x"}, TypeError),
        ({"incr_ratio": None}, ValueError),
        ({"decr_ratio": "0.5"}, TypeError),
    ],
)
def test_contribs_manager_raises_what_it_raised_and_names_the_argument(arguments, error):
    with pytest.raises(error, match=next(iter(arguments))):
        legacy.ExponentialUpdateLossScaleManager(**{"init_loss_scale": 8, "incr_every_n_steps": 2, **arguments})
