"""Who scales and who unscales: the two contracts, in every order that real code has."""

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf

from tests import loops
from tests.cases import MODES, combinations, named
from tests.families import ALL_FAMILIES, FAMILIES, IDS, all_families
from tf_lossscale import LossScaleOptimizer, SharedLossScale
from tf_lossscale.core import replicas

compiled = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])


def run(step, compiled, steps=3):
    function = tf.function(step) if compiled else step
    for _ in range(steps):
        function()


def bare(family, steps=3):
    weight = tf.Variable(2.0)
    inner = family.sgd()
    for _ in range(steps):
        with tf.GradientTape() as tape:
            loss = 0.25 * weight**2
        family.apply(inner, [tape.gradient(loss, weight)], [weight])
    return weight.numpy()


def setup(family):
    return tf.Variable(2.0), LossScaleOptimizer(family.sgd(), initial_scale=1024.0)


def gradient_of(weight, scale):
    """The gradient of the loss that `bare` lowers, scaled by a function."""
    with tf.GradientTape() as tape:
        loss = scale(0.25 * weight**2)
    return tape.gradient(loss, weight)


@all_families
def test_grad_loss_multiplies_the_gradient(family):
    weight, optimizer = setup(family)
    optimizer.minimize(lambda: 3.0 * weight, [weight], grad_loss=tf.constant(0.5))
    assert weight.numpy() == 2.0 - 0.5 * 1.5


@all_families
def test_a_second_update_after_one_scale_loss_raises_since_its_gradients_may_be_of_either_kind(family):
    weight, optimizer = setup(family)
    gradient = gradient_of(weight, optimizer.scale_loss)
    optimizer.apply_gradients([(gradient, weight)])
    assert weight.numpy() == 1.5
    before = optimizer.state()
    for of_either_kind in (gradient, tf.constant(1.0)):
        with pytest.raises(RuntimeError, match="one of two ways"):
            optimizer.apply_gradients([(of_either_kind, weight)])
    assert (weight.numpy(), optimizer.state()) == (1.5, before)
    optimizer.apply_gradients([(optimizer.get_unscaled_gradients([gradient])[0], weight)])
    assert weight.numpy() == 1.0


@all_families
@pytest.mark.parametrize("method", ["apply_gradients", "apply"])
def test_an_update_that_raises_an_error_can_be_repeated(family, method, monkeypatch):
    def out_of_memory(*args, **kwargs):
        raise tf.errors.ResourceExhaustedError(None, None, "no memory is left")

    weight, optimizer = setup(family)
    optimizer.scale_loss(0.0)
    pair = [tf.constant(1024.0)], [weight]
    update = (lambda: optimizer.apply(*pair)) if method == "apply" else lambda: optimizer.apply_gradients(zip(*pair))
    with monkeypatch.context() as context, pytest.raises(tf.errors.ResourceExhaustedError):
        context.setattr(type(optimizer._family), "apply", out_of_memory)
        update()
    assert weight.numpy() == 2.0
    update()
    assert weight.numpy() == 1.5


@all_families
def test_forgetting_both_warns_once_and_applies_the_gradients_as_they_are(family, warnings):
    weight, optimizer = setup(family)
    for _ in range(3):
        optimizer.apply_gradients([(tf.constant(1.0), weight)])
    assert weight.numpy() == 0.5
    (said,) = warnings
    assert "get_scaled_loss() and LossScaleOptimizer.get_unscaled_gradients()" in said


@all_families
def test_forgetting_to_scale_or_to_unscale_warns_once_and_names_what_was_forgotten(family, warnings):
    weight, optimizer = setup(family)
    optimizer.get_scaled_loss(tf.constant(1.0))
    optimizer.apply_gradients([(tf.constant(1.0), weight)])
    weight, optimizer = setup(family)
    for _ in range(3):
        optimizer.apply([tf.constant(1024.0)], [weight])
    assert weight.numpy() == 0.5
    of_apply_gradients, of_apply = warnings
    assert "call LossScaleOptimizer.get_unscaled_gradients() before" in of_apply_gradients
    assert "training will stall" in of_apply


