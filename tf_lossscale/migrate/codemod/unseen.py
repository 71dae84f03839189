"""Reports old names in strings and dicts, and attributes that only old objects have."""

from __future__ import annotations

import ast
import re

from tf_lossscale.legacy import table
from tf_lossscale.migrate.codemod import class_tests, keras_3, names
from tf_lossscale.migrate.codemod.edits import Edits
from tf_lossscale.migrate.codemod.scopes import string
from tf_lossscale.migrate.codemod.uses import Uses

_IN_A_STRING = re.compile(
    r"\bmixed_precision\.(experimental|LossScaleOptimizer|set_policy)\b|\bcontrib\.mixed_precision\b"
    r"|\b(from|import)\s+(tensorflow|tf_keras|keras)[\w.]*\.mixed_precision\b"
)
_STRING = "strings are not changed. If the program looks this old name up, call tf_lossscale.install()."
_UNPACKED = (
    "loss_scale is an argument of the old class only, and the codemod does not follow a dict to the call that unpacks "
    "it. If this call is of tf_lossscale.LossScaleOptimizer, write tf_lossscale.legacy.from_loss_scale."
)
_TAKES = "_loss_scale takes an object with the methods __call__() and update(grads), such as a LossScale, not a number."
_DECAYED = "write {}._decayed_lr, which the wrapper has. Keras 3's optimizers have no such method."
_OF_KERAS_3 = (
    "{} is of Keras 3's class, but this file also uses names of the old class, which tf_lossscale.LossScaleOptimizer "
    "replaces. Write get_scaled_loss and get_unscaled_gradients."
)
# Private methods of the old wrapper classes that tf_lossscale's wrappers do not call.
_OVERRIDDEN = {*names.OF_WRAPPER[0], "_compute_gradients", "_get_gradients"}


def report(source: Uses, edits: Edits) -> None:
    """Plan the findings for one file."""
    for attribute in source.nodes(ast.Attribute):
        _kept(source, edits, attribute)
    for constant in source.nodes(ast.Constant):
        _string(source, edits, constant)
    for key, value in _items(source):
        # The loss scale of a wrapper, in a dict of metrics, is no argument.
        is_metric = any(source.read(each)[1] == "loss_scale" for each in source.values(value))
        is_name = isinstance(value, ast.Name) and bool(source.roles & names.WRAPPERS)
        is_argument = string(value) == "dynamic" or (is_name and not is_metric)
        if key == "loss_scale" and is_argument and (source.imports_tensorflow or source.roles - {table.OURS}):
            edits.notice(value, _UNPACKED)
        elif key == "class_name" and string(value) in ("LossScaleOptimizer", "LossScaleOptimizerV1"):
            edits.notice(value, _STRING)
    if source.roles & names.WRAPPERS:
        _private_attributes(source, edits)
    if source.roles & {table.STABLE, table.EXPERIMENTAL}:
        for node in keras_3.uses(source)[:1]:
            edits.todo(node, _OF_KERAS_3.format(getattr(node, "attr", getattr(node, "name", ""))))
    if not source.keeps_old_state and not source.uses_legacy:
        _old_state(source, edits)
    _compiled(source, edits)


def report_kept(source: Uses, edits: Edits, node: ast.AST, dotted: str, reason: str) -> None:
    """Report a name that is not rewritten, for a reason from `Uses.stays`."""
    (edits.todo if source.has_no_effect(dotted) else edits.notice)(node, f"{dotted} {reason}")


def _kept(source: Uses, edits: Edits, node: ast.Attribute) -> None:
    """Report an old name in a module that is left."""
    root = source.root(node)
    for dotted in source.dotted(node) if not isinstance(source.parents[node], ast.Attribute) else ():
        if (reason := source.stays(dotted)) and not (root and any(map(source.stays, source.dotted(root)))):
            report_kept(source, edits, node, dotted, reason)


def _string(source: Uses, edits: Edits, node: ast.Constant) -> None:
    """Report an old name in a string, but not in a docstring."""
    value = string(node) or ""
    if isinstance(source.parents[node], ast.Expr):
        return
    is_import = getattr(getattr(source.parents[node], "func", None), "attr", "") == "import_module"
    if _IN_A_STRING.search(value) or (is_import and names.canonical(value) == table.KERAS):
        edits.notice(node, _STRING)
    elif reason := source.stays(value):
        report_kept(source, edits, node, value, reason)


def _items(source: Uses) -> list[tuple[str | None, ast.expr]]:
    """Return the keys and values in dicts, in calls of `dict`, and in assignments to `name["key"]`."""
    displays = (zip(node.keys, node.values, strict=True) for node in source.nodes(ast.Dict))
    calls = (call for call in source.nodes(ast.Call) if source.is_builtin(call.func, "dict"))
    stored = ((target, node.value) for node in source.nodes(ast.Assign) for target in node.targets)
    return [
        *((string(key), value) for display in displays for key, value in display if key),
        *((keyword.arg, keyword.value) for call in calls for keyword in call.keywords),
        *((string(target.slice), value) for target, value in stored if isinstance(target, ast.Subscript)),
    ]


