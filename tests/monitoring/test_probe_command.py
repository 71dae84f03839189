"""tf-lossscale probe: a program trains as it does, and what float16 would lose is printed."""

import sys

import numpy as np
import pytest
import tensorflow as tf

from tests.families import FAMILIES
from tests.test_cli import exit_code
from tf_lossscale import LossScaleOptimizer
from tf_lossscale.monitoring.probe_command import every_optimizer_probed
from tf_lossscale.precision import records

KERAS = pytest.mark.parametrize("family", FAMILIES[:3], ids=lambda family: family.name)


def data():
    x = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)
    return x, x.sum(axis=1, keepdims=True)


def made(family, optimizer):
    keras = family.keras
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2), keras.layers.Dense(1)])
    model.compile(optimizer, "mse", loss_weights=1e-9)
    return model


def by_fit(family, optimizer):
    model = made(family, optimizer)
    model.fit(*data(), batch_size=2, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


def by_a_loop(family, optimizer, wrap=lambda step: step):
    model, (x, y) = made(family, optimizer), data()

    @wrap
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2) * 1e-9
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    for i in range(0, 16, 2):
        step(tf.constant(x[i % 8 : i % 8 + 2]), tf.constant(y[i % 8 : i % 8 + 2]))
    return model.get_weights()


def by_a_compiled_loop(family, optimizer):
    return by_a_loop(family, optimizer, tf.function)


def by_apply(family, optimizer):
    model, (x, y) = made(family, optimizer), data()
    for i in range(0, 16, 2):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x[i % 8 : i % 8 + 2]) - y[i % 8 : i % 8 + 2]) ** 2) * 1e-9
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return model.get_weights()


@KERAS
@pytest.mark.parametrize("train", [by_fit, by_a_loop, by_a_compiled_loop, by_apply])
def test_every_way_to_train_is_counted_and_trains_as_without(family, train):
    if train is by_apply and not hasattr(family.optimizers.SGD, "apply"):
        pytest.skip("Keras 2 has no apply")
    expected = train(family, family.optimizers.SGD(1e6))
    with every_optimizer_probed(3) as probes:
        trained = train(family, family.optimizers.SGD(1e6))
    for a, b in zip(expected, trained):
        np.testing.assert_array_equal(a, b)
    (probe,) = probes.values()
    report = probe.precision_report()
    assert report.step == 7, "of 8 steps, the first and each third one after it"
    assert report.counts.full_precision
    assert report.total.values == 4 * 2 + 2 + 2 + 1
    assert report.total.vanished > 0.5
    assert report.at(report.best_scale).total.below_normal == 0


def methods():
    classes = [family.optimizers.SGD for family in FAMILIES[:3]]
    return [getattr(cls, name, None) for cls in classes for name in ("apply", "apply_gradients")]


def test_after_the_block_the_classes_and_the_optimizers_are_as_before():
    before, optimizer, weight = methods(), FAMILIES[0].optimizers.SGD(), tf.Variable(1.0)
    with every_optimizer_probed(1) as probes:
        assert methods() != before
        optimizer.apply_gradients([(tf.constant(1.0), weight)])
        assert "apply_gradients" in vars(optimizer)
    assert methods() == before
    assert "apply_gradients" not in vars(optimizer)
    optimizer.apply_gradients([(tf.constant(1.0), weight)])
    (probe,) = probes.values()
    assert probe.precision_report().step == 1


def test_an_optimizer_whose_class_overrides_the_method_is_counted_and_called_once_a_step():
    calls = []

    class Own(FAMILIES[0].optimizers.SGD):
        def apply(self, grads, trainable_variables=None):
            calls.append(len(grads))
            return super().apply([2 * g for g in grads], trainable_variables)

    weight, optimizer = tf.Variable(1.0), Own(0.25, name="own")
    with every_optimizer_probed(1) as probes:
        for _ in range(2):
            optimizer.apply([tf.constant(1.0)], [weight])
    assert calls == [1, 1]
    assert weight.numpy() == 0.0
    assert probes["own"].precision_report().step == 2