def unscaled_in(place, optimizer, weight):
    """A gradient that was unscaled in a place, and that no mark tells of, unless it is passed on as it is."""

    def as_it_is():
        return optimizer.get_unscaled_gradients([gradient_of(weight, optimizer.get_scaled_loss)])[0]

    def inside():
        with tf.GradientTape() as tape:
            loss = optimizer.scale_inside(lambda: 3.0 * weight)()
        return tape.gradient(loss, weight)

    gradient = lambda: 1.0 * as_it_is()  # noqa: E731
    places = {"as it is": as_it_is, "eager": gradient, "function": tf.function(gradient), "inside": tf.function(inside)}
    return places[place]()


@pytest.mark.parametrize(
    ("place", "compiled", "family"),
    combinations(["as it is", "eager", "function", "inside"], MODES, ALL_FAMILIES, usual=11),
)
def test_apply_refuses_unscaled_gradients_and_what_was_made_of_them(family, compiled, place):
    if family.name == "sonnet":
        pytest.skip("Sonnet's apply takes unscaled gradients as they are")
    weight, optimizer = setup(family)
    before = optimizer.state()

    def step():
        optimizer.apply([unscaled_in(place, optimizer, weight)], [weight])

    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"has already divided these(?s:.*)one of two ways"):
            run(step, compiled, steps=1)
    assert (weight.numpy(), optimizer.state()) == (2.0, before)


# Nothing is scaled or unscaled twice. ----------------------------------------------------------------------------


def sparse(values):
    return tf.IndexedSlices(values, tf.constant([0]), tf.constant([2]))


@all_families
@compiled
@pytest.mark.parametrize("kind", [tf.identity, sparse], ids=["dense", "sparse"])
def test_gradients_are_unscaled_once(family, compiled, kind):
    _, optimizer = setup(family)

    def step():
        scaled = [None, kind(tf.constant([1024.0]))]
        once = optimizer.get_unscaled_gradients(iter(scaled))
        with pytest.raises(RuntimeError, match=r"get_unscaled_gradients\(\) got a gradient that is already unscaled"):
            optimizer.get_unscaled_gradients(once)
        again = optimizer.get_unscaled_gradients(scaled)  # as for their norm
        return [getattr(gradient, "values", gradient) for gradient in (once[1], again[1])]

    once, again = tf.function(step)() if compiled else step()
    assert float(once[0]) == float(again[0]) == 1.0


@pytest.mark.parametrize("method", ["get_scaled_loss", "scale_loss"])
@pytest.mark.parametrize(
    "divided",
    named(
        {
            "quotient": lambda gradient, scale, total: gradient / scale,
            "product": lambda gradient, scale, total: gradient * (1.0 / scale),
            "sum in a variable": lambda gradient, scale, total: total.assign_add(gradient) / scale,
        }
    ),
)
def test_a_gradient_of_another_function_that_is_divided_by_hand_is_unscaled(method, divided, warnings):
    weight, optimizer = setup(FAMILIES[0])
    total = tf.Variable(0.0, trainable=False)
    scaled = tf.function(lambda: gradient_of(weight, getattr(optimizer, method)))
    updates = {
        "apply_gradients": lambda gradient: optimizer.apply_gradients([(gradient, weight)]),
        "apply": lambda gradient: optimizer.apply([gradient], [weight]),
        "get_unscaled_gradients": lambda gradient: optimizer.get_unscaled_gradients([gradient]),
    }

    def take(update):
        tf.function(lambda gradient: updates[update](divided(gradient, optimizer.loss_scale, total)))(scaled())

    take("apply_gradients")
    assert weight.numpy() == 1.5 and not warnings
    with pytest.raises(RuntimeError, match="has already divided these gradients"):
        take("apply")
    with pytest.raises(RuntimeError, match="it was divided by the loss scale or by its own norm"):
        take("get_unscaled_gradients")
    assert weight.numpy() == 1.5


