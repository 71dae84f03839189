"""Decides how a use of an old wrapper class is written, and translates the arguments of calls to it.

A call whose new form is not certain keeps its old arguments and gets a class that takes them, or is left and reported.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import NamedTuple

from tf_lossscale.legacy import table
from tf_lossscale.migrate.codemod import names
from tf_lossscale.migrate.codemod.scopes import string
from tf_lossscale.migrate.codemod.source import Argument, Span
from tf_lossscale.migrate.codemod.uses import Use, Uses

WITH_OLD_ARGUMENTS = table.WRAPPERS_WITH_OLD_ARGUMENTS[table.EXPERIMENTAL]
_EITHER = (
    f"{{}} may be either of two classes, which take different arguments. Write {table.WRAPPER} or {WITH_OLD_ARGUMENTS}."
)
SECOND = (
    "the second argument is a fixed scale in TensorFlow 2.3, `dynamic` in 2.4, and the initial scale in Keras 3. Write "
    "dynamic=False, initial_scale=N for a fixed scale, or initial_scale=N for a scale that only starts at N."
)
_NO_MATCH = (
    "the arguments do not match the signature (optimizer, loss_scale). Write the arguments of "
    "tf_lossscale.LossScaleOptimizer: inner_optimizer, dynamic, initial_scale, dynamic_growth_steps."
)


class Form(NamedTuple):
    """The new form of a use. It has either a target or a reason why the use is left."""

    #: The dotted name of the new class or function.
    target: str | None
    #: The spans to replace in the arguments of the call, each with its new text.
    changes: Sequence[tuple[Span, str]] = ()
    reason: str | None = None


def form(source: Uses, use: Use, is_legacy: bool = False) -> Form:
    """Return the new form of a use of a wrapper class, whose roles are in `names.WRAPPERS`."""
    roles, call = use.roles - {table.OURS}, source.called(use)
    if roles == {table.CONTRIB} or (is_legacy and roles == {table.EXPERIMENTAL}):
        return Form(table.WRAPPERS_WITH_OLD_ARGUMENTS[roles.pop()])
    if call is None:
        is_unclear = len(roles) > 1 and not source.is_tested(use.node)
        return Form(None, reason=_EITHER.format(source.code(use.node))) if is_unclear else Form(table.WRAPPER)
    new = form_of_call(source, call, roles) if roles else Form(table.WRAPPER)
    return Form(None, reason=_EITHER.format(source.code(call.func))) if new.changes and not use.is_sure else new


def form_of_call(source: Uses, call: ast.Call, roles: set[str]) -> Form:
    """Return the new form of a call with the arguments of a wrapper class, whose roles are given."""
    arguments = source.arguments(call)
    keywords = {argument.keyword for argument in arguments}
    second = next((a for i, a in enumerate(arguments) if a.keyword == "dynamic" or (i == 1 and not a.keyword)), None)
    value = second.value if second else None
    is_flag = isinstance(value, ast.Constant) and isinstance(value.value, bool)
    is_dynamic = value is not None and string(value) == "dynamic"
    if roles == {table.STABLE} and second and not (second.keyword or is_flag or is_dynamic):
        return Form(None, reason=SECOND)
    if keywords & {"*", "**"}:
        # A program for both classes may unpack a dict of arguments that depends on the version of TensorFlow. The
        # codemod assumes that only the new class is called with `**`.
        is_new = roles != {table.EXPERIMENTAL} and "*" not in keywords and value is None
    elif roles == {table.EXPERIMENTAL} or keywords & {"loss_scale", "optimizer"} or is_dynamic or _is_number(value):
        return _with_old_arguments(source, arguments)
    else:
        is_new = roles == {table.STABLE} or value is None or is_flag or len(arguments) > 2
    return Form(table.WRAPPER) if is_new else Form(None, reason=_EITHER.format(source.code(call.func)))


def _with_old_arguments(source: Uses, arguments: list[Argument]) -> Form:
    """Return the new form of a call with the arguments `(optimizer, loss_scale)`."""
    given = {each.keyword or ("optimizer", "loss_scale", "")[min(i, 2)]: i for i, each in enumerate(arguments)}
    given |= {"optimizer": given.pop("inner_optimizer")} if "inner_optimizer" in given else {}
    if not {"optimizer"} <= given.keys() <= {"optimizer", "loss_scale"} or len(given) != len(arguments):
        return Form(None, reason=_NO_MATCH)
    start = arguments[given["optimizer"]].span[0]
    changes: list[tuple[Span, str]] = []
    if arguments[given["optimizer"]].keyword == "optimizer":
        changes.append(((start, start + len("optimizer")), "inner_optimizer"))
    if "loss_scale" in given:
        scale = arguments[given["loss_scale"]]
        if string(scale.value) == "dynamic":
            changes.append((source.removal(arguments, given["loss_scale"]), ""))
        elif _is_number(scale.value):
            changes.append(((scale.span[0], scale.value_span[0]), "dynamic=False, initial_scale="))
        else:
            return Form(names.HELPER)
    return Form(table.WRAPPER, changes)


def _is_number(node: ast.AST | None) -> bool:
    """Return whether an expression is a constant number such as `2 ** 15`."""
    if isinstance(node, (ast.UnaryOp, ast.BinOp)):
        operands = [node.operand] if isinstance(node, ast.UnaryOp) else [node.left, node.right]
        return all(map(_is_number, operands))
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)