def _private_attributes(source: Uses, edits: Edits) -> None:
    """Report private members of wrappers that a file overrides, assigns or calls."""
    derived = {source.parents[use.node]: use.roles & names.WRAPPERS for use in source.uses}
    wrappers = [each for each, wraps in derived.items() if isinstance(each, ast.ClassDef) and wraps]
    for method in (each for wrapper in wrappers for each in wrapper.body if getattr(each, "name", "") in _OVERRIDDEN):
        edits.todo(method, names.OF_WRAPPER[1].format(getattr(method, "name", "")))
    for node in source.nodes(ast.Attribute):
        owner = source.code(node.value)
        is_wrapper = owner != "self" or _class_around(source, node) in wrappers
        if node.attr == "_loss_scale" and isinstance(node.ctx, ast.Store):
            # In a class that derives from an old loss scale, the attribute is the class's own.
            if owner != "self" or (wrappers and derived.get(_class_around(source, node), True)):
                edits.notice(node, _TAKES)
        elif node.attr in names.OF_WRAPPER[0] and is_wrapper:
            edits.todo(node, names.OF_WRAPPER[1].format(node.attr))
        elif node.attr == "_decayed_lr" and owner.endswith(("inner_optimizer", "_optimizer")):
            wrapper = owner.rpartition(".")[0]
            if wrapper != "self" or _class_around(source, node) in wrappers:
                # A subclass may override the method.
                edits.todo(node, _DECAYED.format("super()" if wrapper == "self" else wrapper))


def _class_around(source: Uses, node: ast.AST) -> ast.AST:
    return next((ancestor for ancestor in source.ancestors(node) if isinstance(ancestor, ast.ClassDef)), source.tree)


def _old_state(source: Uses, edits: Edits) -> None:
    """Report the reads of the old loss scale object that fail if the wrapper is made with the new arguments."""
    for node in source.old_reads:
        parent, code = source.parents[node], source.code(node)
        is_called = isinstance(parent, ast.Call) and parent.func is node
        # The loss scalers of PyTorch have a method of this name.
        # If other wrappers of the project are near, they keep their old objects.
        is_suspect = source.project.makes_wrappers or (is_called and "." in code and not source.project.wraps)
        is_suspect = is_suspect and code != "self.loss_scale" and "torch" not in source.modules
        if (source.roles & names.WRAPPERS or is_suspect) and not _is_guarded(source, node, node):
            what = f"has no {parent.attr}" if isinstance(parent, ast.Attribute) else "is a tensor, not a function"
            edits.todo(node, names.OF_LOSS_SCALE[1].format(code, what))


def _is_guarded(source: Uses, node: ast.AST, subject: ast.AST) -> bool:
    """Return whether an expression runs only if `callable`, `hasattr` or `isinstance` accepts the subject."""
    guard = re.compile(rf"\b(callable|hasattr|isinstance)\({re.escape(source.code(subject))}\b")
    for outer in source.ancestors(node):
        if isinstance(outer, (ast.If, ast.IfExp)) and node is not outer.test and guard.search(source.code(outer.test)):
            return True
        node = outer
    return False


def _compiled(source: Uses, edits: Edits) -> None:
    """Report that `compile` or another file may make the wrapper that a file tests for or needs."""
    wrapped, given = {use.node for use in source.uses}, source.compiled_with
    is_bare = any(string(each) or (isinstance(each, ast.Call) and each.func not in wrapped) for each in given)
    if source.changes_compile or ((source.constructs or source.project.wraps) and not is_bare):
        return
    # A program looks for a method of the old class by a string. If it also uses Keras 3's methods, it is for both.
    looked_up = [node for node in source.nodes(ast.Constant) if string(node) in keras_3.OLD_METHODS]
    reads: list[ast.AST] = [node for node in source.parents if _needs_wrapper(source, node)]
    quiet = [node for node in reads if isinstance(node, ast.Call) or _is_caught(source, node)]
    tests: list[ast.AST] = [*looked_up, *quiet] if not keras_3.uses(source) else []
    needs = [node for node in reads if node not in quiet]
    if not source.constructs:
        classes = [use.node for use in source.uses if use.roles & {table.STABLE, table.EXPERIMENTAL}]
        tests += class_tests.tests(source) if classes else []
        needs += classes
    for node in tests[:1]:
        edits.todo(node, names.OF_COMPILED[1])
    for node in needs[:1] if not tests else ():
        edits.notice(node, names.OF_COMPILED[1])


def _needs_wrapper(source: Uses, node: ast.AST) -> bool:
    """Return whether a node reads what only the old class has from an optimizer that `compile` may have wrapped."""
    (owner, member), project = source.read(node), source.project
    if member not in names.OF_COMPILED[0] or _is_guarded(source, node, owner):
        return False
    is_of_keras = project.has_policies or source.imports_tensorflow or "keras" in source.modules
    if member not in keras_3.OLD_METHODS and ("torch" in source.modules or not is_of_keras):
        return False
    if any(getattr(each, "attr", "") == "optimizer" for each in source.values(owner)):
        return True
    # If the policy is the only cause of wrappers, an optimizer with a loss scale is from `compile`.
    is_likely = isinstance(node, ast.Call) or (project.has_policies and not project.makes_wrappers)
    is_named = bool(keras_3.OPTIMIZER.search(source.code(owner).rpartition(".")[2]))
    return is_likely and is_named and not any(isinstance(each, ast.Call) for each in source.values(owner))


def _is_caught(source: Uses, node: ast.AST) -> bool:
    """Return whether a program continues if a member does not exist."""
    outer = [each for each in source.ancestors(node) if isinstance(each, (ast.Try, ast.With))]
    return any(isinstance(each, ast.Try) or "suppress(" in source.code(each.items[0].context_expr) for each in outer)