@pytest.mark.parametrize(
    ("second", "compiled", "family"),
    combinations(["get_scaled_loss", "scale_loss", "minimize", "compute_gradients"], MODES, ALL_FAMILIES, usual=11),
)
def test_a_loss_is_scaled_once(family, compiled, second):
    weight, optimizer = setup(family)

    def step():
        for first, dtype in (("get_scaled_loss", tf.float16), ("get_scaled_loss", tf.float32), ("scale_loss", None)):
            with tf.GradientTape() as tape:
                loss = getattr(optimizer, first)(tf.cast(3.0 * weight, dtype or tf.float32))
            with pytest.raises(RuntimeError, match="This loss is scaled already"):
                if second in ("minimize", "compute_gradients"):
                    getattr(optimizer, second)(loss, var_list=[weight], tape=tape)
                else:
                    getattr(optimizer, second)({"loss": loss})
            with pytest.raises(RuntimeError, match="This loss is scaled already"):
                optimizer.get_scaled_loss(getattr(optimizer, first)(lambda: weight * 3.0))()

    run(step, compiled, steps=1)
    assert weight.numpy() == 2.0
    optimizer.minimize(lambda: 3.0 * weight, var_list=[weight])
    assert weight.numpy() == 0.5


def test_a_loss_of_two_optimizers_is_scaled_and_unscaled_by_both_unless_they_share_the_scale():
    family = ALL_FAMILIES[0]
    weight = tf.Variable(2.0)
    first, second = (LossScaleOptimizer(family.sgd(), initial_scale=scale) for scale in (8.0, 64.0))
    with tf.GradientTape() as tape:
        loss = second.get_scaled_loss(first.get_scaled_loss(3.0 * weight))
    gradients = first.get_unscaled_gradients(second.get_unscaled_gradients([tape.gradient(loss, weight)]))
    assert gradients[0].numpy() == 3.0
    shared = SharedLossScale(initial_scale=8.0)
    first, second = (LossScaleOptimizer(family.sgd(), loss_scale=shared) for _ in range(2))
    with pytest.raises(RuntimeError, match="scaled already"):
        first.get_scaled_loss(second.get_scaled_loss(tf.constant(1.0)))
    with pytest.raises(RuntimeError, match="already unscaled, because an earlier call returned it"):
        first.get_unscaled_gradients(second.get_unscaled_gradients([tf.constant(1.0)]))


@all_families
def test_after_a_function_was_traced_for_unscaled_gradients_no_function_may_return_scaled_ones(family):
    weight, optimizer = setup(family)
    update = tf.function(lambda gradient: optimizer.apply_gradients([(gradient, weight)]))
    update(tf.constant(0.0))  # as is done to make slots
    gradient = tf.function(lambda: gradient_of(weight, optimizer.scale_loss))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"a function that was traced before passes unscaled ones to apply_grad"):
            update(gradient())
    assert weight.numpy() == 2.0
    run(lambda: optimizer.apply_gradients([(gradient_of(weight, optimizer.scale_loss), weight)]), compiled=True)
    optimizer.minimize(lambda: 0.25 * weight**2, var_list=[weight])
    assert weight.numpy() == bare(family, steps=4)


@all_families
def test_a_keras_3_step_may_follow_an_accumulation_in_two_functions(family):
    if family.name == "sonnet":
        pytest.skip("Sonnet's apply takes gradients of both kinds, and these may be of either")
    weight, optimizer = setup(family)
    total = tf.Variable(0.0)

    @tf.function
    def micro_step():
        total.assign_add(loops.unscaled_gradients(optimizer, lambda: 0.125 * weight**2, [weight])[0])

    @tf.function
    def update():
        optimizer.apply_gradients([(total.read_value(), weight)])
        total.assign(0.0)

    for _ in range(2):
        micro_step(), micro_step(), update()
        optimizer.apply([gradient_of(weight, optimizer.scale_loss)], [weight])
    assert weight.numpy() == bare(family, steps=4)


