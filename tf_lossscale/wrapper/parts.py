"""The base class of wrappers, and a helper for methods that call the inner optimizer's method of the same name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tf_lossscale.core.compiled_steps import CompiledSteps
from tf_lossscale.diagnosis.exponents import Exponents
from tf_lossscale.diagnosis.overflow import Diagnosis
from tf_lossscale.wrapper.contract import Contract
from tf_lossscale.wrapper.family import Family
from tf_lossscale.wrapper.loss_factor import LossFactor
from tf_lossscale.wrapper.stall import Stall


class Parts:
    """Declares the attributes that every wrapper has. Derived classes add the methods.

    >>> Parts._family_class is None
    True
    """

    #: The `Family` class for the optimizers that this wrapper class wraps, or None in a base class that all families
    #: share.
    _family_class: type[Family] | None = None

    _optimizer: Any
    _family: Family
    _loss_scale: Any
    _contract: Contract
    _factor: LossFactor
    _stall: Stall
    _diagnosis: Diagnosis | None
    _exponents: Exponents | None
    _compiled_steps: CompiledSteps | None
    _traced: bool


def of_inner(method: Callable[..., Any]) -> Any:
    """Return a method for a wrapper class that calls the inner optimizer's method of the same name.

    >>> class Wrapper:
    ...     _optimizer = [3, 1, 2]
    ...     sort = of_inner(list.sort)
    >>> Wrapper().sort(reverse=True)
    >>> Wrapper._optimizer
    [3, 2, 1]

    Args:
        method: a method of the inner optimizer's class. The returned method has its name, signature and docstring.
    """

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._optimizer, method.__name__)(*args, **kwargs)

    return call
