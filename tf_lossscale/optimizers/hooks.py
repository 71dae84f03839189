"""Functions that are called before and after a step, `state_dict` and `load_state_dict`, in PyTorch's order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

Hook = Callable[..., Any]

_names = itertools.count()


class Handle:
    """Removes a hook that was registered; also at the end of a `with` block.

    >>> hooks = Hooks()
    >>> with hooks.register(print):
    ...     len(list(hooks))
    1
    >>> len(list(hooks))
    0

    Args:
        hooks: what the hook is in.
        key: the hook's, in `hooks`.
    """

    def __init__(self, hooks: dict[int, Hook], key: int):
        self._hooks = hooks
        self._key = key

    def remove(self) -> None:
        """Removes the hook; it is no error if it is gone."""
        self._hooks.pop(self._key, None)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *error: Any) -> None:
        self.remove()


class Hooks:
    """The hooks of one moment, in the order in which they are called.

    >>> hooks = Hooks()
    >>> _ = hooks.register("second"), hooks.register("first", prepend=True)
    >>> list(hooks)
    ['first', 'second']
    """

    def __init__(self) -> None:
        self._hooks: dict[int, Hook] = {}

    def register(self, hook: Hook, prepend: bool = False) -> Handle:
        """Adds a hook at the end, or with `prepend` at the start; returns its handle."""
        key = next(_names)
        self._hooks[key] = hook
        if prepend:
            others = [(k, h) for k, h in self._hooks.items() if k != key]
            self._hooks.clear()
            self._hooks.update([(key, hook), *others])
        return Handle(self._hooks, key)

    def __iter__(self) -> Iterator[Hook]:
        return iter(list(self._hooks.values()))


class Hooked:
    """An optimizer that calls hooks: the methods that register them, each of which returns a `Handle`.

    `_hooks` is a dict of `Hooks` by moment; `all_moments` makes it.
    """

    _hooks: dict[str, Hooks]

    def register_step_pre_hook(self, hook: Hook) -> Handle:
        """Has `hook(optimizer, args, kwargs)` called before every step; `args` begins with the optimizer.

        It may return None, or new (args, kwargs) for the step.
        """
        return self._hooks["step_pre"].register(hook)

    def register_step_post_hook(self, hook: Hook) -> Handle:
        """Has `hook(optimizer, args, kwargs)` called after every step."""
        return self._hooks["step_post"].register(hook)

    def register_state_dict_pre_hook(self, hook: Hook, prepend: bool = False) -> Handle:
        """Has `hook(optimizer)` called before `state_dict`."""
        return self._hooks["state_dict_pre"].register(hook, prepend)

    def register_state_dict_post_hook(self, hook: Hook, prepend: bool = False) -> Handle:
        """Has `hook(optimizer, state_dict)` called after `state_dict`; what it returns, if not None, is the result."""
        return self._hooks["state_dict_post"].register(hook, prepend)

    def register_load_state_dict_pre_hook(self, hook: Hook, prepend: bool = False) -> Handle:
        """Has `hook(optimizer, state_dict)` called before `load_state_dict`; what it returns, if not None, is loaded.

        The state dict is a copy: whatever the hook does to it, the caller's stays as it is.
        """
        return self._hooks["load_state_dict_pre"].register(hook, prepend)

    def register_load_state_dict_post_hook(self, hook: Hook, prepend: bool = False) -> Handle:
        """Has `hook(optimizer)` called after `load_state_dict`."""
        return self._hooks["load_state_dict_post"].register(hook, prepend)


def all_moments() -> dict[str, Hooks]:
    """Returns empty hooks for every moment that an optimizer has.

    >>> sorted(all_moments())[:3]
    ['load_state_dict_post', 'load_state_dict_pre', 'state_dict_post']
    """
    return {
        f"{method}_{when}": Hooks() for method in ("step", "state_dict", "load_state_dict") for when in ("pre", "post")
    }


before_every_step = Hooks()
after_every_step = Hooks()


def register_optimizer_step_pre_hook(hook: Hook) -> Handle:
    """Has a function called before the `step` of every optimizer of this package.

    >>> handle = register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: None)
    >>> handle.remove()

    Args:
        hook: as in `Adafactor.register_step_pre_hook`; it is called before the optimizer's own hooks.

    Returns:
        A handle, with `remove()`.
    """
    return before_every_step.register(hook)


def register_optimizer_step_post_hook(hook: Hook) -> Handle:
    """Has a function called after the `step` of every optimizer of this package.

    >>> handle = register_optimizer_step_post_hook(lambda optimizer, args, kwargs: None)
    >>> handle.remove()

    Args:
        hook: as in `Adafactor.register_step_post_hook`; it is called after the optimizer's own hooks.

    Returns:
        A handle, with `remove()`.
    """
    return after_every_step.register(hook)
