"""Hooks: functions to call before and after `step`, `state_dict` and `load_state_dict`, as in PyTorch's optimizers."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf
from absl import logging

from tf_lossscale.core import replicas
from tf_lossscale.core.graphs import in_xla_context, operations

Hook = Callable[..., Any]


class Handle:
    """The handle of a registered hook. `remove()`, or the end of a `with` block, removes the hook.

    >>> hooks = Hooks()
    >>> with hooks.register(print):
    ...     len(list(hooks))
    1
    >>> len(list(hooks))
    0

    Args:
        hooks: the list that contains the handles of all hooks for the same event.
        hook: the hook.
    """

    def __init__(self, hooks: list[Handle], hook: Hook):
        self.hook = hook
        self._hooks = hooks

    def remove(self) -> None:
        """Remove the hook. Functions that were traced with the hook no longer call it. A second call does nothing.

        >>> hooks = Hooks()
        >>> handle = hooks.register(print)
        >>> handle.remove()
        >>> list(hooks)
        []
        """
        if self in self._hooks:
            self._hooks.remove(self)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *error: Any) -> None:
        self.remove()


class Hooks:
    """The hooks for one kind of event, in calling order.

    >>> hooks = Hooks()
    >>> _ = hooks.register("second"), hooks.register("first", prepend=True)
    >>> list(hooks)
    ['first', 'second']
    """

    def __init__(self) -> None:
        self._handles: list[Handle] = []
        #: Whether a tf.function was traced while there were no hooks. Such a function never calls hooks that are
        #: registered later.
        self.traced_without = False

    def register(self, hook: Hook, prepend: bool = False) -> Handle:
        """Add a hook.

        Args:
            hook: a function.
            prepend: whether to call the hook before the hooks registered so far. By default, it is called after them.

        Returns:
            A handle whose `remove()` method removes the hook.
        """
        if self.traced_without:
            logging.warning(
                "A step hook was registered after a tf.function that takes steps was traced. That function does not "
                "call it. Register hooks before the first step, or make a new tf.function (in Keras, compile again)."
            )
        handle = Handle(self._handles, hook)
        self._handles.insert(0 if prepend else len(self._handles), handle)
        return handle

    def __iter__(self) -> Iterator[Hook]:
        return iter([handle.hook for handle in self._handles])


class Hooked:
    """Base class of optimizers with hooks. Each method that registers a hook returns a `Handle`.

    The `_hooks` attribute maps each kind of event to a `Hooks` object. `hooks_by_event` creates the dictionary.
    """

    _hooks: dict[str, Hooks]
    _in_step = False

    def register_step_pre_hook(self, hook: Hook) -> Handle:
        """Call `hook(optimizer, args, kwargs)` before every step; `args` begins with the optimizer.

        A step is a call to `step` or `apply_gradients`, made by your code or by `LossScaleOptimizer`, `minimize` or
        `fit`. The hook is not called for a step that `LossScaleOptimizer` skips. A `tf.function` calls the hook if the
        hook was registered before the function was traced. If XLA compiles a step that has hooks, an error is raised.

        Args:
            hook: a function that returns None. When your code calls `step` itself, outside `tf.function`, the hook may
                also change the variables' `grad` attributes, or return a tuple (args, kwargs) that replaces the
                arguments of `step`.

        Returns:
            A handle whose `remove()` method removes the hook.
        """
        return self._hooks["step_pre"].register(hook)

    def register_step_post_hook(self, hook: Hook) -> Handle:
        """Call `hook(optimizer, args, kwargs)` after every step; see `register_step_pre_hook`.

        >>> from tf_lossscale import LossScaleOptimizer
        >>> from tf_lossscale.optimizers import Adafactor
        >>> inner = Adafactor()
        >>> handle = inner.register_step_post_hook(lambda optimizer, args, kwargs: print("one more step"))
        >>> weight = tf.Variable(1.0)
        >>> _ = LossScaleOptimizer(inner).minimize(lambda: weight**2, [weight])
        one more step

        Args:
            hook: a function. Its result is ignored.

        Returns:
            A handle whose `remove()` method removes the hook.
        """
        return self._hooks["step_post"].register(hook)

    def register_state_dict_pre_hook(self, hook: Hook, prepend: bool = False) -> Handle:
        """Call `hook(optimizer)` before `state_dict`.

        Args:
            hook: a function. Its result is ignored.
            prepend: whether to call the hook before the hooks registered so far. By default, it is called after them.

        Returns:
            A handle whose `remove()` method removes the hook.
        """
        return self._hooks["state_dict_pre"].register(hook, prepend)

    def register_state_dict_post_hook(self, hook: Hook, prepend: bool = False) -> Handle:
        """Call `hook(optimizer, state_dict)` after `state_dict`.

        Args:
            hook: a function. A result other than None replaces the state dict.
            prepend: whether to call the hook before the hooks registered so far. By default, it is called after them.

        Returns:
            A handle whose `remove()` method removes the hook.
        """
        return self._hooks["state_dict_post"].register(hook, prepend)

    def register_load_state_dict_pre_hook(self, hook: Hook, prepend: bool = False) -> Handle:
        """Call `hook(optimizer, state_dict)` before `load_state_dict`.

        Args:
            hook: a function. A result other than None is loaded instead of the state dict. The hook gets a copy of the
                state dict, so that the caller's dict does not change.
            prepend: whether to call the hook before the hooks registered so far. By default, it is called after them.

        Returns:
            A handle whose `remove()` method removes the hook.
        """
        return self._hooks["load_state_dict_pre"].register(hook, prepend)

    def register_load_state_dict_post_hook(self, hook: Hook, prepend: bool = False) -> Handle:
        """Call `hook(optimizer)` after `load_state_dict`.

        Args:
            hook: a function. Its result is ignored.
            prepend: whether to call the hook before the hooks registered so far. By default, it is called after them.

        Returns:
            A handle whose `remove()` method removes the hook.
        """
        return self._hooks["load_state_dict_post"].register(hook, prepend)

    @property
    def has_step_hooks(self) -> bool:
        """Whether any step hook is registered."""
        return any(map(list, itertools.chain(*self._step_hooks.values())))

    @property
    def _step_hooks(self) -> dict[str, tuple[Hooks, Hooks]]:
        """The hooks to call before a step ("pre") and after it ("post"), in calling order."""
        return {
            "pre": (before_every_step, self._hooks["step_pre"]),
            "post": (self._hooks["step_post"], after_every_step),
        }

    def _between_hooks(self, update: Callable[[], Any], variables: Callable[[], Iterable[tf.Variable]]) -> Any:
        """Call `update`, and call the step hooks before and after it. `variables` returns the updated variables.

        During an eager call to `step`, only `update` is called, because `around_step` already calls the hooks, with the
        arguments of `step`. Only the first replica of each process calls the hooks.
        """
        if self._in_step:
            return update()
        if not self.has_step_hooks:
            for hooks in itertools.chain(*self._step_hooks.values()):
                hooks.traced_without |= not tf.executing_eagerly()
            return update()
        if in_xla_context():
            raise RuntimeError(
                f"The step hooks of {type(self).__name__} cannot be called in a function that XLA compiles. Remove the "
                "hooks, or leave out jit_compile (in Keras: compile(jit_compile=False))."
            )
        if not _is_first_replica():
            return update()
        if tf.executing_eagerly():
            self._call("pre")
            result = update()
            self._call("post")
            return result
        with tf.control_dependencies(operations(tf.numpy_function(lambda: self._call("pre"), [], []))):
            result = update()
        # Reading a variable waits for the last write to it, so the post-hooks run after all variables have been
        # updated.
        with tf.control_dependencies([variable.read_value() for variable in variables()]):
            tf.numpy_function(lambda: self._call("post"), [], [])
        return result

    def _call(self, when: str) -> None:
        for hook in itertools.chain(*self._step_hooks[when]):
            result = hook(self, (self,), {})
            if result is not None and when == "pre":
                raise RuntimeError(
                    "A step pre-hook can replace only the arguments of step(), and only outside tf.function. In a "
                    "tf.function, or if apply_gradients or LossScaleOptimizer takes the step, the hook must return "
                    f"None, but it returned: {result!r}."
                )


def _is_first_replica() -> bool:
    if not tf.distribute.has_strategy() or tf.distribute.in_cross_replica_context():
        return True
    return replicas.replica() % len(tf.distribute.get_strategy().extended.worker_devices) == 0


def around_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a `step` method, so that the step hooks are called before and after it.

    Args:
        step: the method to decorate.

    Returns:
        The decorated method, with the documentation and signature of `step`.
    """

    @functools.wraps(step)
    def hooked(self: Hooked, *args: Any, **kwargs: Any) -> Any:
        if not tf.executing_eagerly():
            # Python calls made here would run only while the function is traced. `_between_hooks` adds the calls to the
            # graph.
            return step(self, *args, **kwargs)
        args = (self, *args)
        for hook in itertools.chain(*self._step_hooks["pre"]):
            result = hook(self, args, kwargs)
            if result is None:
                continue
            if not isinstance(result, tuple) or len(result) != 2:
                raise RuntimeError(
                    f"A step pre-hook must return None or a tuple (new_args, new_kwargs), but returned: {result!r}."
                )
            args, kwargs = result
        with replicas.overriding(self, _in_step=True):
            loss = step(*args, **kwargs)
        for hook in itertools.chain(*self._step_hooks["post"]):
            hook(self, args, kwargs)
        return loss

    return hooked


