"""Two optimizers with a loss scale each, over replicas: the loop of a GAN, where one network overflows."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from tests import strategies
from tests.cases import combinations
from tests.families import FAMILIES
from tf_lossscale import LossScaleOptimizer

pytestmark = pytest.mark.skipif(strategies.ROLE is not None, reason="needs the virtual CPUs of a process that is alone")

START = [2.0**8, 2.0**12]
GOOD = np.ones((2, 2))


class Gan:
    """Two networks of one weight each, trained at once on two replicas; each has its own scale."""

    def __init__(self, family, loop):
        self.strategy = strategies.get("mirrored_2")
        with self.strategy.scope():
            self.weights = [tf.Variable([1.0, -2.0]), tf.Variable([0.5, 0.25])]
            self.optimizers = [
                LossScaleOptimizer(family.adam(), initial_scale=scale, dynamic_growth_steps=3) for scale in START
            ]
        factors = tf.TensorSpec([None, 2, 2], tf.float32)
        self._loop = tf.function(self._steps, input_signature=[factors]) if loop else self._steps

    def train(self, *factors):
        """Takes a step for each factor: factor[i, j] is what the loss of network i on replica j is multiplied by."""
        self._loop(tf.constant(factors, tf.float32))

    def _steps(self, factors):
        for each in factors:
            self.strategy.run(self._replica, args=(each,))

    def _replica(self, factors):
        generator, discriminator = self.weights
        with tf.GradientTape(persistent=True) as tape:
            losses = tf.reduce_sum((generator * discriminator - 1.0) ** 2), tf.reduce_sum(generator * discriminator**2)
            scaled = [
                optimizer.get_scaled_loss(loss * strategies.mine(factor))
                for optimizer, loss, factor in zip(self.optimizers, losses, tf.unstack(factors))
            ]
        for weight, optimizer, loss in zip(self.weights, self.optimizers, scaled):
            gradients = optimizer.get_unscaled_gradients(tape.gradient(loss, [weight]))
            optimizer.apply_gradients(zip(gradients, [weight]))

    def state(self, i):
        """The weight and the slots of network i, the same on both replicas."""
        found = [strategies.copies(each, self.strategy) for each in (self.weights[i], *self.optimizers[i].weights)]
        assert all(first == second for first, second in found), found
        return [first for first, _ in found]

    def read(self, name):
        return [optimizer.state()[name] for optimizer in self.optimizers]


@functools.cache
def after_two_good_steps(family, loop):
    """The states of the two networks when nothing overflowed."""
    gan = Gan(family, loop)
    gan.train(GOOD)
    gan.train(GOOD)
    return gan.state(0), gan.state(1)


@pytest.mark.parametrize(
    ("family", "loop", "which", "bad"),
    combinations(
        [*(pytest.param(family, True, id=family.name) for family in FAMILIES), (FAMILIES[0], False)],
        [pytest.param(0, np.inf, id="generator"), pytest.param(1, np.nan, id="discriminator")],
        usual=["keras3-discriminator"],
    ),
)
def test_an_overflow_of_one_network_on_the_second_replica_skips_that_network_alone(family, loop, which, bad):
    gan, other = Gan(family, loop), 1 - which
    overflow = GOOD.copy()
    overflow[which, 1] = bad
    gan.train(GOOD)
    before = gan.state(which)
    gan.train(overflow)
    assert [new for new in gan.state(which) if not isinstance(new, int)] == [
        old
        for old in before
        if not isinstance(old, int)  # the count of steps
    ]
    assert gan.state(other) == after_two_good_steps(family, loop)[other]
    halved = [scale / 2 if i == which else scale for i, scale in enumerate(START)]
    assert (gan.read("skipped_steps"), gan.read("loss_scale")) == ([which == 0, which == 1], halved)
    gan.train(GOOD, GOOD)
    # The other's third and fourth finite step: its scale has grown once, by its own counter.
    assert gan.read("loss_scale") == [scale * (1 if i == which else 2) for i, scale in enumerate(halved)]
    assert gan.read("dynamic_counter") == [2 if i == which else 1 for i in (0, 1)]
    assert [strategies.copies(optimizer.iterations, gan.strategy) for optimizer in gan.optimizers] == [[4, 4]] * 2
