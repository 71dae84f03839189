"""The definition of a random program, and Hypothesis strategies that generate programs."""

import dataclasses

import hypothesis.strategies as st
import numpy as np

from fuzz.changes import CHANGES
from fuzz.model import Rules

SHAPES = ((2,), (4, 3), (), (2,))  # the second may have sparse gradients; the first and the last are equal
ROWS = 3  # number of rows of a sparse gradient
FAMILIES = ("keras3", "tf_keras", "tf_keras_legacy", "tf1", "sonnet")
LAZY = ("tf_keras_legacy", "tf1", "sonnet")  # update the momentum of rows with a gradient only
INNER = ("sgd", "momentum", "adam")
AVERAGING = FAMILIES[:2]  # their optimizers have `use_ema`
MODES = ("function", "compiled", "eager", "mirrored")  # of a custom loop; those of a library's loop:
LIBRARY_MODES = {
    "fit": FAMILIES[:3],
    "fit_compiled": FAMILIES[:3],
    "probability": FAMILIES,
    "session": ("tf_keras_legacy", "tf1"),
}
RATE, MOMENTUM, ADAM = 0.0625, 0.75, {"beta_1": 0.5, "beta_2": 0.75, "epsilon": 0.0625}
DTYPES = ("float32", "float16", "bfloat16", "float64")
#: The calls by which a loop scales, unscales and applies: TensorFlow 2's contract, then Keras 3's.
UNSCALED = ("unscaled", "minimize", "compute_gradients", "two_functions")
SCALED = ("apply", "apply_gradients")
BAD = ("nan", "inf", "-inf", "huge")

# Up to these scales the wrapper's arithmetic is exact to the last bits: 2**-126 is the smallest normal float32 number.
LARGEST_SCALE = {"float32": 2.0**126, "float64": 2.0**126, "bfloat16": 2.0**126, "float16": 2.0**14}


@dataclasses.dataclass(frozen=True)
class Loop:
    """A training step; a program has one or two of them, over the same variables.

    Args:
        calls: one of UNSCALED or SCALED.
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
        number: an argument of the changes and of `Loop.repeated`.
        bad: one of BAD, which replaces one value of the gradients, or None.
        loop: the index of the program's loop that takes the step.
        before: "checkpoint" or "state", to save and restore it before the step, or None.
    """

    seed: int = 0
    number: int = 1
    bad: str | None = None
    loop: int = 0
    before: str | None = None


@dataclasses.dataclass(frozen=True)
class Program:
    """Variables, an optimizer, and its steps."""

    family: str = "tf_keras"
    inner: str = "sgd"
    mode: str = "function"
    dtypes: tuple[str, ...] = ("float32",)
    rules: Rules = dataclasses.field(default_factory=Rules)
    loops: tuple[Loop, ...] = (Loop(),)
    steps: tuple[Step, ...] = (Step(),)
    at_once: int = 1  # `steps_per_execution` of fit
    ema: int | None = None  # the `ema_overwrite_frequency` of moving averages, 0 for never; None for no averages
    jit_compile: bool = False  # whether XLA compiles the optimizer's step alone

    @property
    def replicas(self):
        """The number of replicas."""
        return 2 if self.mode == "mirrored" else 1

    def gradients(self, step):
        """Return the gradients of the unscaled loss, each [replica, *shape], and the rows of the sparse gradient."""
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
        """A value that overflows when it is scaled, but not in the optimizer's slots."""
        return 1024.0 if "float16" in self.dtypes else 1e16 if self.inner == "adam" else 1e35


_ONE_IN_FOUR = st.sampled_from([False, False, False, True])


def _some(elements, most):
    return st.lists(st.sampled_from(elements), max_size=most).map(tuple)


def _ema(family, mode):
    if family not in AVERAGING:
        return st.none()
    # Keras 3 fails in this combination
    return st.sampled_from([None, None, 0] if mode == "mirrored" else [None, None, 0, 3])


@st.composite
def _rules(draw, largest):
    if draw(st.integers(0, 7)) == 7:
        return Rules(initial_scale=draw(st.sampled_from([1.0, 3.0, 1024.0])), dynamic=False)
    most = draw(st.sampled_from([None, 2.0**10, 2.0**14, 2.0**126]))
    most = min(most or largest, largest)
    least = draw(st.sampled_from([1.0, 2.0**-10, 8.0]))
    scales = [scale for scale in (1024.0, 1.0, 8.0, 3000.0, 2.0**15, 2.0**24, 2.0**100, 2.0**125) if scale <= most]
    return Rules(
        initial_scale=draw(st.sampled_from(scales)),
        growth_steps=draw(st.integers(1, 4)),
        growth_factor=draw(st.sampled_from([2.0, 4.0, 1.5, 3.0])),
        backoff_factor=draw(st.sampled_from([0.5, 0.25, 0.3])),
        hysteresis=draw(st.integers(1, 3)),
        min_scale=least,
        max_scale=most,
    )


