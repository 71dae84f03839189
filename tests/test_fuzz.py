"""The fuzzer finds nothing in a few programs, finds what is wrong on purpose, and what it found once stays repaired."""

import dataclasses
import random

import hypothesis
import numpy as np
import pytest

from fuzz import children, comparison, drawing, faults, model, programs, running, saves
from fuzz.model import Rules
from fuzz.program import Loop, Program, Step

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
#: The programs that failed once, as `make fuzz` printed them, after some that have a bit of everything.
FOUND = (BOTH_CONTRACTS, *AVERAGES)


A_FEW_OF = {
    "a loop of one's own": programs.programs(12, modes=("function", "eager")),
    "a library's loop": programs.library_programs(12),
}


@pytest.mark.parametrize("what", A_FEW_OF)
def test_random_programs_do_what_the_model_says(what):
    A_FEW(hypothesis.given(A_FEW_OF[what])(running.run))()


@pytest.mark.parametrize("program", FOUND, ids=range(len(FOUND)))
def test_a_program_that_was_found_does_what_the_model_says(program):
    running.run(program)


def forgetful(self, finite, right):
    self.bad = 0 if finite else self.rules.hysteresis
    return right(self, finite)


def last_one_wins(self, shape, right):
    found = np.zeros(shape, self.values.dtype)
    found[self.indices] = self.values
    return found


# Where, what is there, and what is there instead; which gets that as well, as `right`.
WRONG = {
    "nothing overflows": (model.LossScale, "step", lambda self, finite, right: right(self, True)),
    "the hysteresis is forgotten": (model.LossScale, "step", forgetful),
    "gradients stay scaled": (model, "unscaled", lambda gradient, scale, right: gradient),
    "an update is a little too large": (model.Adam, "update", lambda *arguments, right: right(*arguments) * 1.0001),
    "rows of the same index are not summed": (model.Rows, "dense", last_one_wins),
    "a change is forgotten": (comparison, "changed", lambda names, gradients, number, right: gradients),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_model_that_is_wrong_in_one_thing_disagrees(what, monkeypatch):
    where, name, wrong = WRONG[what]
    right = getattr(where, name)
    monkeypatch.setattr(where, name, lambda *arguments: wrong(*arguments, right=right))
    with pytest.raises(AssertionError, match="after step"):
        running.run(dataclasses.replace(BOTH_CONTRACTS, mode="eager"))


@pytest.mark.parametrize("program", AVERAGES, ids=lambda program: f"{program.family}-{program.loops[0].calls}")
def test_a_model_whose_averages_never_change_the_variables_disagrees(program, monkeypatch):
    monkeypatch.setattr(model.Training, "_average", lambda self, followed: None)
    with pytest.raises(AssertionError, match="after step"):
        running.run(program)


@pytest.mark.parametrize("seed", range(3))
def test_a_copy_in_mid_training_holds_everything(seed):
    faults.copied(random.Random(seed), None)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_process_that_is_killed_amid_a_save_leaves_the_saves_before_whole(tmp_path):
    children.run(saves.train, str(tmp_path), "keras3", "keras", 3, killed_at=0)
    assert saves.saved_numbers("keras", tmp_path) == [1, 2]
    faults.assert_whole("keras3", "keras", tmp_path, surely=2, what="killed")
    (tmp_path / "2.keras").write_bytes((tmp_path / "1.keras").read_bytes())
    with pytest.raises(AssertionError, match="save 2"):
        faults.assert_whole("keras3", "keras", tmp_path, surely=2, what="an older save in its place")
    (tmp_path / "2.keras").write_bytes(b"half")
    with pytest.raises(AssertionError, match="save 2 cannot be read"):
        faults.assert_whole("keras3", "keras", tmp_path, surely=2, what="half a save")
