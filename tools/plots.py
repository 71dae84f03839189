"""Draws the plots of the docs and the README: `python -m tools.plots [FOLDER]`; docs/images by default."""

import argparse
import pathlib
import runpy
import tempfile

import matplotlib
import numpy as np
import sklearn.datasets
import tensorflow as tf
from matplotlib.figure import Figure

import tf_lossscale

STYLE = {"svg.hashsalt": "tf-lossscale", "font.size": 9, "figure.figsize": (7, 3)}
WEIGHT = 1e-5  # of the loss, as one of several in a sum may have
IMAGES = pathlib.Path(__file__).parents[1] / "docs" / "images"


def network():
    """Three layers for the 8 x 8 digits of scikit-learn; the hidden ones compute in float16."""
    tf.keras.utils.set_random_seed(0)
    layers, half = tf.keras.layers, "mixed_float16"
    return tf.keras.Sequential(
        [
            tf.keras.Input((64,)),
            layers.Dense(128, activation="relu", dtype=half),
            layers.Dense(128, activation="relu", dtype=half),
            layers.Dense(10, dtype=half),
            layers.Activation("linear", dtype="float32"),
        ]
    )


def digits():
    """256 images and their labels."""
    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    return (images[:256] / 16.0).astype("float32"), labels[:256]


def loss_of(model, images, labels):
    """The cross-entropy, with its small weight."""
    logits = model(images, training=True)
    return WEIGHT * tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))


def gradients(scale):
    """All gradients as they are in float16, those of the loss times the scale."""
    model, (images, labels) = network(), digits()
    with tf.GradientTape() as tape:
        loss = loss_of(model, images, labels) * scale
    return np.concatenate([np.ravel(g) for g in tape.gradient(loss, model.trainable_variables)])


def draw_gradients(path):
    """Draws how large gradients are, without and with a scale; returns the shares that are zero."""
    figure = Figure(layout="constrained")
    axes = figure.subplots()
    zeros = {}
    for name, scale in (("without a scale", 1.0), ("with a scale of 2**15", 2.0**15)):
        values = gradients(scale)
        zeros[name] = float(np.mean(values == 0))
        exponents = np.log2(np.abs(values[values != 0]))
        label = f"{name}: {zeros[name]:.0%} are zero"
        axes.hist(exponents, bins=np.arange(-30, 8), alpha=0.6, label=label)
    axes.axvline(-24, color="black", linestyle=":", label="smallest number of float16")
    axes.set(xlabel="log2 of the gradient's magnitude", ylabel="number of values")
    axes.legend()
    figure.savefig(path, metadata={"Date": None})
    return zeros


def draw_scale(path, steps=300):
    """Draws the loss scale over a run that begins too high and grows often; returns the number of skipped steps."""
    model, (images, labels) = network(), digits()
    optimizer = tf_lossscale.LossScaleOptimizer(
        tf.keras.optimizers.SGD(0.1), initial_scale=2**40, dynamic_growth_steps=40
    )

    @tf.function
    def step():
        optimizer.minimize(lambda: loss_of(model, images, labels), lambda: model.trainable_variables)

    scales, skipped = [], []
    for i in range(steps):
        scales.append(float(optimizer.loss_scale))
        step()
        if optimizer.last_step_skipped:
            skipped.append(i)
    figure = Figure(layout="constrained")
    axes = figure.subplots()
    axes.step(range(steps), np.log2(scales), where="post", label="loss scale")
    axes.plot(skipped, np.log2(scales)[skipped], "x", color="tab:red", label=f"{len(skipped)} skipped steps")
    axes.set(xlabel="step", ylabel="log2 of the scale")
    axes.legend()
    figure.savefig(path, metadata={"Date": None})
    return len(skipped)


def draw_demo(folder, steps=300):
    """Draws the pictures of the demo: its run with loss scaling, and the last counts of each variable's exponents.

    Returns the number of skipped steps, and the number of steps whose gradients were counted.
    """
    demo = runpy.run_path(str(pathlib.Path(__file__).parents[1] / "examples" / "float16_demo.py"))
    training, _ = demo["digits"]()
    with tempfile.TemporaryDirectory() as out:
        _, values, reports = demo["train"]("float16 with scaling", training, steps, pathlib.Path(out), resume=False)
    history = demo["history"](values)
    for name, figure in (
        ("training", tf_lossscale.diagnosis.plot(reports, history)),
        ("exponents", tf_lossscale.diagnosis.plot(reports[-1])),
    ):
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
    return int(values["skipped"].sum()), len(reports)


def main(arguments=None):
    """Draws all; returns the shares of zeros and the number of skipped steps, and the numbers of the demo."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=pathlib.Path, default=IMAGES)
    folder = parser.parse_args(arguments).folder
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        return draw_gradients(folder / "gradients.svg"), draw_scale(folder / "scale.svg"), draw_demo(folder)


if __name__ == "__main__":
    print(main())
