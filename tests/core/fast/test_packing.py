"""Small gradients in stacks: the same bits, few nodes, little memory."""

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow as tf

from tests import strategies
from tf_lossscale import LossScaleOptimizer
from tf_lossscale.core import scaling
from tf_lossscale.core.fast import packing
from tf_lossscale.core.finite import all_finite

SETTINGS = hypothesis.settings(max_examples=60)
EDGES = {
    dtype: [0.0, -0.0, 1.0, 1e-8, float("inf"), float("nan")]
    + [float(sign * getattr(np.finfo(tf.as_dtype(like).as_numpy_dtype), edge)) for sign in (1, -1) for edge in edges]
    for dtype, like, edges in [
        ("float16", "float16", ("max", "tiny", "smallest_subnormal")),
        ("bfloat16", "float32", ("tiny",)),
        ("float32", "float32", ("max", "tiny", "smallest_subnormal")),
        ("float64", "float64", ("max", "tiny", "smallest_subnormal")),
    ]
}


@st.composite
def gradients(draw):
    """A few shapes and dtypes, so that there is something to share; sparse ones and None among them."""
    shapes = draw(st.lists(hnp.array_shapes(min_dims=0, max_dims=2, max_side=3), min_size=1, max_size=2))
    dtypes = draw(st.lists(st.sampled_from(sorted(EDGES)), min_size=1, max_size=2))
    found = []
    for kind in draw(st.lists(st.sampled_from(["dense", "dense", "dense", "sparse", "none"]), max_size=6)):
        if kind == "none":
            found.append(None)
            continue
        dtype = draw(st.sampled_from(dtypes))
        shape = (2, 2) if kind == "sparse" else draw(st.sampled_from(shapes))
        array = draw(hnp.arrays(np.float64, shape, elements=st.sampled_from(EDGES[dtype])))
        values = tf.cast(tf.constant(array), dtype)
        found.append(tf.IndexedSlices(values, tf.constant([0, 0])) if kind == "sparse" else values)
    return found


def bits(tensor):
    values = tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor
    return None if tensor is None else (values.dtype, tuple(values.shape), values.numpy().tobytes())


def plain_quotient(gradient, scale):
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    wide = tf.float64 if values.dtype == tf.float64 else tf.float32
    return tf.cast(tf.cast(values, wide) / tf.cast(scale, wide), values.dtype)


@SETTINGS
@hypothesis.given(given=gradients(), scale=st.sampled_from([8.0, 3.0, 2.0**15, 2.0**-20, 2.0**127]))
def test_unscaled_together_or_each_alone_every_bit_is_the_same(given, scale):
    scale = tf.constant(scale)
    expected = [None if g is None else bits(plain_quotient(g, scale)) for g in given]
    assert [bits(g) for g in scaling.unscale(given, scale)] == expected


def plainly_finite(gradient):
    if not isinstance(gradient, tf.IndexedSlices):
        return bool(tf.reduce_all(tf.math.is_finite(gradient)))
    rows = tf.math.unsorted_segment_sum(gradient.values, gradient.indices, 1)
    return bool(tf.reduce_all(tf.math.is_finite(rows)))


@SETTINGS
@hypothesis.given(given=gradients())
def test_looked_at_together_or_each_alone_the_answer_is_the_same(given):
    assert bool(all_finite(given)) == all(plainly_finite(g) for g in given if g is not None)


@pytest.mark.parametrize("compiled", [False, True], ids=["function", "xla"])
def test_an_overflow_between_scaling_and_unscaling_small_gradients_stays_an_overflow(compiled):
    variable = tf.Variable(2.0**15)

    @tf.function(jit_compile=compiled)
    def there_and_back(values):
        scale = variable.read_value()
        scaled = [scaling.scale_loss(each, scale) for each in (values, values + 1)]
        return scaling.unscale(scaled, scale)

    for values in there_and_back(tf.constant([1e36, 1.0])):
        assert values[0] == np.inf


def test_large_ones_of_unknown_shape_empty_ones_and_those_that_xla_compiles_are_left_alone():
    assert packing.positions([tf.ones([10_000])] * 2) == []
    assert packing.positions([tf.ones([0])] * 2) == []
    assert packing.positions([tf.ones([2]), tf.ones([2], tf.float16)]) == []
    seen = []

    def look(values):
        seen.append(packing.positions([values, values]))
        return values

    tf.function(look, input_signature=[tf.TensorSpec([None])]).get_concrete_function()
    tf.function(look, jit_compile=True)(tf.ones([2]))
    tf.function(look)(tf.ones([2]))
    assert seen == [[], [], [[0, 1]]]


def test_no_more_than_a_megabyte_is_copied_at_a_time():
    together = packing.positions([tf.ones([1000])] * 1000)
    assert [i for group in together for i in group] == list(range(1000))
    assert max(map(len, together)) * 4000 <= 2**20


