"""Translates the arguments of old loss scaling classes into arguments of LossScaleOptimizer.

`scale_arguments` returns None if it cannot prove that the new arguments mean the same as the old ones.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import libcst as cst
import libcst.matchers as m

from tf_lossscale.legacy import table


class Unprovable(Exception):
    """Raised for a call that has no provably equivalent new form. The message gives the reason."""


#: An argument of the new call, as a pair (keyword, value). The keyword of a positional argument is None. The value is
#: the index of an argument of the old call, an expression from the old code, or a string of new code.
Argument = tuple[str | None, "int | str | cst.BaseExpression"]


class Written(NamedTuple):
    """The new form of a call."""

    # The dotted name of the new function.
    target: str
    arguments: Sequence[Argument]
    # Nodes of the old call that do not occur in the new call.
    consumed: tuple[cst.CSTNode, ...] = ()


Binding = dict[str, int]

SIGNATURES = {
    table.EXPERIMENTAL: ("optimizer", "loss_scale"),
    table.STABLE: ("inner_optimizer", "dynamic", "initial_scale", "dynamic_growth_steps"),
    table.POLICY: ("name", "loss_scale"),
    "FixedLossScale": ("loss_scale_value",),
    "DynamicLossScale": ("initial_loss_scale", "increment_period", "multiplier"),
}


def keyword_of(argument: cst.Arg) -> str | None:
    """Return the keyword of an argument, or None for a positional argument."""
    return argument.keyword.value if argument.keyword else None


def as_they_are(call: cst.Call) -> list[Argument]:
    """Return `Argument` tuples that keep all arguments of a call unchanged."""
    return [(keyword_of(argument), index) for index, argument in enumerate(call.args)]


def bind(arguments: Sequence[cst.Arg], signature: Sequence[str]) -> Binding | None:
    """Map parameter names to the indices of their arguments.

    Return None for a call with `*` or `**` arguments or with unknown keywords.
    """
    bound: Binding = {}
    for index, argument in enumerate(arguments):
        if argument.star:
            return None
        if argument.keyword is not None:
            name = argument.keyword.value
        elif index < len(signature):
            name = signature[index]
        else:
            return None
        if name not in signature or name in bound:
            return None
        bound[name] = index
    return bound


def number(expression: cst.BaseExpression) -> float | None:
    """Return the value of a constant number such as `2 ** 15`, or None for any other expression."""
    try:
        return float(_evaluated(ast.parse(code(expression), mode="eval").body))
    except (ValueError, OverflowError, ZeroDivisionError, SyntaxError):
        return None


def _power(base: float, exponent: float) -> float:
    if max(abs(base), abs(exponent)) > 1024:
        raise OverflowError
    return float(base) ** exponent


# The operators that a constant loss scale such as `2 ** 15` may contain.
_OPERATORS: dict[type, Any] = {
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: _power,
    ast.USub: operator.neg,
}


def _evaluated(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        return node.value
    if not isinstance(node, (ast.UnaryOp, ast.BinOp)) or type(node.op) not in _OPERATORS:
        raise ValueError
    operands = [node.operand] if isinstance(node, ast.UnaryOp) else [node.left, node.right]
    return _OPERATORS[type(node.op)](*map(_evaluated, operands))


def text(expression: cst.BaseExpression) -> str | None:
    """Return the value of a string literal, or None for any other expression."""
    if isinstance(expression, cst.SimpleString) and isinstance(expression.evaluated_value, str):
        return expression.evaluated_value
    return None


def code(node: cst.CSTNode) -> str:
    """Return the source code of a node."""
    return cst.Module([]).code_for_node(node)


def scale_arguments(
    expression: cst.BaseExpression, kind: str | None = None
) -> tuple[list[Argument], list[cst.CSTNode]] | None:
    """Return the arguments of LossScaleOptimizer that mean the same as an old `loss_scale` argument.

    >>> scale_arguments(cst.parse_expression("'dynamic'"))
    ([], [])

    Args:
        expression: the value of the old argument.
        kind: the loss scale class that the expression instantiates: "FixedLossScale", "DynamicLossScale" or None.

    Returns:
        The new arguments, and the nodes of the expression that do not occur in the new arguments. The result is None if
        the code does not show which arguments are equivalent, for example because they depend on a value that is known
        only at run time.
    """
    if text(expression) == "dynamic":
        return [], []
    value = number(expression)
    if value is not None and value > 0:
        return _fixed(expression), []
    bound = bind(expression.args, SIGNATURES[kind]) if kind and isinstance(expression, cst.Call) else None
    if bound is None:
        return None
    given = {name: expression.args[index].value for name, index in bound.items()}
    if any((value := number(each)) is not None and value <= 0 for each in given.values()):
        return None
    if kind == "FixedLossScale":
        return (_fixed(given["loss_scale_value"]), [expression.func]) if given else None
    written = _dynamic(given)
    return None if written is None else (written, [expression.func])


def _fixed(scale: cst.BaseExpression) -> list[Argument]:
    return [("dynamic", "False"), ("initial_scale", scale)]


def _dynamic(given: dict[str, cst.BaseExpression]) -> list[Argument] | None:
    written: list[Argument] = []
    if "initial_loss_scale" in given:
        written.append(("initial_scale", given["initial_loss_scale"]))
    if "increment_period" in given:
        period = number(given["increment_period"])
        if period is not None and period != int(period):
            return None
        written.append(("dynamic_growth_steps", given["increment_period"]))
    if "multiplier" in given:
        multiplier = given["multiplier"]
        factor = number(multiplier)
        if factor is None or factor <= 1:
            return None
        if factor != 2:
            shown = code(multiplier) if isinstance(multiplier, (cst.Integer, cst.Float)) else f"({code(multiplier)})"
            written += [("growth_factor", multiplier), ("backoff_factor", f"1 / {shown}")]
    return written


def rewritten(
    call: cst.Call,
    written: Written,
    func: cst.BaseExpression | None,
    now: Callable[[cst.BaseExpression], cst.BaseExpression],
) -> cst.Call:
    """Return a call in its new form, and keep the whitespace and comments between its arguments.

    Args:
        call: the call, whose inner expressions have already been rewritten.
        written: the planned new form of the call.
        func: the expression for the new function, or None to keep the old function.
        now: a function that returns the rewritten form of an expression from the old code.

    Returns:
        The new call.
    """
    old = call.args
    new: list[cst.Arg] = []
    for keyword, what in written.arguments:
        if isinstance(what, int):
            argument = old[what]
            renamed = None if keyword is None else cst.Name(keyword)
            if keyword_of(argument) != keyword:
                argument = argument.with_changes(
                    keyword=renamed, equal=_EQUAL if renamed else cst.MaybeSentinel.DEFAULT
                )
            new.append(argument)
        else:
            name = None if keyword is None else cst.Name(keyword)
            value = cst.parse_expression(what) if isinstance(what, str) else now(what)
            new.append(cst.Arg(value, name, equal=_EQUAL if name else cst.MaybeSentinel.DEFAULT))
    return call.with_changes(func=func or call.func, args=_spaced(old, new))


_EQUAL = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))


def _spaced(old: Sequence[cst.Arg], new: list[cst.Arg]) -> list[cst.Arg]:
    """Separate the new arguments by the same commas, line breaks and comments as the old ones."""
    if not new or not old:
        return new
    spaced = []
    for index, argument in enumerate(new):
        gap = old[index] if index < len(old) - 1 and index < len(new) - 1 else None
        if gap is not None:
            argument = argument.with_changes(comma=gap.comma, whitespace_after_arg=gap.whitespace_after_arg)
        elif index < len(new) - 1:
            argument = argument.with_changes(comma=COMMA, whitespace_after_arg=cst.SimpleWhitespace(""))
        else:
            # A comment next to a dropped argument must not end up next to another argument.
            end = cst.Arg(old[-1].value) if len(new) < len(old) and m.findall(old[-1], m.Comment()) else old[-1]
            argument = argument.with_changes(comma=end.comma, whitespace_after_arg=end.whitespace_after_arg)
        spaced.append(argument)
    return spaced


COMMA = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
