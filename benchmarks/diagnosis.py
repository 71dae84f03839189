"""What `diagnose=True` costs in a training step: LeNet-5 in mixed_float16, off and on in turn.

    python benchmarks/diagnosis.py [--steps 300]

Prints the median time of a step of each, and the ratio of the two; measured in turns, so that both meet the same load.
"""

import argparse
import statistics
import time

import tensorflow as tf

from tf_lossscale import LossScaleOptimizer
from tf_lossscale.training.lenet import Digits, lenet5


def make_step(diagnose):
    tf.keras.utils.set_random_seed(0)
    model = lenet5("mixed_float16")
    optimizer = LossScaleOptimizer(tf.keras.optimizers.Adam(1e-3), diagnose=diagnose)

    @tf.function
    def step(images, labels):
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
            scaled = optimizer.get_scaled_loss(loss)
        gradients = optimizer.get_unscaled_gradients(tape.gradient(scaled, model.trainable_variables))
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    return step


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    times = {False: [], True: []}
    functions = {diagnose: make_step(diagnose) for diagnose in times}
    for i, batch in enumerate(Digits(0).batches(0, steps)):
        for diagnose in (False, True) if i % 2 else (True, False):
            start = time.perf_counter()
            functions[diagnose](*batch).numpy()
            if i >= 10:
                times[diagnose].append(time.perf_counter() - start)
    off, on = (statistics.median(times[diagnose]) for diagnose in (False, True))
    ratio = statistics.median(b / a for a, b in zip(times[False], times[True]))
    print(f"off {off * 1e3:.2f} ms, on {on * 1e3:.2f} ms, ratio {ratio:.3f}")


if __name__ == "__main__":
    main()