@all_families
@compiled
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_a_loss_that_another_optimizer_scaled_is_refused_unless_they_share_the_scale(family, compiled, shared):
    weights = [tf.Variable(2.0), tf.Variable(2.0)]
    scale = SharedLossScale(1024.0)
    arguments = {"loss_scale": scale} if shared else {"initial_scale": 1024.0}
    optimizers = [LossScaleOptimizer(family.sgd(), **arguments) for _ in weights]
    for optimizer, weight in zip(optimizers, weights):
        optimizer.build([weight])

    def step():
        with tf.GradientTape() as tape:
            loss = optimizers[0].scale_loss(0.25 * (weights[0] ** 2 + weights[1] ** 2))
        pairs = [[pair] for pair in zip(tape.gradient(loss, weights), weights)]
        if shared:
            scale.apply_gradients(zip(optimizers, pairs))
        else:
            for optimizer, grads_and_vars in zip(optimizers, pairs):
                optimizer.apply_gradients(grads_and_vars)

    if shared:
        run(step, compiled)
        assert [weight.numpy() for weight in weights] == [bare(family)] * 2
        return
    for _ in range(2):  # in the second step, both optimizers have trained before
        with pytest.raises(RuntimeError, match="of another LossScaleOptimizer"):
            run(step, compiled, steps=1)
        assert weights[1].numpy() == 2.0
        loops.step(optimizers[1], lambda: weights[1] * 0.0, weights[1:])


@pytest.mark.parametrize("order", ["own last", "own first", "alone"])
def test_a_gradient_of_a_loss_that_another_optimizer_scaled_is_not_unscaled(order):
    family, weight = ALL_FAMILIES[0], tf.Variable(1.0)
    one, two = (LossScaleOptimizer(family.sgd(), initial_scale=scale) for scale in (1024.0, 256.0))

    @tf.function
    def step():
        with tf.GradientTape(persistent=True) as tape:
            scaled = [one.get_scaled_loss(0.5 * weight)]
            if order != "alone":
                scaled.insert(len(scaled) * (order == "own last"), two.get_scaled_loss(0.25 * weight))
        gradients = tape.gradient(scaled[0 if order != "own first" else 1], [weight])
        one.apply_gradients(zip(two.get_unscaled_gradients(gradients), [weight]))

    with pytest.raises(RuntimeError, match="a gradient of a loss that another LossScaleOptimizer scaled"):
        step()
    assert float(weight) == 1.0


@all_families
def test_an_update_after_two_gradient_functions_of_different_contracts_raises(family):
    weight, optimizer = setup(family)
    scale = tf.function(lambda: optimizer.scale_loss(tf.constant(1.0)))
    unscale = tf.function(lambda scaled: optimizer.get_unscaled_gradients([scaled])[0])
    update = tf.function(lambda gradient: optimizer.apply_gradients([(gradient, weight)]))
    with pytest.raises(RuntimeError, match="Cannot tell whether these gradients are scaled"):
        update(unscale(scale()))
    assert weight.numpy() == 2.0


def test_after_a_step_in_eager_mode_a_function_of_the_same_contract_is_taken_and_of_the_other_one_raises():
    weight, optimizer = setup(FAMILIES[0])
    optimizer.apply_gradients([(gradient_of(weight, optimizer.scale_loss), weight)])
    scaled = tf.function(lambda: gradient_of(weight, optimizer.scale_loss))
    optimizer.apply_gradients([(scaled(), weight)])
    assert weight.numpy() == bare(FAMILIES[0], steps=2)

    weight, optimizer = setup(FAMILIES[0])
    optimizer.apply_gradients([(gradient_of(weight, optimizer.scale_loss), weight)])
    unscaled = tf.function(lambda: loops.unscaled_gradients(optimizer, lambda: 0.25 * weight**2, [weight])[0])
    with pytest.raises(RuntimeError, match="Cannot tell whether these gradients are scaled"):
        optimizer.apply_gradients([(unscaled(), weight)])
    assert weight.numpy() == bare(FAMILIES[0], steps=1)


def test_apply_warns_after_unscaling_in_eager_mode_unless_a_loss_was_scaled_in_its_own_function(warnings):
    weight, optimizer = setup(FAMILIES[0])
    scaled = tf.function(lambda: gradient_of(weight, optimizer.scale_loss))
    step = tf.function(lambda: optimizer.apply([gradient_of(weight, optimizer.scale_loss)], [weight]))
    optimizer.get_unscaled_gradients([gradient_of(weight, optimizer.scale_loss)])
    step()
    assert not warnings
    optimizer.apply([scaled()], [weight])
    assert "they may be divided twice" in warnings[0]
    assert weight.numpy() == bare(FAMILIES[0], steps=2)


