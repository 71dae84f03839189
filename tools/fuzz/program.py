"""Defines a random training program: its variables, optimizer, training loops and steps.

The module must also run on Python 3.8, which old releases of TensorFlow need.
"""

from __future__ import annotations

import dataclasses
import math
import random as random_lib

import numpy as np

# The shapes of a program's variables. The second variable may have sparse gradients. The first and the last variable
# have the same shape, so that a program can exchange their gradients.
SHAPES = ((2,), (4, 3), (), (2,))
#: The number of rows in a sparse gradient.
ROWS = 3
FAMILIES = ("keras3", "tf_keras", "tf_keras_legacy", "tf1", "sonnet")
#: The optimizer families whose optimizers have `iterations`.
COUNTING = FAMILIES[:3]
#: The optimizer families in which a sparse gradient changes the momentum of only the rows that it contains.
LAZY = ("tf_keras_legacy", "tf1", "sonnet")
INNER = ("sgd", "momentum", "adam")
#: The optimizer families whose optimizers have a `use_ema` argument.
AVERAGING = FAMILIES[:2]
#: The ways to run a custom training loop. "mirrored" means under MirroredStrategy.
MODES = ("function", "compiled", "eager", "mirrored")
#: The last is Adam's two decay rates and epsilon.
RATE, MOMENTUM, ADAM = 0.0625, 0.75, (0.5, 0.75, 0.0625)
DTYPES = ("float32", "float16", "bfloat16", "float64")
#: `UNSCALED` and `SCALED` list the ways in which a training loop can call the optimizer. With `UNSCALED`, the optimizer
#: receives unscaled gradients, as in TensorFlow 2. With `SCALED`, it receives scaled gradients, as in Keras 3.
UNSCALED = ("unscaled", "minimize", "compute_gradients", "two_functions")
SCALED = ("apply", "apply_gradients")
#: The elements of `UNSCALED` that TensorFlow 2's own loss scale optimizer also supports.
ORIGINAL_CALLS = ("unscaled", "minimize", "two_functions")
BAD = ("nan", "inf", "-inf", "huge")

# Maps each dtype to the largest loss scale that a program uses. Larger scales have subnormal inverses.
LARGEST_SCALE = {"float32": 2.0**126, "float64": 2.0**126, "bfloat16": 2.0**126, "float16": 2.0**14}


@dataclasses.dataclass(frozen=True)
class Rules:
    """The arguments of a `LossScaleOptimizer`."""

    initial_scale: float = 1024.0
    growth_steps: int = 2
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    hysteresis: int = 1
    min_scale: float = 1.0
    max_scale: float | None = None
    dynamic: bool = True

    def arguments(self):
        """Return the keyword arguments of a loss scale optimizer, without those that only this package has if unset."""
        if not self.dynamic:
            return {"dynamic": False, "initial_scale": self.initial_scale}
        set_here = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name != "growth_steps" and getattr(self, field.name) != field.default
        }
        return {**set_here, "initial_scale": self.initial_scale, "dynamic_growth_steps": self.growth_steps}


@dataclasses.dataclass(frozen=True)
class Loop:
    """A training loop. A program has one or two loops, which train the same variables.

    Args:
        calls: the way in which the loop calls the optimizer, an element of `UNSCALED` or `SCALED`.
        scaled: names of the changes that the loop makes to the gradients of the scaled loss.
        unscaled: names of the changes that the loop makes to the unscaled gradients.
        missing: the index of a variable that the loss does not use, or None if the loss uses all variables.
        sparse: whether the second variable's gradient is sparse.
        place: where to unscale gradients: in a `tf.function` ("function"), in a `tf.cond` ("cond") or directly in the
            loop ("here").
        recompute: whether `tf.recompute_grad` wraps the loss.
        backwards: whether the loop applies the (gradient, variable) pairs in reverse order.
        repeated: whether the step is in a `tf.cond` ("if"), in a `tf.while_loop` ("while") or in neither ("no").
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
    """One step of a training loop.

    Args:
        seed: seed of the random gradients.
        number: an integer with several uses in the step, such as the number of iterations of a `tf.while_loop`.
        bad: an element of `BAD` that replaces one value in the gradients. If None, the gradients stay unchanged.
        loop: the index of the training loop that takes the step.
        before: an action that precedes the step, or None. "checkpoint" and "state" save and restore the state,
            "learning_rate" halves the learning rate, and "config" creates a second optimizer from the first one's
            config.
    """

    seed: int = 0
    number: int = 1
    bad: str | None = None
    loop: int = 0
    before: str | None = None


@dataclasses.dataclass(frozen=True)
class Program:
    """A random training program: variables, an optimizer, training loops and steps."""

    family: str = "tf_keras"
    inner: str = "sgd"
    mode: str = "function"
    dtypes: tuple[str, ...] = ("float32",)
    rules: Rules = dataclasses.field(default_factory=Rules)
    loops: tuple[Loop, ...] = (Loop(),)
    steps: tuple[Step, ...] = (Step(),)
    #: The optimizer's `ema_overwrite_frequency` argument. 0 means never, and None means that there are no moving
    #: averages.
    ema: int | None = None

    @property
    def replicas(self):
        return 2 if self.mode == "mirrored" else 1

    def gradients(self, step):
        """Return the gradients and the sparse gradient's row indices. Axis 0 of each array indexes the replicas."""
        # All versions of Python generate the same numbers from a seed; the versions of NumPy may differ.
        loop, random = self.loops[step.loop], random_lib.Random(step.seed)

        def integers(low, high, *shape):
            drawn = [low + int(random.random() * (high - low)) for _ in range(math.prod(shape))]
            return np.array(drawn).reshape(shape)

        shapes = [(ROWS, 3) if i == 1 and loop.sparse else shape for i, shape in enumerate(SHAPES[: len(self.dtypes)])]
        found = [np.float32(integers(-32, 33, self.replicas, *shape) / 16) for shape in shapes]
        rows = integers(0, 4, self.replicas, ROWS)
        if step.bad:
            used = [gradient for i, gradient in enumerate(found) if i != loop.missing]
            victim = used[integers(0, len(used), 1)[0]]
            victim.flat[integers(0, victim.size, 1)[0]] = self.huge if step.bad == "huge" else np.float32(step.bad)
        return found, rows

    @property
    def huge(self):
        """A gradient value that may overflow when it is scaled, but is too small to make the slots overflow."""
        return 1024.0 if "float16" in self.dtypes else 1e16 if self.inner == "adam" else 1e35
