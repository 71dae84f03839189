"""The fuzzer finds nothing in a few programs, and what it found once stays repaired."""

import dataclasses

import hypothesis
import pytest

from tf_lossscale.core.rules import KEYWORDS
from tools.fuzz import drawing, model, programs
from tools.fuzz.program import Loop, Program, Rules, Step

A_FEW = drawing.settings(4, shrink=False, derandomize=True)
BAD = (None, "huge", None, "nan", "inf", None, None, None, None, "-inf", None, None)
STEPS = tuple(Step(seed=i, number=i % 4, bad=bad, loop=i % 2) for i, bad in enumerate(BAD))
BOTH_CONTRACTS = Program(
    inner="adam",
    dtypes=("float32", "float32", "float64", "float32"),
    rules=Rules(initial_scale=2.0**70, hysteresis=2, max_scale=2.0**71),
    loops=(Loop(unscaled=("cond", "while"), sparse=True), Loop("apply", missing=0)),
    steps=STEPS,
)
# Averages, after a first step that is skipped, and with skipped steps between.
AVERAGES = tuple(
    Program(
        family=family,
        mode="eager",
        dtypes=("float32",) * 4,
        loops=(Loop(calls, missing=2),),
        steps=tuple(Step(seed=i, bad=bad) for i, bad in enumerate(("nan", None, None, "inf", None, None, None))),
        ema=3,
    )
    for family in programs.AVERAGING
    for calls in ("unscaled", "apply")
)
# Sonnet's `apply` takes unscaled gradients, whose overflow is hidden by clipping, or by leaving a gradient out.
OF_SONNET = tuple(
    Program(
        family="sonnet",
        dtypes=("float32",) * 3,
        rules=Rules(initial_scale=1024.0, growth_steps=1),
        loops=(Loop("unscaled", unscaled=changes),),
        steps=(Step(seed=0), bad),
    )
    for changes, bad in (
        (("clip_by_value",), Step(seed=0, bad="inf")),
        (("cond", "drop_first"), Step(seed=1447, bad="nan")),
    )
)
# In a graph, the gradients that are left after clipping by the global norm depend on the one that is left out.
LEFT_OUT = Program(
    dtypes=("float32",) * 4,
    rules=Rules(initial_scale=1024.0, growth_steps=1),
    loops=(Loop("unscaled", unscaled=("clip_by_norm", "drop_first")),),
    steps=tuple(Step(seed=i, bad="inf") for i in range(4)),
)
#: The programs that failed once, as `python -m tools.fuzz` printed them, after some that have a bit of everything.
FOUND = (BOTH_CONTRACTS, *AVERAGES, *OF_SONNET, LEFT_OUT)


def test_random_programs_do_what_the_model_says():
    A_FEW(hypothesis.given(programs.programs(12, modes=("function", "eager")))(model.run))()


@pytest.mark.parametrize("program", FOUND, ids=range(len(FOUND)))
def test_a_program_that_was_found_does_what_the_model_says(program):
    model.run(program)


def test_the_fuzzer_draws_every_rule():
    assert {*KEYWORDS} <= {field.name for field in dataclasses.fields(Rules)}