@st.composite
def _loops(draw, program):
    function, mirrored = program["mode"] in ("function", "compiled"), program["mode"] == "mirrored"
    variables = len(program["dtypes"])
    changes = [name for name, change in CHANGES.items() if change.compiled or program["mode"] != "compiled"]
    calls = draw(st.sampled_from([*UNSCALED[: 3 if mirrored else 4], *SCALED]))
    if program["family"] in ("tf1", "sonnet") and calls in ("apply_gradients",):
        calls = "apply"
    if program["family"] == "tf1" and calls == "apply":
        calls = "unscaled"
    rows_alone = program["inner"] == "momentum" and program["family"] in LAZY  # XLA lacks the operation
    sparse = variables > 1 and calls != "two_functions" and not (rows_alone and program["mode"] == "compiled")
    squares_rows = program["inner"] == "adam" and program["family"] == "keras3"  # row by row, before it sums them
    gathered = program["mode"] == "mirrored" and "bfloat16" in program["dtypes"]  # collectives do not support the dtype
    sparse = sparse and not squares_rows and not gathered and draw(st.booleans())
    # XLA rounds half precision less often, so it overflows later.
    exact = program["mode"] != "compiled" or set(program["dtypes"]) <= {"float32", "float64"}
    scaled = () if calls in ("minimize", "compute_gradients") or not exact else draw(_some(changes, 2))
    return Loop(
        calls=calls,
        scaled=tuple(name for name in scaled if name != "clip_by_norm"),  # its squares are close to float32's limits
        unscaled=draw(_some(changes, 3)) if calls in ("unscaled", "compute_gradients", "two_functions") else (),
        missing=draw(st.none() | st.integers(0, variables - 1)) if variables > 1 else None,
        sparse=sparse,
        place=draw(st.sampled_from(["here", "here", "function", "cond"])),
        recompute=not sparse and draw(st.booleans()),
        backwards=program["family"] != "sonnet" and draw(st.booleans()),  # Sonnet finds slots by position
        repeated=draw(st.sampled_from(["no", "no", "if", "while"])) if function and calls != "two_functions" else "no",
    )


@st.composite
def programs(draw, most_steps=60, families=FAMILIES, modes=MODES):
    """Generate programs of at most `most_steps` steps."""
    program = {"family": draw(st.sampled_from(families)), "inner": draw(st.sampled_from(INNER))}
    modes = [mode for mode in modes if mode != "mirrored" or program["family"] != "sonnet"]
    program["mode"] = draw(st.sampled_from(modes))
    half = [] if program["inner"] == "adam" else ["float16", "bfloat16"]
    dtype = st.sampled_from(["float32", "float32", "float64", *half])
    dtypes = draw(st.lists(dtype, min_size=1, max_size=4).map(tuple))
    if program["mode"] == "mirrored":  # TensorFlow reduces all gradients in one tensor
        dtypes = dtypes[:1] * len(dtypes)
    program["dtypes"] = dtypes
    rules = program["rules"] = draw(_rules(min(LARGEST_SCALE[dtype] for dtype in dtypes)))
    program["jit_compile"] = program["mode"] != "compiled" and draw(_ONE_IN_FOUR)
    loops = draw(st.lists(_loops(program), min_size=1, max_size=2).map(tuple))
    between = st.sampled_from([None] * 8 + ["checkpoint", "state"])
    program["ema"] = draw(_ema(program["family"], program["mode"]))
    return Program(**program, loops=loops, steps=draw(_steps(most_steps, rules, len(loops), between)))


@st.composite
def _steps(draw, most, rules, loops, between):
    step = st.builds(
        Step,
        seed=st.integers(0, 10**6),
        number=st.integers(0, 3),
        bad=st.sampled_from([None, None, *BAD]) if rules.dynamic else st.none(),
        loop=st.integers(0, loops - 1),
        before=between,
    )
    least = draw(st.sampled_from([1, most // 2, most]))  # otherwise Hypothesis generates about five steps
    return tuple(draw(st.lists(step, min_size=least, max_size=most)))


@st.composite
def library_programs(draw, most_steps=60):
    """Generate programs in a library's loop."""
    mode = draw(st.sampled_from(sorted(LIBRARY_MODES)))
    family = draw(st.sampled_from(LIBRARY_MODES[mode]))
    program = {"family": family, "mode": mode, "inner": draw(st.sampled_from(INNER)), "ema": draw(_ema(family, mode))}
    rules = draw(_rules(LARGEST_SCALE["float32"]))
    calls = "apply" if family == "keras3" and mode.startswith("fit") else "minimize"  # the loop's contract
    loops = (Loop(calls),)
    program["jit_compile"] = mode in ("fit", "probability") and draw(_ONE_IN_FOUR)
    if mode == "session":
        program["dtypes"] = draw(st.sampled_from([("float32",), ("float32", "float32", "float64")]))
        changes = _some(sorted(set(CHANGES) - {"py_function"}), 3)
        loops = (Loop("unscaled", unscaled=draw(changes), backwards=draw(st.booleans())), Loop("minimize"))
    steps = draw(_steps(most_steps, rules, len(loops), st.none()))
    return Program(**program, rules=rules, loops=loops, steps=steps, at_once=draw(st.integers(1, 5)))
