"""The training loops of a random program in TensorFlow, for loss scale optimizers from this and other libraries.

The module must also run on Python 3.8, which old releases of TensorFlow need.
"""

import functools

import tensorflow as tf

from tools.fuzz.changes import changed


class Loops:
    """The training loops of a random program, as Python functions or as TensorFlow functions.

    Args:
        program: a Program.
        variables: the variables to train.
        optimizer: the loss scale optimizer.
        strategy: a strategy with two replicas. None means that no strategy is used.
    """

    def __init__(self, program, variables, optimizer, strategy=None):
        self.program, self.variables, self.optimizer, self.strategy = program, variables, optimizer, strategy
        self._kept = {}
        self._calls = [self._traced(loop) for loop in program.loops]

    def call(self, step):
        """Take a step of its loop."""
        gradients, rows = self.program.gradients(step)
        inputs = [*map(tf.constant, gradients), tf.constant(rows), tf.constant(step.number)]
        for function in self._calls[step.loop]:
            function(*inputs)

    def _traced(self, loop):
        """Return a list of functions. Calling all of them, in order, takes one step of the loop."""
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
        """Return a loss whose gradients are `gradients`."""
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
        return self._apply(loop, changed(loop.unscaled, found, number))

    def _scaled(self, loop, loss, scale, number):
        with tf.GradientTape() as tape:
            scaled = scale(loss())
        return changed(loop.scaled, tape.gradient(scaled, self.variables), number)

    def _unscaled(self, loop, gradients):
        """Unscale the gradients: directly, in a `tf.function` or in a `tf.cond`, depending on `loop.place`."""
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
        if self.program.family == "sonnet":
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
        return self._apply(loop, changed(loop.unscaled, found, inputs[-1]))