@all_families
def test_results_of_unscaling_beside_a_gradient_that_was_passed_to_it_raise_and_change_nothing(family):
    weight, optimizer = setup(family)
    other = tf.Variable(1.0)
    scaled = [tf.constant(8.0), tf.constant(16.0)]
    unscaled = optimizer.get_unscaled_gradients(scaled)
    with pytest.raises(RuntimeError, match="Some of these gradients are results of get_unscaled_gradients"):
        optimizer.apply_gradients([(unscaled[0], weight), (scaled[1], other)])
    assert (weight.numpy(), other.numpy()) == (2.0, 1.0)


@all_families
@compiled
def test_gradients_that_scale_inside_unscaled_and_losses_that_are_scaled_in_it_are_refused(family, compiled):
    weight, optimizer = setup(family)

    def unscaled_twice():
        with tf.GradientTape() as tape:
            loss = optimizer.scale_inside(lambda: weight**2)()
        optimizer.get_unscaled_gradients([tape.gradient(loss, weight)])

    def scaled_twice():
        optimizer.scale_inside(lambda: optimizer.get_scaled_loss(weight**2))()

    for step, text in ((unscaled_twice, "which has already unscaled them"), (scaled_twice, "loss is scaled already")):
        with pytest.raises(RuntimeError, match=text):
            run(step, compiled, steps=1)


@all_families
@compiled
def test_a_gradient_that_overflows_when_it_is_unscaled_skips_the_step(family, compiled):
    weight = tf.Variable(1.0)
    optimizer = LossScaleOptimizer(family.sgd(), initial_scale=1e-30, min_scale=1e-35)

    def step():
        optimizer.scale_loss(0.0)
        optimizer.apply([tf.constant(1e30)], [weight])
        optimizer.apply_gradients(zip(optimizer.get_unscaled_gradients([tf.constant(1e30)]), [weight]))

    run(step, compiled, steps=1)
    assert (weight.numpy(), int(optimizer.skipped_steps)) == (1.0, 2)


@all_families
@compiled
@pytest.mark.parametrize("method", ["get_scaled_loss", "scale_loss"])
def test_a_loss_function_that_is_scaled_once_is_called_and_scaled_in_every_step(family, compiled, method):
    weight, optimizer = setup(family)
    calls = []

    def loss_fn():
        calls.append(1)
        return 0.25 * weight**2, {"regularization": tf.constant(4.0, tf.float16)}

    scaled_fn = getattr(optimizer, method)(loss_fn)
    assert not calls
    assert [float(part) for part in tf.nest.flatten(scaled_fn())] == [1024.0, 4096.0]
    optimizer.set_state({"loss_scale": 16, "dynamic_counter": 0})
    assert [float(part) for part in tf.nest.flatten(scaled_fn())] == [16.0, 64.0]
    assert len(calls) == 2

    def step():
        with tf.GradientTape() as tape:
            loss, _ = scaled_fn()
        gradients = [tape.gradient(loss, weight)]
        gradients = optimizer.get_unscaled_gradients(gradients) if method == "get_scaled_loss" else gradients
        optimizer.apply_gradients(zip(gradients, [weight]))

    run(step, compiled)
    assert weight.numpy() == bare(family)


@all_families
@compiled
def test_gradients_that_another_optimizers_scale_multiplies_are_refused(family, compiled, warnings):
    weight, one = setup(family)
    two = LossScaleOptimizer(family.sgd(), initial_scale=8.0)
    two.build([weight])

    def step(scaled):
        gradients = [gradient_of(weight, one.get_scaled_loss)]
        unscaled = one.get_unscaled_gradients(gradients)
        two.apply_gradients(zip(gradients if scaled else unscaled, [weight]))

    with pytest.raises(RuntimeError, match="loss scale of another LossScaleOptimizer"):
        run(lambda: step(scaled=True), compiled, steps=1)
    assert weight.numpy() == 2.0
    run(lambda: step(scaled=False), compiled)
    assert weight.numpy() == bare(family) and warnings == []


def test_after_a_trace_that_failed_only_the_first_doubtful_update_raises():
    weight, optimizer = setup(FAMILIES[0])

    def fails():
        optimizer.scale_loss(weight)
        raise ValueError

    with pytest.raises(ValueError):
        tf.function(fails)()
    gc.collect()

    def step():
        gradients = loops.unscaled_gradients(optimizer, lambda: 0.25 * weight**2, [weight])
        optimizer.apply_gradients(zip(tf.clip_by_global_norm(gradients, 100.0)[0], [weight]))

    with pytest.raises(RuntimeError, match="Cannot tell"):
        step()
    run(step, False)
    assert weight.numpy() == bare(FAMILIES[0])


