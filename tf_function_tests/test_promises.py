"""The promises of a step, for every family x strategy x way of calling it."""

import contextlib
import functools

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow as tf

from tests import loops, strategies
from tests.cases import combinations, slow_one_in
from tests.families import ALL_FAMILIES, all_families
from tf_function_tests.cell import CALLS, Cell, why_not
from tf_lossscale import LossScaleOptimizer

SEVERAL = strategies.here("mirrored_2", "mirrored_2_apart", "mirrored_4", "central_storage")
STRATEGIES = strategies.here("none", "one_device", *SEVERAL, "tpu", strategies.GPU)
if strategies.ROLE == "worker":
    SEVERAL = [*SEVERAL, "workers_2_apart"]
# Of 20 steps. 10 of two replicas meet each scale, counter and overflow that 25 meet; one replica has fewer overflows.
# Over processes a step takes as long as five others.
EXAMPLES = {1: 25, 2: 5 if strategies.ROLE else 10}


def called_in_every_way():
    """Every family under every strategy; the loops of every family under one, and of one under every strategy."""
    usual = strategies.here("none", "mirrored_2")
    for call in CALLS:
        for name in STRATEGIES:
            marks = name.marks if name is strategies.GPU else ()
            named = "gpu" if name is strategies.GPU else name
            for family in ALL_FAMILIES:
                if not call.endswith("_loop") or named in usual or family is ALL_FAMILIES[0]:
                    yield pytest.param(family, named, call, id=f"{call}-{named}-{family.name}", marks=marks)


@pytest.mark.parametrize(
    ("family", "name", "call"),
    combinations(
        called_in_every_way(),
        usual=[
            "eager-none-keras3",
            "function-none-keras3",
            "compiled-none-keras3",
            "function-mirrored_2-keras3",
            "function-mirrored_4-keras3",
            "eager-mirrored_2-tf_keras",
            "function-mirrored_2-tf_keras_legacy",
            "function-mirrored_2-tf1",
            "function-none-sonnet",
            "eager-none-tf1",
            "function-mirrored_2_apart-keras3",
            "function-central_storage-keras3",
            "function-one_device-tf_keras",
            "function-tpu-keras3",
            "dataset_loop-mirrored_2-keras3",
            "while_loop-mirrored_2-keras3",
        ],
        others=slow_one_in(6),
    ),
)
def test_nan_on_any_one_replica_skips_the_step_on_all(family, name, call):
    cell = Cell(family, name, call)
    cell.step(*[0.5] * cell.replicas)
    for bad in range(cell.replicas):
        # Every value on the last replica, and one of them on each other.
        values = (np.nan, np.inf, -np.inf) if bad == cell.replicas - 1 else ([np.nan, np.inf, -np.inf][bad],)
        for value in values:
            scale, _, iterations = cell.scale()
            before = cell.state()
            cell.step(*[value if i == bad else 0.5 for i in range(cell.replicas)])
            after = cell.state()
            count = [i for i, v in enumerate(cell.optimizer.weights) if "iter" in v.name]
            for i, (a, b) in enumerate(zip(before, after)):
                if i - 2 not in count:
                    for x, y in zip(a, b):
                        np.testing.assert_array_equal(x, y)
            assert cell.scale() == (max(scale / 2, 1.0), 0.0, iterations + 1)
    cell.step(*[0.5] * cell.replicas)
    assert not np.array_equal(cell.copies(cell.weight)[0], before[0][0])
    assert np.ptp(cell.copies(cell.weight), axis=0).max() == 0


