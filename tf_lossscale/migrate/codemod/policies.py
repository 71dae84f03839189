"""Dtype policies. Keras's current policies have no loss scale, and other names than TensorFlow 2.0's.

The `loss_scale` arguments are removed if all policies in the file have their default loss scale. Otherwise, and in a
file that reads the loss scale of a policy, the policies come from `tf_lossscale.legacy.experimental`.
"""

from __future__ import annotations

import ast
import re

from tf_lossscale.legacy import table
from tf_lossscale.migrate.codemod import old_state
from tf_lossscale.migrate.codemod.edits import Edits
from tf_lossscale.migrate.codemod.scopes import string
from tf_lossscale.migrate.codemod.source import Argument
from tf_lossscale.migrate.codemod.uses import Use, Uses

#: The roles of the names that create or set policies.
ROLES = {table.POLICY, table.KERAS_FUNCTION}
_INFER = (
    "Keras has no policy {} any more. Write 'mixed_float16' if the inputs of the layers are float16, and 'float32' "
    "otherwise."
)
_DOES_NOT_READ = (
    "compile() does not read the loss_scale of a policy. Give compile() a tf_lossscale.LossScaleOptimizer with this "
    "scale (auto_scale_loss=False for None), or call tf_lossscale.wrap_in_compile()."
)
# The names of objects that hold the options of a program, of optimizers, and of an object in its own methods.
_OPTIONS = re.compile(
    r"(args|cfg|conf\w*|flags\w*|options|opts?|hp\w*|param\w*|settings|optimi[sz]er|self)\Z", re.IGNORECASE
)
_INFERRED = ("infer", "infer_float32_vars", "infer_with_float32_vars")
_WITH_FLOAT32 = {f"{dtype}_with_float32_vars": f"mixed_{dtype}" for dtype in ("float16", "bfloat16")}


def scale_of(source: Uses, use: Use) -> tuple[list[Argument], int] | None:
    """Return the arguments of a call that creates a policy, and the index of its loss scale, or None without one.

    Unpacked arguments may contain a loss scale, unless today's class gets them.
    """
    call = source.called(use)
    arguments = source.arguments(call) if call and use.roles == {table.POLICY} else []
    scales = ("loss_scale",) if f"{table.KERAS}.Policy" in use.canonical else ("loss_scale", "*", "**")
    at = [i for i, each in enumerate(arguments) if each.keyword in scales or (i == 1 and not each.keyword)]
    return (arguments, at[0]) if at else None


def _has_default_scale(arguments: list[Argument], at: int) -> bool:
    """Return whether the loss scale of a policy is the one that a policy of its name has by default."""
    name, scale = string(arguments[1 - at].value) if len(arguments) == 2 else None, arguments[at].value
    if name == "mixed_float16":
        return string(scale) in ("auto", "dynamic")
    is_none = isinstance(scale, ast.Constant) and scale.value is None
    return string(scale) == "auto" or (name is not None and is_none)


def need_scale(source: Uses) -> bool:
    """Return whether the policies of a file need a loss scale."""
    scales = [scale for use in source.uses if (scale := scale_of(source, use))]
    is_read = any(_is_made_here(source, policy) for _, policy, _ in _reads(source))
    return is_read or not all(_has_default_scale(*scale) for scale in scales)


def _reads(source: Uses) -> list[tuple[ast.AST, ast.expr, str]]:
    """Return the reads of members that only old policies have, with the objects and the names of the members."""
    read = ((node, *source.read(node)) for node in source.parents)
    return [(node, owner, member) for node, owner, member in read if member in table.OF_POLICY.names]


def _is_made_here(source: Uses, policy: ast.expr) -> bool:
    """Return whether an expression is a policy that this file makes with an old name."""
    is_made = any(isinstance(each, ast.Call) for each in source.values(policy))
    return bool(source.roles & ROLES) and is_made and old_state.is_policy(source, policy)


def report_reads(source: Uses, edits: Edits) -> None:
    """Report attributes of policies from elsewhere that today's policies do not have."""
    project, roles = source.project, source.roles - {table.OURS}
    prefix = "" if roles or project.has_policies or project.makes_wrappers else "(dtype|precision)_"
    named = re.compile(rf"(?<!global_){prefix}policy(\(\)|\[.*\])?\Z", re.IGNORECASE)
    is_of_any = project.has_policies and not source.uses_legacy and "loss_scale" not in source.stored
    for node, owner, member in _reads(source):
        policy = source.code(owner)
        # Without wrappers, a loss scale is of a policy or an option of the program.
        is_likely = is_of_any and not (_OPTIONS.search(policy) or (project.makes_wrappers and member == "loss_scale"))
        if (named.search(policy) or is_likely) and not _is_made_here(source, owner):
            edits.todo(node, table.OF_POLICY.advice.format(policy, member))


def change_name(source: Uses, edits: Edits, call: ast.Call, is_old: bool) -> None:
    """Replace or report the policy name in a call, if it is one that only TensorFlow 2.0 to 2.3 had.

    If the call keeps its old meaning, None is a policy.
    """
    for argument in source.arguments(call)[:1]:
        name, quoted = string(argument.value), source.code(argument.value)
        if name in _WITH_FLOAT32:
            edits.rewrite(argument.value, quoted.replace(name, _WITH_FLOAT32[name]))
        elif name in _INFERRED or (quoted == "None" and not is_old):
            edits.todo(call, _INFER.format(quoted))


def report_scale(source: Uses, edits: Edits, call: ast.Call, arguments: list[Argument], at: int) -> None:
    """Report a policy whose loss scale, which is the argument at an index, compile() does not read any more."""
    name = string(arguments[1 - at].value) if len(arguments) == 2 else None
    compiles = any(source.compiled_with)
    if (
        name in (None, "mixed_float16")
        and not _has_default_scale(arguments, at)
        and (compiles or not source.constructs)
        and not source.changes_compile
    ):
        edits.todo(call, _DOES_NOT_READ)