def test_an_abandoned_loss_does_not_contradict_a_traced_update_of_either_kind():
    family = next(each for each in ALL_FAMILIES if each.name == "sonnet")
    weight, optimizer = setup(family)
    optimizer.get_scaled_loss(weight)  # for a log
    update = tf.function(lambda gradient: optimizer.apply([gradient], [weight]))
    for _ in range(2):
        update(tf.constant(1024.0))
    rate = (2.0 - weight.numpy()) / 2
    assert rate > 0 and optimizer.loss_scale.numpy() == 1024.0


@pytest.mark.parametrize(
    "change",
    [
        lambda g, weight: tf.clip_by_norm(g, 10.0),
        lambda g, weight: g * 0.5,
        lambda g, weight: tf.identity(g),
        lambda g, weight: g + 0.5 * weight,
    ],
)
def test_in_a_function_a_gradient_is_not_unscaled_again_after_an_operation(change):
    weight, optimizer = setup(FAMILIES[-1])

    @tf.function
    def step():
        (gradient,) = loops.unscaled_gradients(optimizer, lambda: 0.25 * weight, [weight])
        optimizer.apply_gradients(zip(optimizer.get_unscaled_gradients([change(gradient, weight)]), [weight]))

    with pytest.raises(RuntimeError, match="already unscaled"):
        step()
    assert weight.numpy() == 2.0


@pytest.mark.parametrize(
    "change",
    [
        lambda loss, _: loss * 1.0,
        lambda loss, _: loss + 0.5,
        lambda loss, _: tf.reduce_mean(loss),
        lambda loss, weight: loss / 3.0 + weight,
        lambda loss, weight: tf.reduce_mean(tf.stack([loss, weight])) * weight,
        lambda loss, _: tf.sqrt(loss),
        lambda loss, weight: tf.gradients(loss, weight)[0] ** 2 + weight,
        lambda loss, weight: tf.cond(weight > 0, lambda: loss, lambda: weight),
    ],
)
def test_in_a_function_a_loss_is_not_scaled_again_after_an_operation(change):
    weight, optimizer = setup(FAMILIES[-1])

    @tf.function
    def scale_twice():
        x = 1.0 * weight
        optimizer.get_scaled_loss(change(optimizer.get_scaled_loss(0.25 * x), x))

    with pytest.raises(RuntimeError, match="scaled already"):
        scale_twice()


@pytest.mark.parametrize(
    "change",
    [
        lambda loss, scale, weight: weight * tf.stop_gradient(loss / scale),
        lambda loss, scale, weight: weight / loss,
        lambda loss, scale, weight: weight * tf.cast(loss > 1.0, tf.float32),
        lambda loss, scale, weight: weight + tf.gradients(loss, weight)[0] / scale,
    ],
)
def test_in_a_function_a_loss_may_depend_on_a_scaled_one_of_which_it_is_no_multiple(change):
    weight, optimizer = setup(FAMILIES[-1])

    @tf.function
    def scaled_and_not():
        x = 1.0 * weight
        loss = change(optimizer.get_scaled_loss(0.25 * x), optimizer.loss_scale, x)
        return optimizer.get_scaled_loss(loss), loss

    scaled, loss = scaled_and_not()
    assert scaled == 1024.0 * loss


def penalty(optimizer, weight):
    with tf.GradientTape() as tape:
        with tf.GradientTape() as inner_tape:
            loss = optimizer.get_scaled_loss(weight**2)
        (inner,) = optimizer.get_unscaled_gradients([inner_tape.gradient(loss, weight)])
        loss = optimizer.get_scaled_loss(0.125 * (inner + weight * inner))
    (gradient,) = optimizer.get_unscaled_gradients([tape.gradient(loss, weight)])
    return gradient  # 0.125 * (2 + 4 * 2) at 2