@pytest.mark.parametrize(
    ("call", "name", "family"),
    combinations(
        ["eager", "function", "compiled"],
        STRATEGIES,
        ALL_FAMILIES,
        usual=[
            "eager-none-tf_keras",
            "function-mirrored_2-keras3",
            "function-mirrored_2-tf1",
            "compiled-none-tf_keras_legacy",
            "function-none-sonnet",
        ],
    ),
)
def test_a_fixed_scale_that_only_skips_does_so_on_all_replicas(family, name, call):
    config = {"dynamic": False, "initial_scale": 1, "dynamic_growth_steps": None, "skip_nonfinite": True}
    cell = Cell(family, name, call, **config)
    for bad in range(cell.replicas):
        cell.step(*[0.5] * cell.replicas)
        before = cell.copies(cell.weight)
        cell.step(*[np.nan if i == bad else 0.5 for i in range(cell.replicas)])
        np.testing.assert_array_equal(cell.copies(cell.weight), before)
        assert [int(copy[1]) for copy in cell.copies(cell.optimizer.scaler.step_counts)] == [bad + 1] * len(before)
    assert not np.array_equal(before[0], [1, -2])
    assert np.ptp(before, axis=0).max() == 0


@pytest.mark.parametrize(
    ("call", "name", "family"),
    combinations(
        ["eager", "function"],
        SEVERAL,
        ALL_FAMILIES,
        usual=[
            "function-mirrored_2-keras3",
            "eager-mirrored_2-tf1",
            "eager-mirrored_2-tf_keras",
            "function-central_storage-keras3",
        ],
    ),
)
def test_gradients_are_summed_before_the_check_and_before_clipping(family, name, call):
    clips = family.keras is not None and (name, family.name) != ("central_storage", "tf_keras_legacy")  # test_errors.py
    cell = Cell(family, name, call, inner=(lambda: family.sgd(clipnorm=1.0)) if clips else None)
    each = 3e38 / 16 / cell.replicas * 1.5
    cell.step(*[each * 16] * cell.replicas)
    assert cell.scale()[:2] == (8.0, 0.0), "finite gradients whose sum overflows"
    np.testing.assert_array_equal(cell.copies(cell.weight)[0], [1, -2])

    if clips:
        cell.step(*[10.0] * cell.replicas)
        # The norm of the summed gradient is 1 after clipping; the sum of clipped ones would be as many times larger.
        np.testing.assert_allclose(cell.copies(cell.weight)[0], [1 - 0.5 / 2**0.5, -2 - 0.5 / 2**0.5], rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "where", "family"),
    combinations(
        [name for name in STRATEGIES if name != "none"],
        ["inside", "outside"],
        ALL_FAMILIES,
        usual=[
            "mirrored_2-inside-keras3",
            "mirrored_2-outside-tf_keras",
            "central_storage-outside-keras3",
            "one_device-outside-tf_keras_legacy",
            "tpu-outside-tf_keras",
            "one_device-inside-tf1",
            "one_device-inside-sonnet",
        ],
    ),
)
def test_a_step_over_replicas_is_a_step_over_the_whole_batch(family, name, where):
    cell = Cell(family, name, "function", where)
    for gradients, state, scale in steps_over_the_whole_batch(family, cell.replicas):
        cell.step(*gradients)
        for mine, theirs in zip(cell.state(), state):
            for copy in mine:
                np.testing.assert_allclose(copy, theirs[0], rtol=2e-5, atol=1e-6)
        assert cell.scale() == scale


@functools.cache
def steps_over_the_whole_batch(family, replicas):
    """Steps without replicas: for each the gradients that replicas would see, and state and scale afterwards."""
    whole = Cell(family, "none", "eager")
    whole.bias_gradient *= replicas
    rng = np.random.default_rng(0)
    taken = []
    for _ in range(5):
        gradients = rng.normal(size=replicas).astype("float32")
        whole.step(gradients.sum())
        taken.append((gradients, whole.state(), whole.scale()))
    return taken


