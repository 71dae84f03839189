"""The main job: LeNet-5 on real handwritten digits in float16, in a custom loop, with and without loss scaling."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import signal
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tf_lossscale import optional
from tf_lossscale.core.rules import Rules
from tf_lossscale.optimizer import LossScaleOptimizer

_BATCH = 64
_OPTIMIZERS = ("adam", "rmsprop", "sgd")


@dataclasses.dataclass
class Settings:
    """What a run is made of; saved beside its checkpoint, so that `--resume` needs no other option.

    >>> Settings().optimizer
    'adam'
    """

    optimizer: str = "adam"
    steps: int = 300
    seed: int = 0
    loss_weight: float = 1e-5
    growth_steps: int = 50
    initial_scale: float = 2.0**30


@dataclasses.dataclass
class Setup:
    """One of the three ways that are compared.

    >>> Setup("float32", "float32", scaled=False).name
    'float32'
    """

    name: str
    policy: str
    scaled: bool


SETUPS = (
    Setup("float32", "float32", scaled=False),
    Setup("float16 without loss scaling", "mixed_float16", scaled=False),
    Setup("float16 with loss scaling", "mixed_float16", scaled=True),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tf-lossscale train`.

    Args:
        parser: gets them.
    """
    usual = Settings()
    parser.add_argument("--optimizer", choices=_OPTIMIZERS, default=usual.optimizer)
    parser.add_argument("--steps", type=_positive, default=usual.steps, help="steps of each run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=usual.seed)
    parser.add_argument(
        "--loss-weight",
        type=float,
        default=usual.loss_weight,
        help="weight of the loss, as it has in a sum of several; small ones make float16 gradients vanish "
        "(default: %(default)s)",
    )
    parser.add_argument("--initial-scale", type=float, default=usual.initial_scale, help="(default: %(default)s)")
    parser.add_argument("--growth-steps", type=_positive, default=usual.growth_steps, help="(default: %(default)s)")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs"), help="folder (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on where a run in the folder was stopped")
    parser.add_argument("--no-compare", action="store_true", help="only the run with loss scaling, no table")


def run(arguments: argparse.Namespace) -> int:
    """Runs `tf-lossscale train`.

    Args:
        arguments: as parsed.

    Returns:
        The exit code.
    """
    out: pathlib.Path = arguments.out
    state = out / "state.json"
    if arguments.resume:
        if not state.exists():
            print(f"tf-lossscale train: nothing to resume in {out}: {state} does not exist.", file=sys.stderr)
            return 2
        settings = Settings(**json.loads(state.read_text())["settings"])
    else:
        names = [field.name for field in dataclasses.fields(Settings)]
        settings = Settings(**{name: getattr(arguments, name) for name in names})
    try:
        Rules(settings.growth_steps).checked()
        out.mkdir(parents=True, exist_ok=True)
        return _train(settings, out, resume=arguments.resume, compare=not arguments.no_compare)
    except (ValueError, ImportError, OSError) as error:
        print(f"tf-lossscale train: {error}", file=sys.stderr)
        return 2


class Digits:
    """scikit-learn's 1797 handwritten digits, scaled up to 32 x 32, in a fixed order of batches.

    Args:
        seed: of the order.
    """

    def __init__(self, seed: int):
        datasets = optional.load("sklearn.datasets", "train")
        images, labels = datasets.load_digits(return_X_y=True)
        images = np.kron(images.reshape(-1, 8, 8) / 16.0, np.ones((4, 4)))[..., np.newaxis].astype("float32")
        labels = labels.astype("int64")
        order = np.random.default_rng(0).permutation(len(labels))
        test, self._train = order[:360], order[360:]
        self._images, self._labels, self._seed = images, labels, seed
        self.test = tf.constant(images[test]), tf.constant(labels[test])

    def batches(self, first: int, last: int) -> Iterator[tuple[tf.Tensor, tf.Tensor]]:
        """Yields the batches of steps `first` to `last` (not included); the same for the same seed."""
        per_epoch = len(self._train) // _BATCH
        for step in range(first, last):
            epoch, within = divmod(step, per_epoch)
            order = np.random.default_rng((self._seed, epoch)).permutation(self._train)
            chosen = order[within * _BATCH : (within + 1) * _BATCH]
            yield tf.constant(self._images[chosen]), tf.constant(self._labels[chosen])


def lenet5(policy: str) -> Any:
    """Returns LeNet-5 for 32 x 32 images, computing as the policy says.

    Args:
        policy: a Keras dtype policy; the logits are float32 in each.

    Returns:
        A Keras model.
    """
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


def _inner_optimizer(settings: Settings) -> Any:
    optimizers = tf.keras.optimizers
    if settings.optimizer == "sgd":
        # SGD's step is as large as the gradient: the weight of the loss is taken out again.
        return optimizers.SGD(0.02 / settings.loss_weight, momentum=0.9)
    # The others divide by the gradient's size; epsilon has to stay below it.
    return {"adam": optimizers.Adam, "rmsprop": optimizers.RMSprop}[settings.optimizer](1e-3, epsilon=1e-16)


class Run:
    """One training run: model, optimizer, the compiled step and what it recorded.

    Args:
        setup: which of the three ways.
        settings: the run's settings.
    """

    def __init__(self, setup: Setup, settings: Settings):
        tf.keras.utils.set_random_seed(settings.seed)
        self.setup = setup
        self.model = lenet5(setup.policy)
        # Without loss scaling is a scale of 1 that never moves: then the step is the bare inner optimizer's.
        scale: dict[str, Any] = {"dynamic": False, "initial_scale": 1}
        if setup.scaled:
            scale = {"initial_scale": settings.initial_scale, "dynamic_growth_steps": settings.growth_steps}
        self.optimizer = LossScaleOptimizer(_inner_optimizer(settings), **scale)
        self.optimizer.build(self.model.trainable_variables)
        self.history: list[list[float]] = []
        self._weight = settings.loss_weight
        self._step = tf.function(self._one_step)

    def _one_step(self, images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        variables = self.model.trainable_variables
        with tf.GradientTape() as tape:
            logits = self.model(images, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
            scaled_loss = self.optimizer.get_scaled_loss(loss * self._weight)
        scaled_gradients = tape.gradient(scaled_loss, variables)
        zeros = tf.add_n([tf.math.count_nonzero(tf.equal(g, 0)) for g in scaled_gradients])
        gradients = self.optimizer.get_unscaled_gradients(scaled_gradients)
        self.optimizer.apply_gradients(zip(gradients, variables))
        return loss, zeros

    def step(self, images: tf.Tensor, labels: tf.Tensor) -> None:
        """Takes one step and records it: loss, scale, whether it was skipped, share of zero gradient values."""
        scale = float(self.optimizer.loss_scale)
        loss, zeros = self._step(images, labels)
        size = sum(int(np.prod(v.shape)) for v in self.model.trainable_variables)
        self.history.append([float(loss), scale, float(self.optimizer.last_step_skipped), float(zeros) / size])

    @property
    def skipped(self) -> int:
        """The number of skipped steps."""
        return int(sum(record[2] for record in self.history))

    def accuracy(self, test: tuple[tf.Tensor, tf.Tensor]) -> float:
        """The share of test digits that are read right."""
        images, labels = test
        return float(np.mean(np.argmax(self.model(images, training=False), axis=-1) == labels.numpy()))


def _train(settings: Settings, out: pathlib.Path, *, resume: bool, compare: bool) -> int:
    tqdm = optional.load("tqdm", "train")
    digits = Digits(settings.seed)
    main = Run(SETUPS[-1], settings)
    checkpoint = tf.train.Checkpoint(model=main.model, optimizer=main.optimizer)
    manager = tf.train.CheckpointManager(checkpoint, str(out / "checkpoint"), max_to_keep=2)
    if resume:
        saved = json.loads((out / "state.json").read_text())
        checkpoint.restore(saved["checkpoint"] and str(out / "checkpoint" / saved["checkpoint"])).assert_consumed()
        main.history = saved["history"]
        print(
            f"resumed at step {len(main.history)} with loss scale {float(main.optimizer.loss_scale):g} "
            f"and counter {int(main.optimizer.dynamic_counter or 0)}"
        )

    stopped = _StopAtStepEnd()
    first = len(main.history)
    with stopped, tqdm.tqdm(total=settings.steps, initial=first, desc="float16, scaled", unit="step") as bar:
        for images, labels in digits.batches(first, settings.steps):
            main.step(images, labels)
            bar.update()
            bar.set_postfix(
                loss=f"{main.history[-1][0]:.3f}", scale=f"{float(main.optimizer.loss_scale):g}", skipped=main.skipped
            )
            if stopped.asked:
                break
    path = manager.save()
    _write(
        out / "state.json",
        json.dumps(
            {
                "settings": dataclasses.asdict(settings),
                "checkpoint": pathlib.Path(path).name,
                "loss_scale": float(main.optimizer.loss_scale),
                "counter": int(main.optimizer.dynamic_counter or 0),
                "history": main.history,
            }
        ),
    )
    if stopped.asked:
        print(
            f"stopped at step {len(main.history)}: the checkpoint is in {out}. Go on with: tf-lossscale train "
            f"--resume --out {out}"
        )
        return 130

    runs = [main]
    if compare:
        others = [Run(setup, settings) for setup in SETUPS[:-1]]
        for other in others:
            for images, labels in tqdm.tqdm(
                digits.batches(0, settings.steps), total=settings.steps, desc=other.setup.name, unit="step"
            ):
                other.step(images, labels)
        runs = [*others, main]
    _print_table(runs, digits, settings)
    plot(main.history, out / "training.png")
    print(f"plot: {out / 'training.png'}")
    return 0


def _print_table(runs: list[Run], digits: Digits, settings: Settings) -> None:
    console, table = optional.load("rich.console", "train").Console(), optional.load("rich.table", "train")
    rows = table.Table(title=f"LeNet-5, {settings.optimizer}, {settings.steps} steps, loss x {settings.loss_weight:g}")
    for name in ("", "test accuracy", "skipped steps", "gradient values that are zero"):
        rows.add_column(name, justify="right" if name else "left")
    for each in runs:
        zeros = np.mean([record[3] for record in each.history if not record[2]])
        rows.add_row(each.setup.name, f"{each.accuracy(digits.test):.1%}", str(each.skipped), f"{zeros:.1%}")
    console.print(rows)


def plot(history: list[list[float]], path: pathlib.Path) -> None:
    """Draws loss and loss scale over the steps, with the skipped steps marked.

    Args:
        history: a record for each step: loss, scale, whether it was skipped, and more.
        path: the PNG to write.
    """
    figure_module = optional.load("matplotlib.figure", "train")
    steps = np.arange(len(history))
    loss, scale, skipped = (np.array([record[i] for record in history]) for i in range(3))
    figure = figure_module.Figure(figsize=(9, 5), layout="constrained")
    above, below = figure.subplots(2, sharex=True)
    above.plot(steps, loss, color="tab:blue", linewidth=1)
    above.set_ylabel("loss")
    below.step(steps, scale, where="post", color="tab:orange")
    below.set_yscale("log", base=2)
    below.set_ylabel("loss scale")
    below.set_xlabel("step")
    bad = steps[skipped > 0]
    for axes, values in ((above, loss), (below, scale)):
        axes.plot(bad, values[bad], "x", color="tab:red", label=f"{len(bad)} skipped steps")
        axes.grid(alpha=0.3)
        axes.legend(loc="upper right")
    temporary = path.with_suffix(".tmp.png")
    figure.savefig(temporary, dpi=120)
    os.replace(temporary, path)


class _StopAtStepEnd:
    """While active, Ctrl-C asks for a stop after the step in progress; a second one stops at once."""

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> _StopAtStepEnd:
        self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(self, *error: Any) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _ask(self, number: int, frame: Any) -> None:
        del number, frame
        self.asked = True
        signal.signal(signal.SIGINT, self._before)


def _write(path: pathlib.Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, but got: {text}")
    return value
