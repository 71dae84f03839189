"""Trains LeNet-5 on handwritten digits in float32, and in float16 with and without loss scaling.

    python examples/float16_demo.py [--steps 300] [--out runs] [--resume]

The digits are the 1797 that scikit-learn contains. The loss is multiplied by a small weight, as if it were one of
several in a weighted sum, so in float16 many gradients become zero unless the loss is scaled. Prints a table of the
three runs, and draws the run with loss scaling to OUT/training.png. Ctrl-C saves a checkpoint; with --resume the same
command continues from there, with the same loss scale and the same count of finite steps.
"""

import argparse
import pathlib

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from tqdm import tqdm

import tf_lossscale
from tf_lossscale import diagnosis

BATCH, TEST_IMAGES = 64, 360
LOSS_WEIGHT = 1e-5
# Without loss scaling, the wrapper has a fixed scale of 1, so its steps equal the inner optimizer's. The initial scale
# of 2**30 is deliberately too high: the first steps overflow and lower it.
UNSCALED = {"dynamic": False, "initial_scale": 1}
SCALED = {"initial_scale": 2**30, "dynamic_growth_steps": 50}
RUNS = {
    "float32": ("float32", UNSCALED),
    "float16 without scaling": ("mixed_float16", UNSCALED),
    "float16 with scaling": ("mixed_float16", SCALED),
}
COLUMNS = ("loss", "loss_scale", "skipped", "zeros")


def digits():
    """Return the training and the test digits, each as (images, labels). The images are 32 x 32 pixels."""
    images, labels = load_digits(return_X_y=True)
    images = np.kron(images.reshape(-1, 8, 8) / 16.0, np.ones((4, 4)))[..., np.newaxis].astype("float32")
    order = np.random.default_rng(0).permutation(len(labels))
    return [(images[part], labels[part].astype("int64")) for part in (order[TEST_IMAGES:], order[:TEST_IMAGES])]


def batches(data, first, last):
    """Yield the batches of the steps `first` to `last - 1`. A batch depends only on its step, so runs can resume."""
    images, labels = data
    per_epoch = len(labels) // BATCH
    for step in range(first, last):
        epoch, within = divmod(step, per_epoch)
        chosen = np.random.default_rng((0, epoch)).permutation(len(labels))[within * BATCH : (within + 1) * BATCH]
        yield tf.constant(images[chosen]), tf.constant(labels[chosen])


def lenet5(policy):
    """Return LeNet-5 for 32 x 32 images, with a dtype policy for its layers. The logits are always float32."""
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            tf.keras.Input((32, 32, 1)),
            layers.Conv2D(6, 5, activation="relu", dtype=policy),
            layers.AveragePooling2D(2, dtype=policy),
            layers.Conv2D(16, 5, activation="relu", dtype=policy),
            layers.AveragePooling2D(2, dtype=policy),
            layers.Flatten(dtype=policy),
            layers.Dense(120, activation="relu", dtype=policy),
            layers.Dense(84, activation="relu", dtype=policy),
            layers.Dense(10, dtype=policy),
            layers.Activation("linear", dtype="float32"),
        ]
    )


def train(name, data, steps, out, resume):
    """Train one of the runs. Return the model, the values of each step, and the precision reports of every 5th step."""
    policy, scaling = RUNS[name]
    tf.keras.utils.set_random_seed(0)
    model = lenet5(policy)
    # Adam divides by the gradient's magnitude, so epsilon must be smaller than that magnitude.
    adam = tf.keras.optimizers.Adam(1e-3, epsilon=1e-16)
    optimizer = tf_lossscale.LossScaleOptimizer(adam, **scaling)
    optimizer.build(model.trainable_variables)
    taken, values = tf.Variable(0, dtype=tf.int64), tf.Variable(tf.zeros([steps, len(COLUMNS)]))
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, taken=taken, values=values)
    manager = tf.train.CheckpointManager(checkpoint, out / name.replace(" ", "_"), max_to_keep=1)
    if resume:
        manager.restore_or_initialize()

    # Ctrl-C takes effect between two calls of this function. It must not separate a step from the step's record.
    @tf.function
    def train_step(images, labels):
        scale = optimizer.loss_scale
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
            scaled_loss = optimizer.get_scaled_loss(loss * LOSS_WEIGHT)
        scaled_gradients = tape.gradient(scaled_loss, model.trainable_variables)
        zeros = tf.concat([tf.reshape(tf.equal(gradient, 0), [-1]) for gradient in scaled_gradients], axis=0)
        gradients = optimizer.get_unscaled_gradients(scaled_gradients)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        skipped = tf.cast(optimizer.last_step_skipped, tf.float32)
        record = tf.stack([loss, scale, skipped, tf.reduce_mean(tf.cast(zeros, tf.float32))])
        values.scatter_nd_update([[taken]], [record])
        taken.assign_add(1)
        return diagnosis.exponent_counts(scaled_gradients)

    paths = [variable.path for variable in model.trainable_variables]
    first, reports = int(taken), []
    with tqdm(batches(data, first, steps), name, initial=first, total=steps, dynamic_ncols=True) as progress:
        try:
            for batch in progress:
                counts = train_step(*batch)
                loss, scale, *_ = values[int(taken) - 1].numpy()
                progress.set_postfix(loss=f"{loss:.3f}", scale=f"{scale:g}")
                if (int(taken) - first) % 5 == 1:
                    reports.append(diagnosis.precision_report(counts, paths, scale, int(taken)))
        except KeyboardInterrupt:
            raise SystemExit(f"\nStopped after {int(taken)} of {steps} steps. To continue, add --resume.") from None
        finally:
            manager.save(checkpoint_number=int(taken))
    return model, dict(zip(COLUMNS, values.numpy().T)), reports


def history(values):
    """Return the values of a run's steps in the form that `diagnosis.plot` takes."""
    return {"loss": values["loss"], "loss_scale": values["loss_scale"], "skipped_steps": values["skipped"].cumsum()}


def main(arguments=None):
    """Train all three runs, print the table, and draw the picture. Return the test accuracies."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="steps of each run (default: %(default)s)")
    parser.add_argument("--out", type=pathlib.Path, default="runs", help="folder (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="continue the runs in the folder; use the same --steps")
    options = parser.parse_args(arguments)

    training, (test_images, test_labels) = digits()
    accuracies, table = {}, [("", "test accuracy", "skipped steps", "zero gradients")]
    for name in RUNS:
        model, values, reports = train(name, training, options.steps, options.out, options.resume)
        accuracies[name] = np.mean(np.argmax(model(test_images, training=False), axis=-1) == test_labels)
        zeros = values["zeros"][values["skipped"] == 0]
        row = (f"{accuracies[name]:.1%}", f"{values['skipped'].sum():.0f}", f"{zeros.mean() if zeros.size else 1:.1%}")
        table.append((name, *row))
    for name, *row in table:
        print(f"{name:24}", *(f"{cell:>14}" for cell in row))
    diagnosis.plot(reports, history(values)).savefig(options.out / "training.png")
    print(f"The loss, the loss scale and the gradients' exponents are drawn in {options.out / 'training.png'}.")
    return accuracies


if __name__ == "__main__":
    main()
