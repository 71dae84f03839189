"""Random programs take the same steps on the originals, or differ as a row of docs/differences.md says."""

import dataclasses
import pathlib

import hypothesis
import pytest

from tools.fuzz import differential, drawing, originals, programs
from tools.fuzz.model import Rules
from tools.fuzz.program import Loop, Program, Step

ROOT = pathlib.Path(__file__).parents[1]
BESIDE_US = ("tf_keras", "keras3")
A_FEW = drawing.settings(3, shrink=False, derandomize=True)
BETWEEN = (None, "checkpoint", "learning_rate", "config", None, None)
BAD = (None, "nan", None, None, "inf", None)
STEPS = tuple(Step(seed=i, number=2, bad=bad, before=before) for i, (bad, before) in enumerate(zip(BAD, BETWEEN)))


def a_bit_of_everything(name):
    calls = "apply" if name == "keras3" else "unscaled"
    return Program(name, "adam", "eager", ("float32",) * 3, Rules(), (Loop(calls, missing=2),), STEPS)


@pytest.mark.parametrize("name", BESIDE_US)
def test_random_programs_take_the_same_steps_on_the_original(name):
    original = differential.ORIGINALS[name]
    run = differential.in_this_process(original)

    @A_FEW
    @hypothesis.given(programs.original_programs((original.family,), ("eager", "function"), most_steps=8))
    def check(program):
        differential.compare(original, run, program)

    check()


@pytest.mark.parametrize("name", BESIDE_US)
def test_a_program_with_saves_and_changed_hyperparameters_takes_the_same_steps(name):
    original = differential.ORIGINALS[name]
    agreed = differential.compare(original, differential.in_this_process(original), a_bit_of_everything(name))
    assert agreed == (len(STEPS), None)


def test_keras_3s_scale_without_a_lower_bound_is_a_row_of_the_table():
    original = differential.ORIGINALS["keras3"]
    one = Program(
        "keras3", "sgd", "eager", rules=Rules(initial_scale=2.0), loops=(Loop("apply"),), steps=(Step(bad="nan"),) * 3
    )
    agreed = differential.compare(original, differential.in_this_process(original), one)
    assert agreed == (1, "bounds of the scale")


def test_a_reciprocal_that_becomes_zero_within_a_step_is_a_row_of_the_table():
    original = differential.ORIGINALS["tf_keras"]
    rules = Rules(initial_scale=2.0**126, growth_steps=1)
    one = Program("tf_keras", rules=rules, loops=(Loop(repeated="while"),), steps=(Step(number=2),))
    agreed = differential.compare(original, differential.in_this_process(original), one)
    assert agreed == (0, "`get_unscaled_gradients`")


def test_a_small_gradient_that_the_graph_optimizer_divides_first_is_a_row_of_the_table():
    original = differential.ORIGINALS["tf_keras"]
    rules, loop = Rules(initial_scale=2.0**125), Loop("minimize", repeated="if")
    one = Program("tf_keras", dtypes=("float32",) * 2, rules=rules, loops=(loop,), steps=(Step(18840, number=2),))
    agreed = differential.compare(original, differential.in_this_process(original), one)
    assert agreed == (0, "a small gradient under a scale near 2**127, in a `tf.function`")


def test_a_sparse_row_that_only_the_scale_makes_infinite_is_a_row_of_the_table():
    original = differential.ORIGINALS["keras3"]
    rules, loop = Rules(initial_scale=2.0**15), Loop("apply_gradients", sparse=True)
    one = Program("keras3", "sgd", "eager", ("float32", "float16", "float32"), rules, (loop,), (Step(3824),))
    agreed = differential.compare(original, differential.in_this_process(original), one)
    assert agreed == (0, "sparse rows with the same index")


@pytest.mark.table("tf_keras_legacy", every=1)
@pytest.mark.parametrize("name", ["tf_keras", "tf_keras_legacy"])
def test_two_replicas_take_the_same_steps_as_on_the_original(name):
    original = differential.ORIGINALS[name]
    loops = Loop(missing=2), Loop("minimize", sparse=True)
    steps = tuple(dataclasses.replace(step, loop=i % 2) for i, step in enumerate(STEPS))
    one = Program(name, "momentum", "mirrored", ("float32",) * 3, Rules(), loops, steps)
    assert differential.compare(original, differential.in_this_process(original), one) == (len(STEPS), None)


def test_every_row_is_one_of_the_table_of_differences():
    table = (ROOT / "docs" / "differences.md").read_text()
    for row in differential.ROWS:
        assert f"\n| {row} |" in table, row


def test_a_program_is_the_same_after_it_was_sent():
    one = a_bit_of_everything("keras3")
    gradients = [one.gradients(step) for step in one.steps]
    again, received = originals.decoded(originals.encoded(one, gradients))
    assert again == one
    for (dense, rows), (dense_again, rows_again) in zip(gradients, received, strict=True):
        assert [each.tobytes() for each in dense] == [each.tobytes() for each in dense_again]
        assert rows.tolist() == rows_again.tolist()