@pytest.mark.parametrize(
    ("name", "family"),
    combinations(
        strategies.here("none", "mirrored_2", "mirrored_2_apart", "central_storage"),
        ALL_FAMILIES,
        usual=["mirrored_2-keras3", "none-tf1", "central_storage-keras3"],
    ),
)
def test_random_overflows_follow_a_plain_model_of_the_state_machine(family, name):
    cell = Cell(family, name, "function", inner=family.sgd, hysteresis=2, growth_factor=4.0, max_scale=4096.0)
    replicas = cell.replicas
    model = {"scale": 16.0, "good": 0, "bad": 0, "iterations": 0}

    @hypothesis.settings(max_examples=EXAMPLES[replicas], deadline=None, derandomize=True)
    @hypothesis.given(st.lists(st.lists(st.booleans(), min_size=replicas, max_size=replicas), min_size=20, max_size=20))
    def follow(overflows):
        for per_replica in overflows:
            cell.step(*[np.inf if bad else 0.0 for bad in per_replica])
            if any(per_replica):
                model.update(good=0, bad=model["bad"] + 1)
                if model["bad"] >= 2:
                    model.update(scale=max(model["scale"] / 2, 1.0), bad=0)
            else:
                model.update(good=model["good"] + 1, bad=0)
                if model["good"] >= 3:
                    model.update(scale=min(model["scale"] * 4, 4096.0), good=0)
            model["iterations"] += 1
            assert cell.scale() == (model["scale"], model["good"], model["iterations"])

    follow()


def on_two_replicas(family):
    """A weight, an optimizer, and a function that runs a step on replicas."""
    if not family.distributes:
        pytest.skip(f"{family.name} does not sum gradients over the replicas of TensorFlow's strategies")
    strategy = strategies.get("mirrored_2")
    with strategy.scope():
        return tf.Variable(1.0), LossScaleOptimizer(family.sgd(), initial_scale=4.0), strategy.run


@all_families
def test_gradients_that_are_summed_already_are_not_summed_again(family):
    weight, optimizer, run = on_two_replicas(family)

    @tf.function
    def step(gradients, keyword):
        def replica():
            total = tf.distribute.get_replica_context().all_reduce("SUM", strategies.mine(gradients))
            optimizer.get_scaled_loss(0.0)
            optimizer.get_unscaled_gradients([])
            optimizer.apply_gradients([(total, weight)], **keyword)

        run(replica)

    step(tf.constant([1.0, 2.0]), {"experimental_aggregate_gradients": False})
    assert weight.numpy() == 1.0 - 0.5 * 3.0
    step(tf.constant([1.0, 2.0]), {"skip_gradients_aggregation": True})
    assert weight.numpy() == 1.0 - 3.0
    step(tf.constant([1.0, np.nan]), {"skip_gradients_aggregation": True})
    assert weight.numpy() == -2.0
    assert float(optimizer.loss_scale) == 2.0


@all_families
def test_nan_in_gradients_that_are_not_summed_at_all_is_seen_on_every_replica(family):
    weight, optimizer, run = on_two_replicas(family)

    @tf.function
    def step(gradients):
        def replica():
            pairs = [(strategies.mine(gradients), weight)]
            optimizer.apply_gradients(pairs, experimental_aggregate_gradients=False)

        run(replica)

    step(tf.constant([1.0, np.nan]))
    assert strategies.copies(weight, strategies.get("mirrored_2")) == [1.0, 1.0]
    assert float(optimizer.loss_scale) == 2.0


@all_families
def test_the_compiled_step_keeps_its_conditional_and_calls_no_host(family):
    weight = tf.Variable([1.0, 2.0])
    optimizer = LossScaleOptimizer(family.adam(), initial_scale=8.0)

    @tf.function(jit_compile=True)
    def step(gradient):
        loops.step(optimizer, lambda: tf.reduce_sum(weight * gradient), [weight])

    for gradient in (1.0, np.inf, 1.0):
        step(tf.constant(gradient))
    assert float(optimizer.loss_scale) == 4.0
    assert not family.counts or int(optimizer.iterations) == 3
    compiled = step.experimental_get_compiler_ir(tf.constant(1.0))
    # One is the step. An empty one in the branch that skips it prevents XLA from selecting each variable's value.
    assert compiled(stage="optimized_hlo").count(" conditional(") == 2
    program = compiled(stage="stablehlo")
    assert "custom_call" not in program
    assert "outfeed" not in program


