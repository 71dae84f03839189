"""What a machine without a GPU can show about one: no gradient leaves it, and the host reads predicates alone."""

import itertools

import pytest
import tensorflow as tf

import tf_lossscale.optimizers
from tests.cases import combinations
from tests.families import ALL_FAMILIES
from tf_function_tests import placement
from tf_lossscale import LossScaleOptimizer

FAMILIES = {family.name: family for family in ALL_FAMILIES}
OPTIMIZERS = [
    *((family.name, "Adam") for family in ALL_FAMILIES),
    *((family.name, "Adafactor") for family in ALL_FAMILIES if family.name in dir(tf_lossscale.optimizers)),
]
DTYPES = ["float32", "float16", "bfloat16", "float64"]
# Two small gradients, which are stacked; with them a large one, or a sparse one.
SHAPES = {"small": [[4], [4]], "dense": [[4], [4], [600, 600]], "sparse": [[4], [4], [1000, 8]]}


def predicates(gradients, dtype):
    """The conditionals of every step, whose predicates the host reads.

    Large gradients of wide dtypes are summed first; each value is looked at only if the sum is not finite. The last
    conditional applies the step or skips it.
    """
    return ["StatelessIf", "If"] if gradients == "dense" and dtype in ("float32", "float64") else ["If"]


# Every family and optimizer has every combination of two values of any two axes.
CASES = [
    (family, inner, dtype, gradients, ("unscaled", "scaled")[(i + j) % 2], bool((i // 2 + j) % 2))
    for family, inner in OPTIMIZERS
    for (i, dtype), (j, gradients) in itertools.product(enumerate(DTYPES), enumerate(("dense", "sparse")))
]
# Operations on a gradient that have no GPU kernel. They are the optimizers' own, and without the wrapper the same.
KNOWN = {
    ("tf1", "Adam", "bfloat16"): {"ResourceApplyAdam"},
    ("tf_keras_legacy", "Adam", "bfloat16"): {"ResourceApplyAdam"},
}


def made(family, inner):
    adam = FAMILIES[family].adam()  # skips the test where the library is missing
    if inner == "Adafactor":
        return getattr(tf_lossscale.optimizers, family).Adafactor()
    return adam if inner == "Adam" else inner


def traced(family, inner, dtype="float32", gradients="small", contract="unscaled", compiled=False, **config):
    """The graph of a step as it is where there is a GPU.

    Args:
        family: name of a family.
        inner: "Adam", "Adafactor", or an optimizer.
        dtype: of variables and gradients.
        gradients: of SHAPES.
        contract: "unscaled" if the loop unscales the gradients, "scaled" if `apply` does; "bare" without the wrapper.
        compiled: whether XLA compiles the step.
        **config: of the wrapper.
    """
    if placement.why_not():
        pytest.skip(placement.why_not())
    with placement.as_if_there_were_a_gpu():
        inner = made(family, inner)
        wrapper = None if contract == "bare" else LossScaleOptimizer(inner, **config)
        variables = [tf.Variable(tf.zeros(shape, dtype)) for shape in SHAPES[gradients]]

        def losses(rows):
            *dense, last = variables
            used = [*dense, tf.gather(last, rows) if gradients == "sparse" else last]
            return tf.stack([tf.reduce_sum(values) for values in used])

        def step(rows):
            with tf.GradientTape() as tape:
                loss = losses(rows)
                if contract != "bare":
                    loss = wrapper.get_scaled_loss(loss) if contract == "unscaled" else wrapper.scale_loss(loss)
            found = tape.gradient(loss, variables)
            assert isinstance(found[-1], tf.IndexedSlices) == (gradients == "sparse")
            if contract == "bare":
                FAMILIES[family].apply(inner, found, variables)
            elif contract == "unscaled":
                wrapper.apply_gradients(zip(wrapper.get_unscaled_gradients(found), variables))
            else:
                wrapper.apply(found, variables)

        rows = tf.TensorSpec([6], tf.int64)
        return tf.function(step, jit_compile=compiled).get_concrete_function(rows).graph


def operations(uses):
    return sorted(use.operation for use in uses)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "inner", "dtype", "gradients", "contract", "diagnose"),
    combinations(
        CASES,
        usual=[
            "keras3-Adam-float64-sparse-unscaled-False",
            "tf_keras-Adafactor-float32-sparse-scaled-True",
            "tf1-Adam-bfloat16-dense-unscaled-True",
            "sonnet-Adam-float16-sparse-unscaled-True",
        ],
    ),
)
def test_no_gradient_leaves_the_gpu_and_the_host_reads_predicates_alone(
    family, inner, dtype, gradients, contract, diagnose
):
    graph = traced(family, inner, dtype, gradients, contract, diagnose=diagnose)
    off, read = placement.off_the_gpu(graph), placement.read_by_the_host(graph)
    known = KNOWN.get((family, inner, dtype), set())
    assert {use.operation for use in off} == known, off
    if known:
        assert operations(off) == operations(placement.off_the_gpu(traced(family, inner, dtype, gradients, "bare")))
    assert_only_predicates_are_read([use for use in read if use.operation not in known], predicates(gradients, dtype))


def assert_only_predicates_are_read(read, in_every_step):
    assert [use.operation for use in read if not use.within] == in_every_step, read
    # In a step that is applied the host reads nothing more. In one that is skipped it reads whether training has
    # stalled and, for the diagnosis, whether each large or sparse gradient is finite. What a stall prints is left out.
    later = [use for use in read if use.within[:2] != ("else_branch", "else_branch")]
    assert {(use.argument, use.dtype) for use in later} == {("cond", "bool")}, read
    assert {use.within for use in later} == {(), ("else_branch",)}, read


@pytest.mark.parametrize(("family", "inner"), OPTIMIZERS)
def test_the_host_reads_one_predicate_in_a_step_of_small_gradients(family, inner):
    graph = traced(family, inner, gradients="small")
    assert placement.off_the_gpu(graph) == []
    assert_only_predicates_are_read(placement.read_by_the_host(graph), ["If"])


@pytest.mark.parametrize(("family", "inner"), OPTIMIZERS)
def test_the_host_reads_nothing_in_a_step_with_a_fixed_scale(family, inner):
    assert placement.read_by_the_host(traced(family, inner, gradients="dense", dynamic=False, initial_scale=8)) == []


@pytest.mark.slow
@pytest.mark.parametrize(("family", "inner"), OPTIMIZERS)
def test_xla_has_gpu_kernels_for_the_step_that_it_compiles_there(family, inner):
    graph = traced(family, inner, gradients="dense", compiled=True)
    assert placement.off_the_gpu(graph, compiled=True) == []
    found = [operation.type for operation in graph.get_operations()]
    assert len([kind for kind in found if kind in ("If", "StatelessIf")]) == 1
