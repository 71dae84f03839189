"""PyTorch's recorded Adafactor: its cases, and how to run them here."""

import tensorflow as tf
import tf_keras

from tests.conformance import recordings
from tf_lossscale.optimizers import keras3
from tf_lossscale.optimizers import tf_keras as tf_keras_twin

RECORDED = recordings.load("torch_adafactor")
LIBRARIES = {"keras3": keras3.Adafactor, "tf_keras": tf_keras_twin.Adafactor}
KERAS = {"keras3": tf.keras, "tf_keras": tf_keras}
PROBES = RECORDED["api_probes"]
array = recordings.array


def ones():
    """Returns a parameter, a matrix of ones."""
    return tf.Variable(tf.ones([2, 3]))


def set_gradient(variable):
    """Gives a parameter a gradient of ones."""
    variable.grad = tf.ones_like(variable)


def step_of_ones(optimizer):
    """Takes a step in which each parameter has a gradient of ones."""
    for group in optimizer.param_groups:
        for variable in group["params"]:
            set_gradient(variable)
    optimizer.step()


def plain(options):
    """Returns a group's options as JSON has them."""
    numbers = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in options.items()}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in numbers.items()}


def initial(name, shape):
    """Returns the recorded initial value of a parameter, a float32 array."""
    return array(RECORDED["initial_params"][name][shape], "float32")


def gradients(sequence, shape, dtype="float32"):
    """Returns a parameter's gradient of every step; None where it had none."""
    steps = RECORDED["gradient_sequences"][sequence]
    return [None if step[shape] is None else tf.cast(array(step[shape]), dtype) for step in steps]


def kwargs_of(trajectory):
    """Returns the constructor's arguments of a recorded case."""
    kwargs = dict(trajectory["kwargs"])
    return {**kwargs, "eps": tuple(kwargs["eps"])} if "eps" in kwargs else kwargs


def optimizer_step(optimizer):
    """Takes a step as PyTorch does, by the variables' gradients."""
    optimizer.step()


def run(make, trajectory, step=optimizer_step, shapes=tuple(RECORDED["shapes"]), dtype="float32", steps=None, **kwargs):
    """Runs a recorded case for some shapes; returns {shape: values after every step} and {when: states by shape}."""
    variables = [tf.Variable(tf.cast(initial(trajectory["initial"], shape), dtype)) for shape in shapes]
    optimizer = make(variables, **kwargs_of(trajectory), **kwargs)
    per_shape = [gradients(trajectory["gradients"], shape, dtype) for shape in shapes]
    values, states = {shape: [] for shape in shapes}, {}
    for i, grads in enumerate(list(zip(*per_shape))[:steps], 1):
        for variable, gradient in zip(variables, grads):
            variable.grad = gradient
        step(optimizer)
        for shape, variable in zip(shapes, variables):
            values[shape].append(variable.numpy())
        states[f"after_{i}"] = named_state(optimizer, shapes)
    states["final"] = states[f"after_{i}"]
    return values, states


def named_state(optimizer, shapes):
    """Returns the state by shape, as it was recorded; empty of a parameter that had no gradient yet."""
    state = optimizer.state_dict()["state"]
    return {shape: state.get(number, {}) for number, shape in enumerate(shapes)}
