"""Operations to wait for, and where they run in the order in which they are written."""

import pytest
import tensorflow as tf

from tests import strategies
from tf_lossscale.core import graphs, variables
from tf_lossscale.core.variables import Variables, tell_of_new


@pytest.mark.skipif(strategies.ROLE is not None, reason="needs the virtual CPUs of a process that is alone")
def test_the_operations_of_every_replica_are_found():
    with tf.Graph().as_default():
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice())
        with strategy.scope():
            tensors = strategy.run(lambda: tf.zeros([]))
            steps = strategy.run(tf.no_op)
            found = graphs.operations([tensors, steps])
    assert len(found) == 4
    assert [operation.type for operation in found[2:]] == ["NoOp", "NoOp"]


def test_only_a_legacy_graph_and_its_branches_run_out_of_order():
    orders = []

    def branch():
        orders.append(graphs.runs_in_order())
        return tf.constant(0)

    with tf.Graph().as_default():
        orders.append(graphs.runs_in_order())
        tf.cond(tf.constant(True), branch, branch)
        tf.function(branch)()
    tf.function(branch)()
    assert orders == [False, False, False, True, True]


def test_functions_that_xla_compiles_are_known_with_their_branches_and_the_functions_that_they_call():
    inside = []

    def ask():
        inside.append(graphs.in_xla_context())
        return tf.constant(0)

    def all_ways():
        ask()
        tf.cond(tf.constant(True), ask, ask)
        return tf.function(ask)()

    ask()
    tf.function(all_ways)()
    assert set(inside) == {False}
    inside.clear()
    tf.function(all_ways, jit_compile=True)()
    assert set(inside) == {True} and len(inside) == 4


def test_who_asks_for_variables_is_told_of_old_and_of_new_ones():
    weights, told = Variables("counts"), []
    with tf.Graph().as_default():
        old = weights._variable_named("old", 0, tf.int64)
        tell_of_new(told.append)
        new = weights._variable_named("new", 0, tf.int64)
        weights._variable_named("new", 0, tf.int64)
        assert any(each is old for each in told)
        assert [each is new for each in told].count(True) == 1
        assert told[-1] is new
    variables._listeners.remove(told.append)
