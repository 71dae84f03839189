"""What is made and dropped leaves nothing of this package behind: no wrapper, loss scale, contract or traced graph."""

import collections
import gc

import pytest
import tensorflow as tf

from tests import loops
from tests.cases import MODES, combinations
from tests.families import ALL_FAMILIES
from tf_lossscale import LossScale, LossScaleOptimizer
from tf_lossscale.wrapper.contract import Contract
from tf_lossscale.wrapper.family import Family

OURS = (LossScale, LossScaleOptimizer, Contract, Family, tf.__internal__.FuncGraph)


def alive():
    for _ in range(3):
        gc.collect()
    # `type` is asked, because `isinstance` runs code of lazy objects of other libraries.
    return collections.Counter(cls.__name__ for each in gc.get_objects() for cls in OURS if issubclass(type(each), cls))


@pytest.mark.parametrize(("family", "compiled"), combinations(ALL_FAMILIES, MODES, usual=["keras3-function"]))
def test_wrappers_and_traced_steps_are_freed(family, compiled):
    def make_and_drop():
        weight, optimizer = tf.Variable(1.0), LossScaleOptimizer(family.sgd())

        def step():
            loops.step(optimizer, lambda: weight**2, [weight])

        (tf.function(step) if compiled else step)()

    make_and_drop()
    before = alive()
    for _ in range(10):
        make_and_drop()
    assert alive() - before == {}