def test_each_optimizer_has_a_report_and_those_that_scale_their_loss_have_none():
    weight = tf.Variable(1.0)
    with every_optimizer_probed(1) as probes:
        for optimizer in (FAMILIES[0].optimizers.SGD(name="a"), FAMILIES[0].optimizers.SGD(name="a")):
            optimizer.apply_gradients([(tf.constant(1.0), weight)])
        scaled = LossScaleOptimizer(FAMILIES[0].optimizers.SGD(name="b"))
        scaled.minimize(lambda: weight**2, [weight])
    assert list(probes)[:2] == ["a", "a_1"]
    assert all(probe.precision_report().step == 1 for probe in list(probes.values())[:2])
    assert set(list(probes.values())[2:]) <= {None}


PROGRAM = """
import sys
import tensorflow as tf
optimizer, weight = tf.keras.optimizers.SGD(0.5, name="mine"), tf.Variable([1.0, 1.0], name="weight")
for _ in range(int(sys.argv[1])):
    optimizer.apply_gradients([(tf.constant([2.0**-30, 2.0**-20]), weight)])
print("trained", sys.argv[1:])
END
"""


@pytest.fixture
def probe(tmp_path, monkeypatch):
    """Run `tf-lossscale probe` on a program in a folder of its own; returns the exit code."""
    monkeypatch.chdir(tmp_path)
    for name, value in (("argv", ["tf-lossscale"]), ("path", list(sys.path))):
        monkeypatch.setattr(sys, name, value)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])

    def run(*arguments, end="", program=PROGRAM):
        (tmp_path / "train.py").write_text(program.replace("END", end))
        return exit_code(["probe", *arguments])

    return run


def test_the_command_prints_what_the_program_prints_and_then_the_answer(probe, capsys, tmp_path):
    assert probe("--out", "counts", "train.py", "3", "--every") == 0
    printed = capsys.readouterr().out
    assert printed.startswith("trained ['3', '--every']\n")
    assert "\nmine\nGradients in step 1\n" in printed
    answer = (
        "Float16 fits with a loss scale: without one 100% of the values that are not zero are outside its normal "
        "range, with a loss scale of 2**35 0%."
    )
    assert answer in " ".join(printed.split())
    (counts,) = records.read(tmp_path / "counts")
    assert counts.full_precision
    assert exit_code(["plot", "counts"]) == 0


def test_a_module_is_probed_too_and_the_last_counted_step_is_shown(probe, capsys):
    assert probe("--every", "2", "-m", "train", "4") == 0
    assert "\nmine\nGradients in step 3\n" in capsys.readouterr().out


@pytest.mark.parametrize(("end", "code"), [("sys.exit(3)", 3), ("sys.exit()", 0), ("raise KeyError(1)", 1), ("1", 0)])
def test_the_exit_code_is_the_programs_and_the_report_is_printed_in_any_case(end, code, probe, capsys):
    assert probe("train.py", "1", end=end) == code
    assert "Float16 fits with a loss scale" in capsys.readouterr().out


def test_an_exit_with_a_text_is_shown_as_python_shows_it(probe, capsys):
    assert probe("train.py", "1", end="sys.exit('wrong data')") == 1
    assert "wrong data\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["train.py", "0"], "no Keras 3 or tf_keras optimizer took a step"),
        (["none.py"], "can't open file"),
        ([], "Call tf-lossscale probe SCRIPT [ARG ...] or probe -m MODULE [ARG ...]."),
        (["--every", "0", "train.py"], "argument --every: must be a whole number that is at least 1, but got: 0"),
    ],
)
def test_without_a_counted_step_it_says_why_and_fails(arguments, text, probe, capsys):
    assert probe(*arguments) == 2
    assert text in capsys.readouterr().err


def test_a_program_that_scales_its_loss_is_told_how_to_read_the_report(probe, capsys):
    program = """
import tensorflow as tf
model = tf.keras.Sequential([tf.keras.Input((1,)), tf.keras.layers.Dense(1, dtype="mixed_float16")])
model.compile("sgd", "mse", auto_scale_loss=True)
optimizer = tf.keras.optimizers.LossScaleOptimizer(tf.keras.optimizers.SGD())
model.compile(optimizer, "mse")
model.fit(tf.ones([4, 1]), tf.ones([4, 1]), verbose=0)
"""
    if not hasattr(tf.keras.optimizers, "LossScaleOptimizer"):
        pytest.skip("Keras 2 has its wrapper elsewhere")
    assert probe("train.py", program=program) == 2
    error = capsys.readouterr().err
    assert "scales its loss already" in error
    assert 'diagnose="exponents"' in error
