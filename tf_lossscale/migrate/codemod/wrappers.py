"""Decides how a use of an old wrapper class is written, and translates the arguments of calls to it.

A call whose new form is not certain keeps its old arguments and gets a class that takes them, or is left and reported.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from tf_lossscale.legacy import table
from tf_lossscale.migrate.codemod import names
from tf_lossscale.migrate.codemod.edits import Part
from tf_lossscale.migrate.codemod.scopes import string
from tf_lossscale.migrate.codemod.source import Argument, Source, Span
from tf_lossscale.migrate.codemod.uses import Use, Uses

WITH_OLD_ARGUMENTS = table.WRAPPERS_WITH_OLD_ARGUMENTS[table.EXPERIMENTAL]
_EITHER = (
    f"{{}} may be either of two classes, which take different arguments. Write {table.WRAPPER} or {WITH_OLD_ARGUMENTS}."
)
_FITS_BOTH = f"the arguments fit both the old and the new class. Write {table.WRAPPER} or {names.HELPER}."
_NUMBER = (
    "a number as the second argument is a fixed scale in TensorFlow 2.3 and the initial scale in Keras 3. For a fixed "
    "scale, write dynamic=False, initial_scale=N. For a scale that only starts at N, write initial_scale=N."
)
_SHARED = "two wrappers share one loss scale. Pass one tf_lossscale.SharedLossScale to both of them."
_NO_MATCH = "the arguments do not match the signature (optimizer, loss_scale)."
_UNSURE = "{} may also be something other than TensorFlow's class."

_PARAMETERS = {
    "FixedLossScale": ("loss_scale_value",),
    "DynamicLossScale": ("initial_loss_scale", "increment_period", "multiplier"),
}


class Unprovable(Exception):
    """Raised for a call that has no provably equivalent new form. The message gives the reason."""


class Form(NamedTuple):
    """The new form of a use. It has either a target or a reason why the use is left."""

    #: The dotted name of the new class or function.
    target: str | None
    #: The spans to replace in the arguments of the call, each with its new text.
    changes: Sequence[tuple[Span, tuple[Part, ...]]] = ()
    reason: str | None = None


def form(source: Uses, use: Use) -> Form:
    """Return the new form of a use of a wrapper class.

    Args:
        source: the file.
        use: a use of a name whose roles are in `names.WRAPPERS`.
    """
    roles, call = use.roles - {table.OURS}, source.called(use)
    if roles == {table.CONTRIB}:
        return Form(table.WRAPPERS_WITH_OLD_ARGUMENTS[table.CONTRIB])
    if roles == {table.EXPERIMENTAL} and (source.keeps_old_state or not use.is_sure):
        return Form(WITH_OLD_ARGUMENTS)
    if call is None and (roles <= {table.STABLE} or source.is_tested(use.node)):
        return Form(table.WRAPPER)
    if call is None:
        is_old = roles == {table.EXPERIMENTAL}
        return Form(WITH_OLD_ARGUMENTS) if is_old else Form(None, reason=_EITHER.format(source.code(use.node)))
    try:
        new = _called(source, source.arguments(call), roles)
    except Unprovable as error:
        return Form(WITH_OLD_ARGUMENTS) if roles == {table.EXPERIMENTAL} else Form(None, reason=str(error))
    return Form(None, reason=_UNSURE.format(source.code(use.node))) if new.changes and not use.is_sure else new


def _called(source: Uses, arguments: list[Argument], roles: set[str]) -> Form:
    keywords = {argument.keyword for argument in arguments}
    is_unpacked = bool(keywords & {"*", "**"})
    second = next((a for i, a in enumerate(arguments) if a.keyword == "dynamic" or (i == 1 and not a.keyword)), None)
    value = second.value if second else None
    is_old = value is not None and (_is_dynamic(value) or number(value) is not None or _scale_class(source, value))
    if not is_unpacked and (keywords & {"loss_scale", "optimizer"} or is_old):
        if roles == {table.STABLE} and value is not None and number(value) is not None:
            raise Unprovable(_NUMBER)
        return _with_old_arguments(source, arguments)
    if roles == {table.EXPERIMENTAL}:
        if is_unpacked:
            raise Unprovable(_NO_MATCH)
        return _with_old_arguments(source, arguments)
    is_flag = isinstance(value, ast.Constant) and isinstance(value.value, bool)
    is_new = bool(keywords & {"dynamic", "initial_scale", "dynamic_growth_steps"}) or len(arguments) > 2
    # A program for both classes may unpack a dict of arguments that depends on the version of TensorFlow. The codemod
    # assumes that only the new class is called with `**`.
    if table.EXPERIMENTAL not in roles or ("*" not in keywords and (value is None or is_flag or is_new)):
        return Form(table.WRAPPER)
    raise Unprovable(_FITS_BOTH)


def _with_old_arguments(source: Uses, arguments: list[Argument]) -> Form:
    """Return the new form of a call with the arguments `(optimizer, loss_scale)`."""
    given = dict(zip(("optimizer", "loss_scale"), range(sum(not argument.keyword for argument in arguments))))
    given |= {str(argument.keyword): i for i, argument in enumerate(arguments) if argument.keyword}
    given |= {"optimizer": given.pop("inner_optimizer")} if "inner_optimizer" in given else {}
    if not {"optimizer"} <= given.keys() <= {"optimizer", "loss_scale"} or len(given) != len(arguments):
        raise Unprovable(_NO_MATCH)
    optimizer = arguments[given["optimizer"]]
    renamed = (optimizer.span[0], optimizer.span[0] + len(optimizer.keyword or "")), ("inner_optimizer",)
    changes: list[tuple[Span, tuple[Part, ...]]] = [renamed] if optimizer.keyword == "optimizer" else []
    if "loss_scale" not in given:
        return Form(table.WRAPPER, changes)
    scale = arguments[given["loss_scale"]]
    if source.is_shared(scale.value):
        raise Unprovable(_SHARED)
    if _is_dynamic(scale.value):
        return Form(table.WRAPPER, [*changes, (source.removal(arguments, given["loss_scale"]), ())])
    parts = _scale(source, scale)
    if parts is None:
        return Form(names.HELPER)
    return Form(table.WRAPPER, [*changes, (scale.span, tuple(parts))] if parts else changes)


def _is_dynamic(value: ast.expr) -> bool:
    if isinstance(value, ast.IfExp):
        return _is_dynamic(value.body) and _is_dynamic(value.orelse)
    return string(value) == "dynamic"


def _scale(source: Uses, scale: Argument) -> list[Part] | None:
    """Return the arguments that mean the same as an old `loss_scale`, or None if a value at run time decides."""
    value = number(scale.value)
    if value is not None:
        return ["dynamic=False, initial_scale=", scale.value_span] if value > 0 else None
    kind = _scale_class(source, scale.value)
    if kind is None or not isinstance(scale.value, ast.Call):
        return None
    given = dict(_bound(source.arguments(scale.value), _PARAMETERS[kind]))
    numbers = {name: number(argument.value) for name, argument in given.items()}
    if None in given or any(value is not None and value <= 0 for value in numbers.values()) or not given:
        return [] if kind == "DynamicLossScale" and not given else None
    if kind == "FixedLossScale":
        return ["dynamic=False, initial_scale=", given["loss_scale_value"].value_span]
    return _dynamic(source, given, numbers)


def _dynamic(source: Source, given: dict[Any, Argument], numbers: dict[Any, float | None]) -> list[Part] | None:
    period, factor = numbers.get("increment_period"), numbers.get("multiplier", 2.0)
    if factor is None or factor <= 1 or (period is not None and period != int(period)):
        return None
    new = {"initial_loss_scale": "initial_scale", "increment_period": "dynamic_growth_steps"}
    written: list[list[Part]] = [[f"{new[name]}=", given[name].value_span] for name in new if name in given]
    if factor != 2:
        shown = source.text[slice(*given["multiplier"].value_span)]
        inverse = shown if isinstance(given["multiplier"].value, ast.Constant) else f"({shown})"
        written.append([f"growth_factor={shown}, backoff_factor=1 / {inverse}"])
    return [part for i, parts in enumerate(written) for part in ([", ", *parts] if i else parts)]


def _bound(arguments: list[Argument], parameters: tuple[str, ...]) -> list[tuple[str | None, Argument]]:
    """Return each argument with the name of its parameter, which is None if the arguments do not fit."""
    positional = iter(parameters)
    found = [(argument.keyword or next(positional, None), argument) for argument in arguments]
    return [(name if name in parameters else None, argument) for name, argument in found]


def _scale_class(source: Uses, value: ast.expr) -> str | None:
    """Return the loss scale class that an expression instantiates: "FixedLossScale", "DynamicLossScale" or None."""
    dotted = source.dotted(value.func) if isinstance(value, ast.Call) else ()
    new = {table.OLD[n].new.rpartition(".")[2] if (n := names.canonical(d)) in table.OLD else None for d in dotted}
    kind = new.pop() if len(new) == 1 else None
    return kind if kind in _PARAMETERS else None


_OPERATORS: dict[type, Any] = {
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: lambda base, exponent: float(base) ** exponent,
    ast.USub: operator.neg,
}


def number(node: ast.expr) -> float | None:
    """Return the value of a constant number such as `2 ** 15`, or None for any other expression."""
    try:
        return float(_evaluated(node))
    except (ValueError, OverflowError, ZeroDivisionError, TypeError):
        return None


def _evaluated(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return float(node.value)  # type: ignore[arg-type]
    if not isinstance(node, (ast.UnaryOp, ast.BinOp)) or type(node.op) not in _OPERATORS:
        raise ValueError
    operands = [node.operand] if isinstance(node, ast.UnaryOp) else [node.left, node.right]
    return float(_OPERATORS[type(node.op)](*map(_evaluated, operands)))
