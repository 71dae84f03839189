"""What the threads of replicas share."""

import contextlib

from tf_lossscale.core import replicas


class Optimizer:
    rate = 1.0


def test_attributes_get_their_first_values_back_when_the_last_of_three_replicas_is_done():
    optimizer = Optimizer()
    optimizer.steps = 5
    before = dict(vars(optimizer))
    with contextlib.ExitStack() as stack:
        for steps in (6, 7, 8):
            stack.enter_context(replicas.overriding(optimizer, steps=steps, rate=2.0))
            assert (optimizer.steps, optimizer.rate) == (steps, 2.0)
    assert vars(optimizer) == before
    assert optimizer.rate == 1.0