@pytest.mark.parametrize(
    ("name", "conditionals", "family"),
    combinations(
        [("none", 1), ("mirrored_2", 1), ("central_storage", 1), ("mirrored_2_apart", 2)],
        ALL_FAMILIES,
        usual=[
            *(f"none-1-{family.name}" for family in ALL_FAMILIES),
            *("mirrored_2-1-keras3", "mirrored_2_apart-2-tf_keras_legacy", "central_storage-1-tf1"),
        ],
        others=slow_one_in(6),
    ),
)
def test_a_step_has_one_conditional_and_no_host_call_and_is_traced_once(family, name, conditionals):
    cell = Cell(family, name, "function")
    gradients = [0.5] * cell.replicas
    for first in (0.5, np.nan, 2.0):
        cell.step(first, *gradients[1:])
    traces = cell._step.experimental_get_tracing_count()
    assert traces <= 2, "TensorFlow traces twice when variables are made in the first call"
    with strategies.apart(cell.strategy) if cell.apart else contextlib.nullcontext():
        function = cell._step.get_concrete_function(tf.constant(gradients))
    operations = [o.type for o in function.graph.get_operations()]
    assert sum(o in ("If", "StatelessIf") for o in operations) == conditionals
    within = {node.op for each in function.graph.as_graph_def().library.function for node in each.node_def}
    assert not {"PyFunc", "EagerPyFunc", "PyFuncStateless"} & {*operations, *within}


@all_families
def test_a_fixed_scale_builds_no_conditional_and_no_check(family):
    weight = tf.Variable([1.0, 2.0])
    optimizer = LossScaleOptimizer(family.sgd(), dynamic=False, initial_scale=8.0)

    @tf.function
    def step(gradient):
        loops.step(optimizer, lambda: tf.reduce_sum(weight * gradient), [weight])

    step(tf.constant(1.0))
    np.testing.assert_array_equal(weight, [0.5, 1.5])
    operations = {o.type for o in step.get_concrete_function(tf.constant(1.0)).graph.get_operations()}
    assert not operations & {"If", "StatelessIf", "IsFinite", "L2Loss"}


@pytest.mark.parametrize(
    ("name", "family"),
    combinations(
        ["none", *SEVERAL],
        ALL_FAMILIES,
        usual=[
            "mirrored_2-keras3",
            "none-sonnet",
            "central_storage-tf_keras",
            "none-tf1",
            "none-tf_keras_legacy",
            "mirrored_2_apart-keras3",
        ],
    ),
)
def test_small_gradients_are_summed_together_and_each_goes_to_its_variable(family, name):
    if reason := why_not(family, name, "function"):
        pytest.skip(reason)
    strategy = strategies.get(name.removesuffix("_apart")) or tf.distribute.get_strategy()
    replicas = strategy.num_replicas_in_sync
    with strategies.apart(strategy) if name.endswith("_apart") else contextlib.nullcontext(), strategy.scope():
        weights = [tf.Variable(tf.zeros([size])) for size in (4, 2, 4, 4, 3, 2)]
        optimizer = LossScaleOptimizer(family.sgd(), initial_scale=8)
        bad = tf.Variable(-1)

        def replica():
            here = tf.distribute.get_replica_context().replica_id_in_sync_group
            optimizer.get_scaled_loss(1.0)
            scaled = [8.0 * tf.cast(i + 10 * here, tf.float32) * tf.ones(w.shape) for i, w in enumerate(weights)]
            scaled[2] += tf.where(tf.equal(bad, here), float("inf"), 0.0)
            scaled[4] = None
            optimizer.apply_gradients(zip(optimizer.get_unscaled_gradients(scaled), weights))

        step = tf.function(lambda: strategy.run(replica))
        step()
        bad.assign(replicas - 1)
        step()
        moved = [float(sum(i + 10 * here for here in range(replicas))) for i in range(6)]
        moved[4] = 0.0
        for weight, sum_of_gradients in zip(weights, moved):
            for copy in strategy.experimental_local_results(weight):
                np.testing.assert_array_equal(copy, np.full(copy.shape, -0.5 * sum_of_gradients))
        assert float(tf.convert_to_tensor(optimizer.loss_scale)) == 4.0