def normalized(optimizer, weight):
    with tf.GradientTape() as tape:
        loss = optimizer.get_scaled_loss(0.25 * weight)
    scaled = tape.gradient(loss, weight)
    (unscaled,) = optimizer.get_unscaled_gradients([scaled])
    (gradient,) = optimizer.get_unscaled_gradients([scaled / tf.abs(unscaled)])
    return gradient  # 1


def in_a_loop(optimizer, weight):
    total = tf.constant(0.0)
    for _ in tf.range(3):
        total += loops.unscaled_gradients(optimizer, lambda: 0.25 * weight, [weight])[0]
    return total  # 0.75


@pytest.mark.parametrize(("program", "gradient"), [(penalty, 1.25), (normalized, 1.0), (in_a_loop, 0.75)])
def test_in_a_function_a_scaled_gradient_may_depend_on_unscaled_ones(program, gradient):
    weight, optimizer = setup(FAMILIES[-1])
    step = tf.function(lambda: optimizer.apply_gradients([(program(optimizer, weight), weight)]))
    step()
    assert weight.numpy() == 2.0 - 0.5 * gradient


def test_another_worker_changes_the_scale_between_the_loss_and_its_gradients(monkeypatch):
    monkeypatch.setattr(replicas, "workers_step_alone", lambda: True)
    optimizer = LossScaleOptimizer(FAMILIES[0].sgd(), initial_scale=8.0)
    optimizer.get_scaled_loss(tf.constant(1.0))
    optimizer._loss_scale.current_loss_scale.assign(4.0)
    (gradient,) = optimizer.get_unscaled_gradients([tf.constant(8.0)])
    assert gradient.numpy() == 1.0


def test_an_abandoned_scaled_loss_lends_its_factor_to_no_gradients_of_a_function():
    weight = tf.Variable(4.0)
    optimizer = LossScaleOptimizer(FAMILIES[0].sgd(), initial_scale=8.0, dynamic_growth_steps=1)
    gradient = tf.function(lambda: gradient_of(weight, optimizer.get_scaled_loss))
    optimizer.get_scaled_loss(0.0)  # for a log
    for _ in range(3):
        optimizer.apply_gradients(zip(optimizer.get_unscaled_gradients([gradient()]), [weight]))
    assert weight.numpy() == 4.0 * 0.75**3


def test_a_loss_scaled_in_a_loop_and_gradients_outside_of_it():
    optimizer = LossScaleOptimizer(FAMILIES[0].sgd(), initial_scale=8.0)

    @tf.function
    def gradients():
        total = tf.constant(0.0)
        for _ in tf.range(2):
            total += optimizer.get_scaled_loss(1.0)
        return optimizer.get_unscaled_gradients([total])

    assert gradients()[0].numpy() == 2.0


def test_a_traced_function_is_not_kept_alive_by_its_factors():
    optimizer = LossScaleOptimizer(FAMILIES[0].sgd(), initial_scale=8.0)
    function = tf.function(lambda: optimizer.get_unscaled_gradients([optimizer.get_scaled_loss(1.0)]))
    graph = weakref.ref(function.get_concrete_function().graph)
    del function
    gc.collect()
    assert graph() is None


def test_a_traced_step_moves_the_scale_between_an_eager_loss_and_its_gradients():
    optimizer, weight = LossScaleOptimizer(FAMILIES[0].sgd(), initial_scale=8.0), tf.Variable(1.0)

    @tf.function
    def overflow():
        optimizer.apply_gradients([(tf.constant(float("inf")), weight)])

    with tf.GradientTape() as tape:
        loss = optimizer.get_scaled_loss(0.25 * weight)
    overflow()
    (gradient,) = optimizer.get_unscaled_gradients([tape.gradient(loss, weight)])
    assert optimizer.loss_scale.numpy() == 4.0 and gradient.numpy() == 0.25


@pytest.mark.parametrize("family", FAMILIES[:2], ids=IDS[:2])
def test_apply_of_what_may_be_unscaled_warns_once(family, warnings):
    weight, optimizer = setup(family)
    loops.step(optimizer, lambda: weight * 1.0, [weight])
    for _ in range(2):
        optimizer.apply([tf.constant(1.0)], [weight])
    (said,) = warnings
    assert "may be divided twice" in said