def written(function, *arguments):
    """The bytes of the largest tensor that a graph of the function writes, beside its arguments."""
    concrete = tf.function(function).get_concrete_function(*arguments)
    sizes = [
        (output.shape.num_elements() or 0) * output.dtype.size
        for operation in concrete.graph.get_operations()
        if operation.type not in ("Placeholder", "Const")
        for output in operation.outputs
        if output.dtype not in (tf.resource, tf.variant)
    ]
    return max(sizes)


def test_the_check_writes_no_copy_of_a_large_gradient():
    large = tf.TensorSpec([1_000_000])
    assert written(lambda *g: all_finite(g), large, large, large) <= 16
    assert written(lambda *g: tf.reduce_all([tf.reduce_all(tf.math.is_finite(x)) for x in g]), large) == 1_000_000


def nodes(function):
    graph = function.get_concrete_function().graph.as_graph_def()
    return len(graph.node) + sum(len(called.node_def) for called in graph.library.function)


@pytest.mark.parametrize("contract", ["apply_gradients", "apply"])
def test_a_loss_scale_adds_as_many_nodes_to_40_variables_as_to_20(contract):
    added = []
    for count in (20, 40):
        variables = [tf.Variable(tf.zeros([10])) for _ in range(count)]
        held = [tf.Variable(tf.ones([10])) for _ in range(count)]
        bare, inner = (tf.keras.optimizers.SGD() for _ in range(2))
        optimizer = LossScaleOptimizer(inner)
        for each in (bare, optimizer):
            each.build(variables)

        def scaled_step(variables=variables, held=held, optimizer=optimizer):
            gradients = [tf.convert_to_tensor(h) for h in held]
            optimizer.scale_loss(tf.constant(1.0))
            if contract == "apply":
                optimizer.apply(gradients, variables)
            else:
                gradients = optimizer.get_unscaled_gradients(gradients)
                optimizer.apply_gradients(zip(gradients, variables))

        def bare_step(variables=variables, held=held, bare=bare):
            bare.apply_gradients(zip([tf.convert_to_tensor(h) for h in held], variables))

        added.append(nodes(tf.function(scaled_step)) - nodes(tf.function(bare_step)))
    # Reading what is given to the branch may cost a node for each variable; nothing else may.
    assert added[1] - added[0] <= 20


def conditional(optimizer, size):
    weight = tf.Variable(tf.zeros([size]))
    optimizer.build([weight])
    held = tf.Variable(tf.ones([size]))

    @tf.function
    def step():
        optimizer.apply([tf.convert_to_tensor(held)], [weight])

    graph = step.get_concrete_function().graph
    return [op for op in graph.get_operations() if op.type in ("If", "StatelessIf") and len(op.inputs) > 2]


def test_a_small_step_is_called_as_one_operation_and_a_large_one_works_in_place(monkeypatch):
    attribute = "_lower_using_switch_merge"
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda: ["CPU"])
    (small,) = conditional(LossScaleOptimizer(tf.keras.optimizers.SGD()), 10)
    assert small.get_attr(attribute) is False
    *_, large = conditional(LossScaleOptimizer(tf.keras.optimizers.SGD()), 5_000_000)
    assert large.get_attr(attribute) is True
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda: ["CPU", "GPU"])
    (elsewhere,) = conditional(LossScaleOptimizer(tf.keras.optimizers.SGD()), 10)
    assert elsewhere.get_attr(attribute) is True


def inputs_of(graph, kinds):
    """How many float inputs the operations of some kinds have, those of a graph's functions included."""
    return [
        sum(tensor.dtype.is_floating for tensor in operation.inputs)
        for operation in graph.get_operations()
        if operation.type in kinds
    ]


def step_of(optimizer, weights, strategy=None):
    held = [tf.Variable(tf.ones([4])) for _ in weights]

    def take():
        optimizer.get_scaled_loss(1.0)
        gradients = optimizer.get_unscaled_gradients([tf.convert_to_tensor(h) for h in held])
        optimizer.apply_gradients(zip(gradients, weights))

    return tf.function(take if strategy is None else lambda: strategy.run(take))


def test_replicas_take_the_stack_that_they_summed_into_the_branch_that_applies_it():
    strategy = strategies.get("mirrored_2")
    with strategy.scope():
        weights = [tf.Variable(tf.zeros([4])) for _ in range(10)]
        optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(1.0), initial_scale=2)
        step = step_of(optimizer, weights, strategy)
        step()
    assert weights[0].numpy().tolist() == [-1.0] * 4  # the sum of two halves
    assert inputs_of(step.get_concrete_function().graph, ("If",))[0] == 2  # a stack for each replica


def test_a_compiled_step_takes_each_gradient_as_it_was_before_it_was_stacked_and_the_scale_once():
    weights = [tf.Variable(tf.zeros([4])) for _ in range(10)]
    optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(1.0), initial_scale=2, jit_compile=True)
    step = step_of(optimizer, weights)
    step()
    assert weights[0].numpy().tolist() == [-0.5] * 4
    calls = inputs_of(step.get_concrete_function().graph, ("PartitionedCall", "StatefulPartitionedCall"))
    assert calls == [len(weights) + 1]
