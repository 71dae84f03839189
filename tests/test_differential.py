"""Random programs take the same steps on the originals, or differ as a row of docs/differences.md says."""

import dataclasses
import pathlib

import hypothesis
import pytest

from tests.cases import combinations
from tools.fuzz import differential, drawing, originals, programs
from tools.fuzz import program as program_lib
from tools.fuzz.program import Loop, Program, Rules, Step

ROOT = pathlib.Path(__file__).parents[1]
BESIDE_US = ("tf_keras", "keras3")
A_FEW = drawing.settings(3, shrink=False, derandomize=True)
BETWEEN = (None, "checkpoint", "learning_rate", "config", None, None)
BAD = (None, "nan", None, None, "inf", None)
STEPS = tuple(Step(seed=i, number=2, bad=bad, before=before) for i, (bad, before) in enumerate(zip(BAD, BETWEEN)))


def a_bit_of_everything(name):
    calls = "apply" if name == "keras3" else "unscaled"
    return Program(name, "adam", "eager", ("float32",) * 3, Rules(), (Loop(calls, missing=2),), STEPS)


def compared(name, program):
    original = differential.ORIGINALS[name]
    return differential.compare(original, lambda program: originals.run(program, original.name), program)


@pytest.mark.parametrize("name", BESIDE_US)
def test_random_programs_take_the_same_steps_on_the_original(name):
    drawn = programs.original_programs((name,), ("eager", "function"), most_steps=8)

    @A_FEW
    @hypothesis.given(drawn)
    def check(program):
        compared(name, program)

    check()


@pytest.mark.parametrize("name", BESIDE_US)
def test_a_program_with_saves_and_changed_hyperparameters_takes_the_same_steps(name):
    assert compared(name, a_bit_of_everything(name)) == (len(STEPS), None)


@pytest.mark.parametrize(
    ("program", "agreed"),
    [
        pytest.param(
            Program("keras3", mode="eager", rules=Rules(2.0), loops=(Loop("apply"),), steps=(Step(bad="nan"),) * 3),
            (1, "bounds of the scale"),
            id="Keras 3 has no lower bound",
        ),
        pytest.param(
            Program(rules=Rules(2.0**126, growth_steps=1), loops=(Loop(repeated="while"),), steps=(Step(number=2),)),
            (0, "`get_unscaled_gradients`"),
            id="the scale's reciprocal becomes zero within a step",
        ),
        pytest.param(
            Program(
                dtypes=("float32",) * 2,
                rules=Rules(2.0**125),
                loops=(Loop("minimize", repeated="if"),),
                steps=(Step(0, number=2),),
            ),
            (0, "a small gradient under a scale near 2**127, in a `tf.function`"),
            id="the graph optimizer divides a small gradient first",
        ),
        pytest.param(
            Program(
                "keras3",
                mode="eager",
                dtypes=("float32", "float16", "float32"),
                rules=Rules(2.0**15),
                loops=(Loop("apply_gradients", sparse=True),),
                steps=(Step(6),),
            ),
            (0, "sparse rows with the same index"),
            id="only the scale makes the sum of two sparse rows infinite",
        ),
    ],
)
def test_a_known_difference_is_recognized_as_a_row_of_the_table(program, agreed):
    assert compared(program.family, program) == agreed


@pytest.mark.parametrize("name", combinations(["tf_keras", "tf_keras_legacy"], usual=["tf_keras_legacy"]))
def test_two_replicas_take_the_same_steps_as_on_the_original(name):
    loops = Loop(missing=2), Loop("minimize", sparse=True)
    steps = tuple(dataclasses.replace(step, loop=i % 2) for i, step in enumerate(STEPS))
    program = Program(name, "momentum", "mirrored", ("float32",) * 3, Rules(), loops, steps)
    assert compared(name, program) == (len(STEPS), None)


def test_every_row_is_one_of_the_table_of_differences():
    table = (ROOT / "docs" / "differences.md").read_text()
    for row in differential.ROWS:
        assert f"\n| {row} |" in table, row


def test_a_program_is_the_same_after_it_was_sent():
    program = a_bit_of_everything("keras3")
    assert eval(repr(program), vars(program_lib)) == program
