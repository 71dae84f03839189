"""Reports what the rules do not see: old names in strings, dicts and objects, and members that only old objects have.

The rules follow imports and aliases, but no module in an attribute, a collection, an argument or a result.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tf_lossscale.legacy import table
from tf_lossscale.migrate.codemod import class_tests, keras_3, names, wrappers
from tf_lossscale.migrate.codemod.edits import Edits
from tf_lossscale.migrate.codemod.rules import NOT_FOLLOWED
from tf_lossscale.migrate.codemod.scopes import UNKNOWN, leads_to_old, string
from tf_lossscale.migrate.codemod.uses import Uses

# The customary names of the libraries.
_CUSTOMARY = ("tf", "tensorflow", "keras", "tf_keras")
#: The finding about an old name in an object that may be a module.
NO_ORIGIN = "this file does not show where {0} comes from. If it comes from TensorFlow or Keras, {1} {2}. Write {3}."
# The ends by which an old name is recognized in an object, and the name that each end most likely stands for.
_END = re.compile(r"LossScale|mixed_precision(?!\.Policy\Z)|\Aexperimental\.")
_OLD = [name for name in reversed(table.OLD) if name != table.WRAPPER]
_TAILS = [(name[dot.end() :], name) for name in _OLD for dot in re.finditer(r"\.", name)]
_ENDS = {tail: name for tail, name in _TAILS if _END.search(tail)}
_SHORT = {end.rpartition(".")[2] for end in _ENDS}
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
_OVERRIDDEN = {*table.OF_WRAPPER.names, "_compute_gradients", "_get_gradients"}


def report(source: Uses, edits: Edits) -> None:
    """Plan the findings for one file."""
    _in_modules(source, edits)
    for attribute in source.nodes(ast.Attribute):
        _kept(source, edits, attribute)
    for constant in source.nodes(ast.Constant):
        _string(source, edits, constant)
    for key, value in _items(source):
        # The loss scale of a wrapper, in a dict of metrics, is no argument.
        read = [each.func if isinstance(each, ast.Call) and not each.args else each for each in source.values(value)]
        is_metric = any(source.read(each)[1] == "loss_scale" for each in read)
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


def _in_modules(source: Uses, edits: Edits) -> None:
    """Report the old names in objects that may be modules, and the modules that a file keeps in objects."""
    for node in source.parents:
        owner, member = source.read(node)
        path = [*names.WORD.findall(source.code(owner)), member] if member in _SHORT else []
        end = next((end for i in range(len(path)) if (end := ".".join(path[i:])) in _ENDS), None)
        if end and _is_open(source, node, end):
            row = table.OLD[_ENDS[end]]
            change = "is now another class" if row.role == table.STABLE else "no longer exists"
            start = path[0] if path[0] in _CUSTOMARY else source.code(owner)
            new = table.WRAPPERS_WITH_OLD_ARGUMENTS.get(row.role, row.new)
            edits.todo(node, " ".join(NO_ORIGIN.format(start, source.code(node), change, new).split()))
    for kept in source.parents if source.project.reads_modules else ():
        parent, alias = source.parents[kept], source.aliases.get(kept)
        is_read = isinstance(parent, (ast.Attribute, ast.Expr)) or source.looked_up(kept, ["module"])
        is_module = bool({"tensorflow", "keras"} & set(map(table.canonical, source.dotted(kept))))
        is_loaded = isinstance(getattr(kept, "ctx", None), ast.Load)
        if is_module and is_loaded and not is_read and (not alias or isinstance(alias[0], ast.ClassDef)):
            edits.todo(kept, NOT_FOLLOWED)


def _is_open(source: Uses, node: ast.AST, end: str) -> bool:
    """Return whether an expression may be the old name that ends in the same way, and the rules do not handle it."""
    dotted, root, modules = source.dotted(node), source.root(source.read(node)[0]), source.project.modules
    if root and any(map(leads_to_old, source.dotted(root))):
        return False
    is_stable = table.OLD[_ENDS[end]].role == table.STABLE and not end.startswith("keras.")
    if is_stable and isinstance(call := source.parents[node], ast.Call) and call.func is node:
        # A module whose class has other arguments is replaced where it is kept.
        new = wrappers.form_of_call(source, call, {table.STABLE})
        if new != wrappers.Form(table.WRAPPER):
            return False
    # A class that a module of the project defines or imports, or Keras 3's class.
    owners = {each.split(".")[-2] for each in dotted if "." in each}
    if end in _SHORT and not owners.isdisjoint({"optimizers", *modules}):
        return False
    is_customary = root is not None and root.id in _CUSTOMARY
    return is_customary or not {each.partition(".")[0] for each in dotted}.isdisjoint({UNKNOWN, "", *modules})


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
    if _IN_A_STRING.search(value) or (is_import and table.canonical(value) == table.KERAS):
        edits.notice(node, _STRING)
    elif reason := source.stays(value):
        report_kept(source, edits, node, value, reason)


def _items(source: Uses) -> Iterator[tuple[str | None, ast.expr]]:
    """Yield the keys and values in dicts, in calls of `dict`, and in assignments to `name["key"]`."""
    for node in source.nodes(ast.Dict):
        yield from ((string(key), value) for key, value in zip(node.keys, node.values, strict=True) if key)
    for call in source.nodes(ast.Call):
        yield from ((each.arg, each.value) for each in call.keywords if source.is_builtin(call.func, "dict"))
    for stored in source.nodes(ast.Assign):
        yield from ((string(each.slice), stored.value) for each in stored.targets if isinstance(each, ast.Subscript))


def _private_attributes(source: Uses, edits: Edits) -> None:
    """Report private members of wrappers that a file overrides, assigns or calls."""
    derived = {source.parents[use.node]: use.roles & names.WRAPPERS for use in source.uses}
    wrappers = [each for each, wraps in derived.items() if isinstance(each, ast.ClassDef) and wraps]
    for method in (each for wrapper in wrappers for each in wrapper.body if getattr(each, "name", "") in _OVERRIDDEN):
        edits.todo(method, table.OF_WRAPPER.advice.format(getattr(method, "name", "")))
    for node in source.nodes(ast.Attribute):
        owner = source.code(node.value)
        is_wrapper = owner != "self" or _class_around(source, node) in wrappers
        if node.attr == "_loss_scale" and isinstance(node.ctx, ast.Store):
            # In a class that derives from an old loss scale, the attribute is the class's own.
            if owner != "self" or (wrappers and derived.get(_class_around(source, node), True)):
                edits.notice(node, _TAKES)
        elif node.attr in table.OF_WRAPPER.names and is_wrapper:
            edits.todo(node, table.OF_WRAPPER.advice.format(node.attr))
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
            edits.todo(node, table.OF_LOSS_SCALE.advice.format(code, what))


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
    needs = [node for node in source.parents if _needs_wrapper(source, node)]
    quiet = [node for node in needs if isinstance(node, ast.Call) or _is_caught(source, node)]
    tests: list[ast.AST] = [*looked_up, *quiet] if not keras_3.uses(source) else []
    if not source.constructs:
        classes = [use.node for use in source.uses if use.roles & {table.STABLE, table.EXPERIMENTAL}]
        tests += class_tests.tests(source) if classes else []
        needs += classes
    for node in tests[:1]:
        edits.todo(node, table.OF_COMPILED.advice)
    for node in [each for each in needs if each not in quiet][:1] if not tests else ():
        edits.notice(node, table.OF_COMPILED.advice)


def _needs_wrapper(source: Uses, node: ast.AST) -> bool:
    """Return whether a node reads what only the old class has from an optimizer that `compile` may have wrapped."""
    (owner, member), project = source.read(node), source.project
    if member not in table.OF_COMPILED.names or _is_guarded(source, node, owner):
        return False
    values, is_of_keras = source.values(owner), source.imports_tensorflow or "keras" in source.modules
    is_known = "torch" not in source.modules and (is_of_keras or project.has_policies)
    is_named = keras_3.OPTIMIZER.search(source.code(owner).rpartition(".")[2])
    # If the policy is the only cause of wrappers, an optimizer with a loss scale is from `compile`.
    is_likely = isinstance(node, ast.Call) or (project.has_policies and not project.makes_wrappers)
    is_given = bool(is_named) and is_likely and not any(isinstance(each, ast.Call) for each in values)
    is_of_model = is_given or any(getattr(each, "attr", "") == "optimizer" for each in values)
    return is_of_model and (is_known or member in keras_3.OLD_METHODS)


def _is_caught(source: Uses, node: ast.AST) -> bool:
    """Return whether a program continues if a member does not exist."""
    outer = (source.code(each) for each in source.ancestors(node) if isinstance(each, (ast.Try, ast.With)))
    return any(re.search(r"except\s*:|\b(AttributeError|Exception)\b", code) for code in outer)
