"""The definition of a program: variables, an optimizer, loops and steps.

The module runs on Python 3.8, too, because old releases of TensorFlow need it.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from fuzz.model import Rules

# The shapes of the variables. The second variable may have sparse gradients. The first and the last variable have the
# same shape, so that a change can exchange their gradients.
SHAPES = ((2,), (4, 3), (), (2,))
#: The number of rows of a sparse gradient.
ROWS = 3
FAMILIES = ("keras3", "tf_keras", "tf_keras_legacy", "tf1", "sonnet")
#: The families in which a sparse gradient updates the momentum of its own rows alone.
LAZY = ("tf_keras_legacy", "tf1", "sonnet")
INNER = ("sgd", "momentum", "adam")
#: The families whose optimizers have the argument `use_ema`.
AVERAGING = FAMILIES[:2]
#: The modes of a custom training loop.
MODES = ("function", "compiled", "eager", "mirrored")
#: For each mode of a library's loop, the families that it works with.
LIBRARY_MODES = {
    "fit": FAMILIES[:3],
    "fit_compiled": FAMILIES[:3],
    "probability": FAMILIES,
    "session": ("tf_keras_legacy", "tf1"),
}
RATE, MOMENTUM, ADAM = 0.0625, 0.75, {"beta_1": 0.5, "beta_2": 0.75, "epsilon": 0.0625}
DTYPES = ("float32", "float16", "bfloat16", "float64")
#: The calls of a loop. With those of UNSCALED, TensorFlow 2's, the optimizer gets unscaled gradients. With those of
#: SCALED, Keras 3's, the optimizer itself unscales the gradients.
UNSCALED = ("unscaled", "minimize", "compute_gradients", "two_functions")
SCALED = ("apply", "apply_gradients")
#: The calls of UNSCALED that TensorFlow 2's wrapper has, too.
ORIGINAL_CALLS = ("unscaled", "minimize", "two_functions")
BAD = ("nan", "inf", "-inf", "huge")

# Larger scales make the wrapper's arithmetic inexact: the inverse of 2**126 is the smallest normal float32 number.
LARGEST_SCALE = {"float32": 2.0**126, "float64": 2.0**126, "bfloat16": 2.0**126, "float16": 2.0**14}


@dataclasses.dataclass(frozen=True)
class Loop:
    """A training step; a program has one or two of them, over the same variables.

    Args:
        calls: an element of UNSCALED or SCALED.
        scaled: names of changes to the gradients of the scaled loss.
        unscaled: names of changes to the unscaled gradients.
        missing: the variable that the loss does not use, or None.
        sparse: whether the second variable's gradient is sparse.
        place: where the loop unscales gradients: "here", in a "function" or in a "cond".
        recompute: whether the loss is in `tf.recompute_grad`.
        backwards: whether the loop applies the pairs in reverse order.
        repeated: "no", "if" (the step is in a `tf.cond`) or "while" (in a `tf.while_loop`).
    """

    calls: str = "unscaled"
    scaled: tuple[str, ...] = ()
    unscaled: tuple[str, ...] = ()
    missing: int | None = None
    sparse: bool = False
    place: str = "here"
    recompute: bool = False
    backwards: bool = False
    repeated: str = "no"


@dataclasses.dataclass(frozen=True)
class Step:
    """One call of a loop.

    Args:
        seed: seed of the gradients.
        number: an integer that parts of the step use, for example as the number of iterations of a `tf.while_loop`.
        bad: an element of BAD, which replaces one value of the gradients, or None.
        loop: the index of the program's loop that takes the step.
        before: an action before the step, or None. "checkpoint" and "state" save and restore, "learning_rate" halves
            the learning rate, and "config" makes a second wrapper from the config of the first.
    """

    seed: int = 0
    number: int = 1
    bad: str | None = None
    loop: int = 0
    before: str | None = None


@dataclasses.dataclass(frozen=True)
class Program:
    """A random training program: variables, an optimizer, loops and steps."""

    family: str = "tf_keras"
    inner: str = "sgd"
    mode: str = "function"
    dtypes: tuple[str, ...] = ("float32",)
    rules: Rules = dataclasses.field(default_factory=Rules)
    loops: tuple[Loop, ...] = (Loop(),)
    steps: tuple[Step, ...] = (Step(),)
    #: `steps_per_execution` of `fit`.
    at_once: int = 1
    #: `ema_overwrite_frequency` of the moving averages, with 0 for never; None for no averages.
    ema: int | None = None
    #: The wrapper's argument `jit_compile`.
    jit_compile: bool = False

    @property
    def replicas(self):
        return 2 if self.mode == "mirrored" else 1

    def gradients(self, step):
        """Return the gradients of the unscaled loss and the rows of the sparse one; axis 0 is the replica."""
        loop, random = self.loops[step.loop], np.random.default_rng(step.seed)
        shapes = [(ROWS, 3) if i == 1 and loop.sparse else shape for i, shape in enumerate(SHAPES[: len(self.dtypes)])]
        found = [np.float32(random.integers(-32, 33, (self.replicas, *shape)) / 16) for shape in shapes]
        rows = random.integers(0, 4, (self.replicas, ROWS))
        if step.bad:
            used = [gradient for i, gradient in enumerate(found) if i != loop.missing]
            victim = used[random.integers(len(used))]
            victim.flat[random.integers(victim.size)] = self.huge if step.bad == "huge" else np.float32(step.bad)
        return found, rows

    @property
    def huge(self):
        """A gradient value that overflows when it is scaled, but not in the optimizer's slots."""
        return 1024.0 if "float16" in self.dtypes else 1e16 if self.inner == "adam" else 1e35
