"""A program in TensorFlow: its variables, its optimizer and its traced loops."""

import functools

import sonnet
import tensorflow as tf

from fuzz.changes import CHANGES
from fuzz.programs import ADAM, MOMENTUM, RATE, SCALED, SHAPES
from tests import strategies
from tests.families import ALL_FAMILIES
from tf_lossscale import LossScaleOptimizer


def inner_optimizer(family, name, ema=None):
    """Return a family's optimizer with the named update rule, and with averages if `ema` is a `Program.ema`."""
    makers = family.optimizers
    averages = {} if ema is None else {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": ema or None}
    if family.name == "tf1":
        return {
            "sgd": lambda: makers.GradientDescentOptimizer(RATE),
            "momentum": lambda: makers.MomentumOptimizer(RATE, MOMENTUM),
            "adam": lambda: makers.AdamOptimizer(RATE, *ADAM.values()),
        }[name]()
    if family.name == "sonnet":  # Sonnet raises an error for an optimizer without variables
        inner = {
            "sgd": lambda: makers.SGD(RATE),
            "momentum": lambda: makers.Momentum(RATE, MOMENTUM),
            "adam": lambda: makers.Adam(RATE, *ADAM.values()),
        }[name]()
        return sonnet.allow_empty_variables(inner)
    if name == "adam":
        return makers.Adam(RATE, **ADAM, **averages)
    return makers.SGD(RATE, momentum=MOMENTUM if name == "momentum" else 0.0, **averages)


class Machine:
    """The variables, the optimizer and the traced loops of a program."""

    def __init__(self, program):
        self.program = program
        self.family = next(family for family in ALL_FAMILIES if family.name == program.family)
        self.strategy = strategies.get("mirrored_2" if program.mode == "mirrored" else "none")
        with (self.strategy or tf.distribute.get_strategy()).scope():
            self.variables = [
                tf.Variable(tf.ones(shape, dtype), name=f"v{i}")
                for i, (shape, dtype) in enumerate(zip(SHAPES, program.dtypes))
            ]
            self.optimizer = LossScaleOptimizer(
                inner_optimizer(self.family, program.inner, program.ema),
                **program.rules.arguments(),
                jit_compile=program.jit_compile,
            )
        self._kept = {}
        self._calls = [self._traced(loop) for loop in program.loops]

    def run(self, comparison, directory):
        """Take the steps and compare each with the model.

        Args:
            comparison: a Comparison.
            directory: where checkpoints are written.
        """
        for i, step in enumerate(self.program.steps):
            self.between(step.before, directory)
            try:
                self.call(step)
            except RuntimeError as error:
                if not self._is_ambiguous(error):
                    raise
            else:
                comparison.step(step)
            comparison.check(f"after step {i}")
        if self.program.ema is not None and comparison.expected.training.averages:
            with (self.strategy or tf.distribute.get_strategy()).scope():
                self.optimizer.finalize_variable_values()
            comparison.expected.training.finalize()
            comparison.check("after finalize_variable_values")

    def _is_ambiguous(self, error):
        """Return whether an error says that the contract cannot be determined from the calls."""
        contracts = {loop.calls in SCALED for loop in self.program.loops}
        return len(contracts) == 2 and "one of two ways" in str(error)

    def call(self, step):
        """Take a step."""
        gradients, rows = self.program.gradients(step)
        inputs = [*map(tf.constant, gradients), tf.constant(rows), tf.constant(step.number)]
        for function in self._calls[step.loop]:
            function(*inputs)

    def _traced(self, loop):
        """Return the functions that a step of the loop calls, in order."""
        if loop.calls == "two_functions":
            kept = [tf.Variable(tf.zeros_like(variable), trainable=False) for variable in self.variables]
            parts = [functools.partial(self._keep, loop, kept), functools.partial(self._apply_kept, loop, kept)]
        else:
            parts = [functools.partial(self._step, loop)]
        wrap = {
            "eager": lambda function: function,
            "compiled": lambda function: tf.function(function, jit_compile=True),
        }.get(self.program.mode, tf.function)
        return [wrap(functools.partial(self._repeated, loop, part)) for part in parts]

    def _repeated(self, loop, part, *inputs):
        number = inputs[-1]

        def once():
            if self.strategy is None:
                part(*(value[0] for value in inputs[:-1]), number)
            else:
                self.strategy.run(self._on_replica, args=(part, *inputs))

        if loop.repeated == "if":
            tf.cond(number > 1, lambda: [once(), tf.constant(0)][1:], lambda: [tf.constant(0)])
        elif loop.repeated == "while":
            tf.while_loop(lambda i: i < number, lambda i: [once(), i + 1][1:], [tf.constant(0)])
        else:
            once()

    def _on_replica(self, part, *inputs):
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        part(*(tf.gather(value, replica) for value in inputs[:-1]), inputs[-1])

    def _loss(self, loop, gradients, rows):
        """Return a loss that has the given gradients."""
        total = tf.constant(0.0)
        for i, (variable, gradient) in enumerate(zip(self.variables, gradients)):
            if i == 1 and loop.sparse:
                variable = tf.gather(variable, rows)
            if i != loop.missing:
                total += tf.reduce_sum(tf.cast(variable, tf.float32) * gradient)
        return total

    def _step(self, loop, *inputs):
        *gradients, rows, number = inputs
        loss = functools.partial(self._loss, loop, gradients, rows)
        if loop.recompute:
            loss = tf.recompute_grad(loss)
        optimizer, variables = self.optimizer, self.variables
        if loop.calls == "minimize":
            return optimizer.minimize(loss, variables)
        if loop.calls == "apply":
            return optimizer.apply(self._scaled(loop, loss, optimizer.scale_loss, number), variables)
        if loop.calls == "apply_gradients":
            return self._apply(loop, self._scaled(loop, loss, optimizer.scale_loss, number))
        if loop.calls == "compute_gradients":
            found = [gradient for gradient, _ in optimizer.compute_gradients(loss, variables)]
        else:
            found = self._unscaled(loop, self._scaled(loop, loss, optimizer.get_scaled_loss, number))
        return self._apply(loop, _changed(loop.unscaled, found, number))

    def _scaled(self, loop, loss, scale, number):
        with tf.GradientTape() as tape:
            scaled = scale(loss())
        return _changed(loop.scaled, tape.gradient(scaled, self.variables), number)

    def _unscaled(self, loop, gradients):
        """Return the gradients, unscaled in the loop's `place`."""
        present = [i for i, gradient in enumerate(gradients) if gradient is not None]
        unscale = functools.partial(self.optimizer.get_unscaled_gradients, [gradients[i] for i in present])
        if loop.place == "function":
            unscale = tf.function(unscale)
        elif loop.place == "cond":
            unscale = functools.partial(tf.cond, tf.constant(True), unscale, unscale)
        found = dict(zip(present, unscale()))
        return [found.get(i) for i in range(len(gradients))]

    def _apply(self, loop, gradients):
        pairs = list(zip(gradients, self.variables))[:: -1 if loop.backwards else 1]
        if self.family.name == "sonnet":
            return self.optimizer.apply(*zip(*pairs))
        return self.optimizer.apply_gradients(pairs)

    def _keep(self, loop, kept, *inputs):
        *gradients, rows, number = inputs
        loss = functools.partial(self._loss, loop, gradients, rows)
        found = self._unscaled(loop, self._scaled(loop, loss, self.optimizer.get_scaled_loss, number))
        for variable, gradient in zip(kept, found):
            if gradient is not None:
                variable.assign(gradient)
        self._kept[loop] = [gradient is not None for gradient in found]

    def _apply_kept(self, loop, kept, *inputs):
        found = [variable.read_value() if here else None for variable, here in zip(kept, self._kept[loop])]
        return self._apply(loop, _changed(loop.unscaled, found, inputs[-1]))

    def between(self, what, directory):
        """Save the state, overwrite it and restore it."""
        if what == "state":
            state = self.optimizer.state()
            if self.program.rules.dynamic:
                self.optimizer.set_state({"loss_scale": 7.0, "dynamic_counter": 5})
            self.optimizer.set_state(state)
        elif what == "checkpoint":
            checkpoint = tf.train.Checkpoint(optimizer=self.optimizer, variables=self.variables)
            path = checkpoint.write(f"{directory}/checkpoint")
            for variable in self.all_variables():
                variable.assign(tf.cast(tf.ones(variable.shape), variable.dtype))
            checkpoint.read(path).assert_existing_objects_matched()

    def state(self):
        """Return the loss scale and its counters by name."""
        return self.optimizer.state()

    def iterations(self):
        """Return `iterations` on each replica."""
        return list(map(int, self.copies(self.optimizer.iterations)))

    def all_variables(self):
        """Return the variables of the user and of the optimizer."""
        return [*self.variables, *self.optimizer.variables]

    def copies(self, variable):
        """Return the values of a variable on all replicas."""
        if not isinstance(variable, (tf.Variable, tf.distribute.DistributedValues)):
            variable = variable.value  # a Keras 3 variable
        return [
            each.numpy()
            for each in (self.strategy.experimental_local_results(variable) if self.strategy else [variable])
        ]


@tf.autograph.experimental.do_not_convert
def _changed(names, gradients, number):
    for name in names:
        gradients = CHANGES[name].ours(list(gradients), number)
    return gradients