def test_a_float16_loss_that_cannot_hold_the_scale_warns(warnings):
    optimizer = LossScaleOptimizer(ALL_FAMILIES[0].sgd(), initial_scale=2.0**17)
    assert np.isinf(optimizer.get_scaled_loss(tf.constant(1e-3, tf.float16)))
    assert "Cast the loss first" in warnings[0]
    assert float(optimizer.get_scaled_loss(tf.constant(1e-3))) == pytest.approx(131.072)


CHANGES_OF_SCALED = named(
    {
        "clipped by norm": lambda gradients: tf.clip_by_global_norm(gradients, 1.0)[0],
        "clipped by value": lambda gradients: [tf.clip_by_value(gradient, -1.0, 1.0) for gradient in gradients],
    }
)


@pytest.mark.parametrize("way", ["unscale", "apply_gradients", "apply"])
@pytest.mark.parametrize("change", CHANGES_OF_SCALED)
def test_a_gradient_that_is_changed_while_it_is_scaled_is_warned_of_once(change, way, warnings):
    weight = tf.Variable([1.0, 2.0])
    optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(0.5), initial_scale=1024)
    optimizer.build([weight])

    @tf.function
    def step(changes_first):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight**2)
            loss = optimizer.get_scaled_loss(loss) if way == "unscale" else optimizer.scale_loss(loss)
        gradients = tape.gradient(loss, [weight])
        gradients = change(gradients) if changes_first else gradients
        if way == "unscale":
            gradients = optimizer.get_unscaled_gradients(gradients)
            gradients = gradients if changes_first else change(gradients)
        if way == "apply":
            optimizer.apply(gradients, [weight])
        else:
            optimizer.apply_gradients(zip(gradients, [weight]))

    step(False)
    assert not warnings
    step(True)
    assert [text for text in warnings if "while the loss scale multiplied it" in text] == warnings
    assert len(warnings) == 1


def test_a_bound_that_is_multiplied_by_the_scale_is_no_change(warnings):
    weight = tf.Variable([1.0, 2.0])
    optimizer = LossScaleOptimizer(tf.keras.optimizers.SGD(0.5), initial_scale=1024)
    optimizer.build([weight])

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = optimizer.get_scaled_loss(tf.reduce_sum(weight**2))
        gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, [weight]), 1.0 * optimizer.loss_scale)
        optimizer.apply_gradients(zip(optimizer.get_unscaled_gradients(gradients), [weight]))

    step()
    assert not warnings
    assert np.linalg.norm(weight.numpy() - [1.0, 2.0]) == pytest.approx(0.5)


@pytest.mark.parametrize("way", ["get_scaled_loss", "scale_loss"])
def test_a_whole_step_of_another_optimizer_in_a_function_says_nothing_of_later_gradients(way):
    first, second = tf.Variable(1.0), tf.Variable(1.0)
    other, optimizer = (LossScaleOptimizer(tf.keras.optimizers.SGD(0.5), initial_scale=1024) for _ in range(2))
    other.build([first])

    @tf.function
    def whole_step():
        with tf.GradientTape() as tape:
            loss = getattr(other, way)(first**2)
        gradients = tape.gradient(loss, [first])
        if way == "get_scaled_loss":
            gradients = other.get_unscaled_gradients(gradients)
        other.apply_gradients(zip(gradients, [first]))

    for _ in range(2):
        whole_step()
        with tf.GradientTape() as tape:
            loss = 0.5 * second
        optimizer.apply_gradients([(tape.gradient(loss, second), second)])
    assert (first.numpy(), second.numpy()) == (0.0, 0.5)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_in_a_trace_is_not_replaced(error):
    weight, optimizer = tf.Variable(1.0), LossScaleOptimizer(tf.keras.optimizers.SGD(0.5))

    @tf.function
    def update(gradient):
        optimizer.apply_gradients([(gradient, weight)])

    @tf.function
    def fails():
        optimizer.scale_loss(weight**2)
        raise error("of the user")

    with tf.GradientTape() as tape:
        loss = optimizer.get_scaled_loss(weight**2)
    update(*optimizer.get_unscaled_gradients(tape.gradient(loss, [weight])))
    with pytest.raises(error, match="of the user"):
        fails()
