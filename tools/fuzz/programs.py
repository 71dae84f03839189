"""Hypothesis strategies that generate random training programs."""

import hypothesis.strategies as st

from tools.fuzz.changes import CHANGES, HIDING_OVERFLOWS, NOT_COMPILED, are_traced
from tools.fuzz.program import (
    AVERAGING,
    BAD,
    FAMILIES,
    INNER,
    LARGEST_SCALE,
    LAZY,
    MODES,
    ORIGINAL_CALLS,
    SCALED,
    UNSCALED,
    Loop,
    Program,
    Rules,
    Step,
)


def _some(elements, most):
    return st.lists(st.sampled_from(elements), max_size=most).map(tuple)


def _ema(family, mode):
    if family not in AVERAGING:
        return st.none()
    # Under MirroredStrategy, Keras 3 fails if moving averages overwrite the variables.
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
def _dtypes(draw, program):
    half = [] if program["inner"] == "adam" else ["float16", "bfloat16"]
    dtype = st.sampled_from(["float32", "float32", "float64", *half])
    dtypes = draw(st.lists(dtype, min_size=1, max_size=4).map(tuple))
    # MirroredStrategy reduces all gradients as one tensor, so they must have the same dtype.
    return dtypes[:1] * len(dtypes) if program["mode"] == "mirrored" else dtypes


@st.composite
def _loops(draw, program, of=None):
    function, mirrored = program["mode"] in ("function", "compiled"), program["mode"] == "mirrored"
    variables = len(program["dtypes"])
    changes = [name for name in CHANGES if name not in NOT_COMPILED or program["mode"] != "compiled"]
    calls = draw(st.sampled_from(of or [*UNSCALED[: 3 if mirrored else 4], *SCALED]))
    if program["family"] in ("tf1", "sonnet") and calls in ("apply_gradients",):
        calls = "apply"
    if program["family"] == "tf1" and calls == "apply":
        calls = "unscaled"
    # XLA does not support momentum updates of individual rows.
    rows_alone = program["inner"] == "momentum" and program["family"] in LAZY
    sparse = variables > 1 and calls != "two_functions" and not (rows_alone and program["mode"] == "compiled")
    # TensorFlow's collective operations cannot gather sparse bfloat16 gradients.
    gathered = program["mode"] == "mirrored" and "bfloat16" in program["dtypes"]
    sparse = sparse and not gathered and draw(st.booleans())
    # XLA rounds to half precision less often than eager mode, so fewer gradients overflow.
    exact = program["mode"] != "compiled" or set(program["dtypes"]) <= {"float32", "float64"}
    scaled = () if calls in ("minimize", "compute_gradients") or not exact else draw(_some(changes, 2))
    showing = [name for name in changes if are_traced(program["mode"], calls) or name not in HIDING_OVERFLOWS]
    return Loop(
        calls=calls,
        # Clipping by the norm squares the scaled gradients, and the squares may overflow.
        scaled=tuple(name for name in scaled if name != "clip_by_norm"),
        unscaled=draw(_some(showing, 3)) if calls in ("unscaled", "compute_gradients", "two_functions") else (),
        missing=draw(st.none() | st.integers(0, variables - 1)) if variables > 1 else None,
        sparse=sparse,
        place=draw(st.sampled_from(["here", "here", "function", "cond"])),
        recompute=not sparse and draw(st.booleans()),
        # Sonnet optimizers match slots to variables by position, so the order of the variables must not change.
        backwards=program["family"] != "sonnet" and draw(st.booleans()),
        repeated=draw(st.sampled_from(["no", "no", "if", "while"])) if function and calls != "two_functions" else "no",
    )


@st.composite
def programs(draw, most_steps=60, families=FAMILIES, modes=MODES):
    """Generate random training programs with at most `most_steps` steps."""
    program = {"family": draw(st.sampled_from(families)), "inner": draw(st.sampled_from(INNER))}
    modes = [mode for mode in modes if mode != "mirrored" or program["family"] != "sonnet"]
    program["mode"] = draw(st.sampled_from(modes))
    dtypes = program["dtypes"] = draw(_dtypes(program))
    rules = program["rules"] = draw(_rules(min(LARGEST_SCALE[dtype] for dtype in dtypes)))
    loops = draw(st.lists(_loops(program), min_size=1, max_size=2).map(tuple))
    between = st.sampled_from([None] * 8 + ["checkpoint", "state"])
    program["ema"] = draw(_ema(program["family"], program["mode"]))
    return Program(**program, loops=loops, steps=draw(_steps(most_steps, rules, len(loops), between)))


@st.composite
def _steps(draw, most, rules, loops, between, finite=2):
    step = st.builds(
        Step,
        seed=st.integers(0, 10**6),
        number=st.integers(0, 3),
        bad=st.sampled_from([*[None] * finite, *BAD]) if rules.dynamic else st.none(),
        loop=st.integers(0, loops - 1),
        before=between,
    )
    # Without a minimum, Hypothesis generates programs of only about five steps.
    least = draw(st.sampled_from([1, most // 2, most]))
    return tuple(draw(st.lists(step, min_size=least, max_size=most)))


@st.composite
def original_programs(draw, families, modes, most_steps=40):
    """Generate programs that use only arguments and methods that other loss scale optimizers also support."""
    program = {"family": draw(st.sampled_from(families)), "inner": draw(st.sampled_from(INNER))}
    program["mode"] = draw(st.sampled_from(modes))
    program["dtypes"] = draw(_dtypes(program))
    largest = min(LARGEST_SCALE[dtype] for dtype in program["dtypes"])
    found = draw(_rules(largest))
    keras3 = program["family"] == "keras3"
    # Keras 3's loss scale has no lower bound. A high initial scale keeps it above this package's lower bound.
    scale = max(found.initial_scale, 1024.0) if keras3 else found.initial_scale
    rules = Rules(initial_scale=scale, growth_steps=found.growth_steps, dynamic=found.dynamic or keras3)
    program["rules"] = rules
    calls = SCALED if keras3 else ORIGINAL_CALLS
    loop = _loops(program, of=[each for each in calls if program["mode"] != "mirrored" or each != "two_functions"])
    loops = draw(st.lists(loop, min_size=1, max_size=2).map(tuple))
    between = st.sampled_from([None] * 8 + ["checkpoint", "learning_rate", "config"])
    return Program(**program, loops=loops, steps=draw(_steps(most_steps, rules, len(loops), between, finite=10)))
