"""Adafactor for Keras 3."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tf_lossscale.libraries import keras_versions
from tf_lossscale.optimizers.torch_surface import TorchSurface
from tf_lossscale.wrapper import checks

keras: Any = keras_versions.keras_3()


@keras.saving.register_keras_serializable(package="tf_lossscale")
class Adafactor(TorchSurface, keras.optimizers.Optimizer):
    r"""Adafactor with the algorithm and the methods of `torch.optim.Adafactor`, as a Keras 3 optimizer.

    For a parameter X with gradient G (-G with `maximize`), at its t-th step::

        w     = t ** beta2_decay                             # 1 - beta2_t in the paper
        alpha = max(eps2, RMS(X)) * min(lr, 1 / sqrt(t))
        X     = X * (1 - lr * weight_decay)
        if X has two or more dimensions, over the last two:
            R = R + w * (mean of G**2 over each row - R)     # row_var, shape (..., n, 1)
            C = C + w * (mean of G**2 over each column - C)  # col_var, shape (..., 1, m)
            V = R C / max(mean(R), eps1)
        otherwise:
            V = V + w * (G**2 - V)                           # variance
        U     = G / sqrt(max(V, eps1**2))
        X     = X - alpha * U / max(1, RMS(U) / d)

    The state of an (n, m) matrix consists of n + m numbers and the step count t. By default, eps1 is the distance from
    1 to the next larger number of the parameter's dtype.

    Use it as a Keras optimizer, with `apply_gradients`, or with `compile` and `fit`:

    >>> import tensorflow as tf
    >>> from tf_lossscale.optimizers import Adafactor
    >>> optimizer = Adafactor(lr=0.25)
    >>> weight = tf.Variable([4.0])
    >>> _ = optimizer.apply_gradients([(tf.constant([1.0]), weight)])
    >>> round(weight.numpy().item(), 4)
    3.0

    Or use it as in PyTorch, with parameter groups and `step`:

    >>> kernel, bias = tf.Variable(tf.ones([2, 3])), tf.Variable(tf.zeros([3]))
    >>> groups = [{"params": [kernel], "weight_decay": 0.1}, {"params": [bias]}]
    >>> optimizer = Adafactor(groups, lr=0.25)
    >>> loss = optimizer.step(lambda: tf.reduce_sum((tf.ones([1, 2]) @ kernel + bias) ** 2))
    >>> loss.numpy().item(), sorted(optimizer.state_dict())
    (12.0, ['param_groups', 'state'])

    The update of a half-precision parameter is computed in float32. The algorithm differs from the paper's in four
    ways: `lr` replaces the paper's constant of 0.01 as the upper bound of the relative step size, eps1 bounds V from
    below instead of being added to G**2, R and C are means instead of sums, and there is a decoupled weight decay.

    Args:
        params: the variables to update, as an iterable of variables, of (name, variable) pairs, or of dicts with
            "params" and further options (parameter groups). The names are stored in the group's "param_names" and in
            state dicts. If `params` is None, the optimizer updates the variables that it is built for, as is usual in
            Keras.
        lr: the learning rate, at least 0: a number, a variable (read on every step), a `LearningRateSchedule` or a
            function without arguments. It can also be passed as `learning_rate`.
        beta2_decay: the exponent of w, at most 0.
        eps: (eps1, eps2), each at least 0. If eps1 is None, it depends on the dtype as described above.
        d: the RMS above which an update is scaled down, at least 1.
        weight_decay: the weight decay coefficient, at least 0.
        foreach: whether parameters of the same shape and dtype are stacked and updated together. This saves operations
            if there are many small parameters, but needs memory for the stacks. The first step logs how much memory.
        maximize: whether to ascend the gradient.
        **kwargs: Keras's `name, clipnorm, clipvalue, global_clipnorm, use_ema, ema_momentum, ema_overwrite_frequency,
            loss_scale_factor, gradient_accumulation_steps`.

    Raises:
        TypeError: an argument has the wrong type or is unknown.
        ValueError: a value is out of range, `params` is empty, or one of its entries is not a variable.
        KeyError: a parameter group has no "params".

    Source: `torch.optim.Adafactor`, https://docs.pytorch.org/docs/stable/generated/torch.optim.Adafactor.html;
    Shazeer and Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost, 2018,
    https://arxiv.org/abs/1804.04235
    """

    _keras_arguments = tuple(checks.DEFAULTS)
    _schedules = keras.optimizers.schedules

    def _init_keras(self, **arguments: Any) -> None:
        # Pass a function as a placeholder, because Keras would store a number as float32. The first group's learning
        # rate replaces the placeholder.
        keras.optimizers.Optimizer.__init__(self, learning_rate=float, **arguments)

    # Required by AdafactorBase. ---------------------------------------------------------------------------------

    @property
    def _is_built(self) -> bool:
        return self.built

    def _tensor_variable(self, variable: Any) -> Any:
        return variable.value if isinstance(variable, keras.Variable) else variable

    def _new_rate_variable(self, value: float, name: str) -> Any:
        variable = self.add_variable((), dtype="float64", aggregation="only_first_replica", name=name)
        variable.assign(value)
        if self.built:
            # Files store variables by their position. In an optimizer that is created with all groups, the learning
            # rates come after the step count and before all other variables. TensorFlow does not save a list into
            # which a variable was inserted, and Keras would track the variables in a new list once more.
            variables, place = self.variables[:-1], 1 + len(self._groups)
            ordered = [*variables[:place], variable, *variables[place:]]
            self.__dict__["_variables"] = type(self._variables)(ordered)
            self._track_trackable(self._variables, "_variables", overwrite=True)
            self._tracker.config["variables"] = (self._tracker.config["variables"][0], self._variables)
        return variable

    def _new_moment(self, variable: Any, name: str, shape: Sequence[int], dtype: tf.DType) -> Any:
        path = str(getattr(variable, "path", variable.name)).replace("/", "_").replace(":", "_")
        with self._distribution_strategy.extended.colocate_vars_with(self._tensor_variable(variable)):
            return self.add_variable(shape, dtype=dtype.name, name=f"{path}_{name}")

    def _set_iterations(self, steps: int) -> None:
        self._iterations.assign(steps * (self.gradient_accumulation_steps or 1))
        if self.built and self.gradient_accumulation_steps:
            # The gradients of an unfinished accumulation do not belong to the new step count.
            self._backend_reset_gradient_accumulators()

    def _built_for(self) -> list[Any]:
        return self._trainable_variables

    def _join(self, variables: list[Any]) -> None:
        if self.use_ema or self.gradient_accumulation_steps:
            raise ValueError(
                "add_param_group() must be called before the optimizer is built if `use_ema` or "
                "`gradient_accumulation_steps` is set."
            )
        for variable in variables:
            self._trainable_variables_indices[self._var_key(variable)] = len(self._trainable_variables)
            self._trainable_variables.append(variable)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        variables = None if trainable_variables is None else list(trainable_variables)
        if variables and not self.built:
            # Otherwise the initial values of new variables would wait for the pre-hooks, and call them once more.
            self.build(variables)
        self._between_hooks(
            lambda: super(Adafactor, self).apply(grads, variables),
            lambda: map(self._tensor_variable, self._trainable_variables if variables is None else variables),
        )

    def _distributed_tf_update_step(
        self, distribution: Any, grads_and_vars: Iterable[tuple[Any, Any]], learning_rate: Any
    ) -> None:
        # `learning_rate` is unused, because each parameter group has its own learning rate.
        del learning_rate
        self._update_on_devices(distribution, grads_and_vars)
