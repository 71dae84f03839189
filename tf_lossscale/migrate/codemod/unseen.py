"""Reports old names in strings and dicts, old names of unknown origin, and attributes that only old objects have."""

from __future__ import annotations

import ast
import re

from tf_lossscale.legacy import table
from tf_lossscale.migrate.codemod import class_tests, keras_3, names
from tf_lossscale.migrate.codemod.edits import Edits
from tf_lossscale.migrate.codemod.rules import NOT_FOLLOWED
from tf_lossscale.migrate.codemod.scopes import UNKNOWN, leads_to_old, string
from tf_lossscale.migrate.codemod.uses import Uses

# The customary names of the libraries.
_CUSTOMARY = {"tf": "tensorflow", "tensorflow": "tensorflow", "keras": "keras", "tf_keras": "keras"}
# The last part of each old name, without its module.
_SHORT = {name.rsplit(".", 1)[1] for name in table.OLD}
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
_NO_STATE = (
    "if {0} belongs to a tf_lossscale.LossScaleOptimizer, it {1}. Read the wrapper's loss_scale, initial_scale, "
    "dynamic_growth_steps and dynamic_counter, or make the wrapper with "
    "tf_lossscale.legacy.experimental.LossScaleOptimizer(optimizer, loss_scale), which has the old object."
)
_DECAYED = "write {}._decayed_lr, which the wrapper has. Keras 3's optimizers have no such method."
_OF_KERAS_3 = (
    "{} is of Keras 3's class, but this file also uses names of the old class, which tf_lossscale.LossScaleOptimizer "
    "replaces. Write get_scaled_loss and get_unscaled_gradients."
)
#: The hint about the wrappers that this package does not make.
COMPILED = (
    "compile() under mixed_float16, and other libraries, wrap optimizers in Keras's own LossScaleOptimizer, and the "
    "loss may stay unscaled. Give compile() a tf_lossscale.LossScaleOptimizer, or call tf_lossscale.wrap_in_compile()."
)
_NO_ORIGIN = "this file does not show where {0} comes from. If it comes from TensorFlow or Keras, {1} {2}. Write {3}."
# Private methods of the old wrapper classes that tf_lossscale's wrappers neither have nor call.
_HOOKS = {"_apply_gradients", "_apply_gradients_cross_replica", "_raise_if_strategy_unsupported", "_unscale_grads"}
# Private methods of the old wrapper classes that tf_lossscale's wrappers do not call.
_OVERRIDDEN = {*_HOOKS, "_compute_gradients", "_get_gradients"}
_HOOK = (
    "{} was a private method of the old class, which tf_lossscale does not have or does not call. Remove it, or write "
    "get_unscaled_gradients or apply_gradients."
)


def report(source: Uses, edits: Edits) -> None:
    """Plan the findings for one file."""
    for attribute in source.nodes(ast.Attribute):
        _unknown_origin(source, edits, attribute)
    for constant in source.nodes(ast.Constant):
        _string(source, edits, constant)
    for key, value in _items(source):
        is_argument = string(value) == "dynamic" or (
            isinstance(value, ast.Name) and bool(source.roles & names.WRAPPERS)
        )
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


def _unknown_origin(source: Uses, edits: Edits, node: ast.Attribute) -> None:
    """Report an old name in a module that is left, is the result of a call, or does not show where it comes from."""
    code, root = source.code(node), source.root(node)
    for dotted in source.dotted(node) if not isinstance(source.parents[node], ast.Attribute) else ():
        if (reason := source.stays(dotted)) and not (root and any(map(source.stays, source.dotted(root)))):
            report_kept(source, edits, node, dotted, reason)
    if re.match(r"([\w.]*\.)?mixed_precision\(", code) and node.attr in _SHORT and source.dotted(node) == {UNKNOWN}:
        edits.notice(node, NOT_FOLLOWED)
    elif root and root.id in _CUSTOMARY and not any(map(leads_to_old, source.dotted(root))):
        name = names.canonical(_CUSTOMARY[root.id] + code.removeprefix(root.id))
        row = table.OLD.get(name)
        if row and not (row.role == table.POLICY and "experimental" not in name):
            change = "is now another class" if row.role == table.STABLE else "no longer exists"
            new = table.WRAPPERS_WITH_OLD_ARGUMENTS.get(row.role, row.new)
            edits.todo(node, _NO_ORIGIN.format(root.id, code, change, new))


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
        edits.todo(method, _HOOK.format(getattr(method, "name", "")))
    for node in source.nodes(ast.Attribute):
        owner = source.code(node.value)
        is_wrapper = owner != "self" or _class_around(source, node) in wrappers
        if node.attr == "_loss_scale" and isinstance(node.ctx, ast.Store):
            # In a class that derives from an old loss scale, the attribute is the class's own.
            if owner != "self" or (wrappers and derived.get(_class_around(source, node), True)):
                edits.notice(node, _TAKES)
        elif node.attr in _HOOKS and is_wrapper:
            edits.todo(node, _HOOK.format(node.attr))
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
        is_suspect = is_called and "." in code and code != "self.loss_scale" and "torch" not in source.modules
        if (source.roles & names.WRAPPERS or is_suspect) and not _is_guarded(source, node, node):
            what = f"has no {parent.attr}" if isinstance(parent, ast.Attribute) else "is a tensor, not a function"
            edits.todo(node, _NO_STATE.format(code, what))


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
    wrapped = {use.node for use in source.uses}
    given = source.compiled_with
    is_bare = any(string(each) or (isinstance(each, ast.Call) and each.func not in wrapped) for each in given)
    if source.changes_compile or (source.constructs and not is_bare):
        return
    # A program looks for a method of the old class by a string. If it also uses Keras 3's methods, it is for both.
    looked_up = [node for node in source.nodes(ast.Constant) if string(node) in keras_3.OLD_METHODS]
    tests: list[ast.AST] = [*looked_up] if not keras_3.uses(source) else []
    needs: list[ast.AST] = [node for node in source.nodes(ast.Attribute) if _needs_wrapper(source, node)]
    if not source.constructs:
        classes = [use.node for use in source.uses if use.roles & {table.STABLE, table.EXPERIMENTAL}]
        tests += class_tests.tests(source) if classes else []
        needs += classes
    for node in tests[:1]:
        edits.todo(node, COMPILED)
    for node in needs[:1] if not tests else ():
        edits.notice(node, COMPILED)


def _needs_wrapper(source: Uses, node: ast.Attribute) -> bool:
    """Return whether a node reads what only the old class has from the optimizer of a model."""
    is_old = node.attr in keras_3.OLD_METHODS or (source.keeps_old_state and node in source.old_reads)
    is_of_model = any(getattr(each, "attr", "") == "optimizer" for each in source.values(node.value))
    return is_old and is_of_model and not _is_guarded(source, node, node.value)