def hooks_by_event() -> dict[str, Hooks]:
    """Return a dict with an empty `Hooks` for each kind of event.

    >>> sorted(hooks_by_event())[:3]
    ['load_state_dict_post', 'load_state_dict_pre', 'state_dict_post']
    """
    return {
        f"{method}_{when}": Hooks() for method in ("step", "state_dict", "load_state_dict") for when in ("pre", "post")
    }


before_every_step: Hooks = Hooks()
after_every_step: Hooks = Hooks()


def register_optimizer_step_pre_hook(hook: Hook) -> Handle:
    """Call a function before every step of each of this package's optimizers.

    >>> handle = register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: None)
    >>> handle.remove()

    Args:
        hook: as in `Adafactor.register_step_pre_hook`; it is called before the optimizer's own hooks.

    Returns:
        A handle whose `remove()` method removes the hook.
    """
    return before_every_step.register(hook)


def register_optimizer_step_post_hook(hook: Hook) -> Handle:
    """Call a function after every step of each of this package's optimizers.

    >>> handle = register_optimizer_step_post_hook(lambda optimizer, args, kwargs: None)
    >>> handle.remove()

    Args:
        hook: as in `Adafactor.register_step_post_hook`; it is called after the optimizer's own hooks.

    Returns:
        A handle whose `remove()` method removes the hook.
    """
    return after_every_step.register(hook)
