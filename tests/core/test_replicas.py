"""What the threads of replicas share."""

import contextlib

import tensorflow as tf

from tf_lossscale.core import replicas


class Optimizer:
    rate = 1.0

    def __init__(self, steps=5):
        self.steps = steps


def test_attributes_get_their_first_values_back_when_the_last_of_three_replicas_is_done():
    optimizer = Optimizer()
    with contextlib.ExitStack() as stack:
        for steps in (6, 7, 8):
            stack.enter_context(replicas.overriding(optimizer, steps=steps, rate=2.0))
            assert (optimizer.steps, optimizer.rate) == (steps, 2.0)
    assert vars(optimizer) == {"steps": 5}
    assert optimizer.rate == 1.0


def test_blocks_that_override_different_attributes_of_one_object_can_be_nested():
    optimizer = Optimizer()
    with replicas.overriding(optimizer, rate=2.0):
        with replicas.overriding(optimizer, steps=6):
            assert (optimizer.steps, optimizer.rate) == (6, 2.0)
        assert (optimizer.steps, optimizer.rate) == (5, 2.0)
    assert vars(optimizer) == {"steps": 5}


def test_a_replica_of_the_third_worker_writes_the_copy_of_its_own_worker(monkeypatch):
    variable = tf.Variable(1.0)
    copies = {2: (tf.Variable(2.0), tf.Variable(3.0)), 1: (variable,)}
    strategy = tf.distribute.get_strategy()
    monkeypatch.setattr(tf.distribute, "get_strategy", lambda: strategy)
    for number, replicas_of_a_worker, index in ((4, 2, 0), (5, 2, 1), (2, 1, 0)):
        found = copies[replicas_of_a_worker]
        monkeypatch.setattr(replicas, "replica", lambda number=number: number)
        monkeypatch.setattr(strategy, "experimental_local_results", lambda _, found=found: found)
        monkeypatch.setattr(replicas, "write_independently", lambda: True)
        held = Optimizer(variable)
        with replicas.local_copies(lambda held=held: [(held, "steps")]):
            assert held.steps is found[index]
        assert held.steps is variable
