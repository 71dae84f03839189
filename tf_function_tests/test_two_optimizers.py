"""Two optimizers with a loss scale each, over replicas: the loop of a GAN, where one network overflows."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from tests import strategies
from tests.families import FAMILIES, IDS
from tf_lossscale import LossScaleOptimizer

pytestmark = pytest.mark.skipif(strategies.ROLE is not None, reason="needs the virtual CPUs of a process that is alone")

GROWTH = 3
GOOD = np.ones((2, 2))


class Gan:
    """A generator and a discriminator of one layer each, trained at once on two replicas; each has its own scale."""

    def __init__(self, family, loop):
        self.strategy = strategies.get("mirrored_2")
        dense = family.keras.layers.Dense
        with self.strategy.scope():
            self.networks = [
                family.keras.Sequential([family.keras.Input((2,)), dense(outputs, kernel_initializer="ones")])
                for outputs in (2, 1)
            ]
            self.optimizers = [
                LossScaleOptimizer(family.adam(), initial_scale=scale, dynamic_growth_steps=GROWTH)
                for scale in (2.0**8, 2.0**12)
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
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        generator, discriminator = self.networks
        real = tf.constant([[1.0, -1.0], [0.5, 0.25]])
        with tf.GradientTape(persistent=True) as tape:
            of_real, of_fake = discriminator(real), discriminator(generator(real + 0.5))
            losses = tf.reduce_mean((of_fake - 1.0) ** 2), tf.reduce_mean((of_real - 1.0) ** 2 + of_fake**2)
            scaled = [
                optimizer.get_scaled_loss(loss * tf.gather(factor, replica))
                for optimizer, loss, factor in zip(self.optimizers, losses, tf.unstack(factors))
            ]
        for network, optimizer, loss in zip(self.networks, self.optimizers, scaled):
            gradients = optimizer.get_unscaled_gradients(tape.gradient(loss, network.trainable_variables))
            optimizer.apply_gradients(zip(gradients, network.trainable_variables))

    def copies(self, variable):
        if not isinstance(variable, (tf.Variable, tf.distribute.DistributedValues)):
            variable = variable.value
        return [copy.numpy() for copy in self.strategy.experimental_local_results(variable)]

    def state(self, i):
        """The weights and slots of network i, the same on all replicas."""
        found = []
        for variable in (*self.networks[i].trainable_variables, *self.optimizers[i].weights):
            first, second = self.copies(variable)
            np.testing.assert_array_equal(first, second)
            found.append(first)
        return found

    def scales(self):
        return [float(optimizer.loss_scale) for optimizer in self.optimizers]

    def skipped(self):
        return [optimizer.state()["skipped_steps"] for optimizer in self.optimizers]


@functools.cache
def after_two_good_steps(family, loop):
    """The states of the two networks when nothing overflowed."""
    gan = Gan(family, loop)
    gan.train(GOOD)
    gan.train(GOOD)
    return gan.state(0), gan.state(1)


@pytest.mark.table("keras3-discriminator", every=7)
@pytest.mark.parametrize(("which", "bad"), [(0, np.inf), (1, np.nan)], ids=["generator", "discriminator"])
@pytest.mark.parametrize(
    ("family", "loop"), [(family, True) for family in FAMILIES] + [(FAMILIES[0], False)], ids=[*IDS, f"{IDS[0]}-eager"]
)
def test_an_overflow_of_one_network_on_the_second_replica_skips_that_network_alone(family, loop, which, bad):
    gan = Gan(family, loop)
    overflow = GOOD.copy()
    overflow[which, 1] = bad
    gan.train(GOOD)
    before = gan.state(which)
    gan.train(overflow)

    other = 1 - which
    for old, new in zip(before, gan.state(which)):
        if new.dtype != np.int64:  # the count of steps
            np.testing.assert_array_equal(old, new)
    for new, expected in zip(gan.state(other), after_two_good_steps(family, loop)[other]):
        np.testing.assert_array_equal(new, expected)
    assert gan.skipped() == [int(which == 0), int(which == 1)]
    start = [2.0**8, 2.0**12]
    assert gan.scales() == [start[i] / 2 if i == which else start[i] for i in (0, 1)]
    gan.train(GOOD, GOOD)
    # The other's third and fourth finite step: its scale has grown once, by its own counter.
    assert gan.scales() == [start[i] / 2 if i == which else start[i] * 2 for i in (0, 1)]
    assert [optimizer.state()["dynamic_counter"] for optimizer in gan.optimizers] == [
        2 if i == which else 1 for i in (0, 1)
    ]
    assert [gan.copies(optimizer.iterations) for optimizer in gan.optimizers] == [[4, 4]] * 2
    assert all(np.isfinite(value).all() for i in (0, 1) for value in gan.state(i))
