"""Plans the edit for each use of an old name in a module."""

from __future__ import annotations

from typing import Any

import libcst as cst
import libcst.matchers as m
from libcst.metadata import ClassScope

from tf_lossscale.legacy import table
from tf_lossscale.migrate.codemod import names
from tf_lossscale.migrate.codemod.arguments import COMMA, Written, as_they_are, code, text
from tf_lossscale.migrate.codemod.bindings import UNKNOWN
from tf_lossscale.migrate.codemod.edits import Now, Visitor, with_parentheses_of
from tf_lossscale.migrate.codemod.resolve import Meaning

# In an `isinstance` check, annotation or assignment, the name of a class may be nested in nodes of these types, at any
# depth.
_TRANSPARENT = (cst.BinaryOperation, cst.BooleanOperation, cst.IfExp, cst.List, cst.Subscript, cst.Tuple)
_PARTS = (cst.Arg, cst.ComparisonTarget, cst.Element, cst.Index, cst.SubscriptElement)

# Ways to use a module as a value. Each row contains the type of the node around the module, the number of levels to go
# up from this node, and a pattern. The codemod can track the module if the node at that level matches the pattern.
_VALUES: Any = (
    (cst.Arg, 1, m.Call(m.Name("getattr") | m.Name("hasattr"), [m.Arg(), m.Arg(m.SimpleString()), m.ZeroOrMore()])),
    (cst.Element, 2, m.Assign([m.AssignTarget(m.Tuple() | m.List()), m.ZeroOrMore()])),
    (cst.Assign, 0, m.Assign([m.AssignTarget(~m.Subscript()), m.ZeroOrMore()])),
    # The codemod cannot track a module inside nodes of these types, so their pattern, `m.Pass()`, never matches.
    ((cst.DictElement, cst.Param, cst.WithItem, cst.Return), 0, m.Pass()),
)
_NOT_FOLLOWED = (
    "this tool cannot follow the module any further. Old names that are looked up in it elsewhere are not changed."
)
_NOT = m.UnaryOperation(m.Not())
_ASSERTS = m.Attribute(attr=m.Name("assertIsInstance") | m.Name("assertNotIsInstance"))
_TYPING = {"typing.cast", "typing.TypeVar"}

# The roles of a name that refers to different classes in different TensorFlow versions.
_OF_TWO = {table.STABLE, table.EXPERIMENTAL}
_CHOOSE = f"Write {table.WRAPPER} or {table.WRAPPERS_WITH_OLD_ARGUMENTS[table.EXPERIMENTAL]}."


class Planner(Visitor):
    """Plans the edits to all uses of old names in one module."""

    # Calls. -----------------------------------------------------------------------------------------------------

    def visit_Call(self, node: cst.Call) -> None:
        is_getattr = self._module.is_builtin(node.func, "getattr")
        if len(node.args) == 2 + is_getattr and (is_getattr or self._module.is_builtin(node.func, "hasattr")):
            self._probe(node, is_getattr)
        elif is_getattr and len(node.args) == 2 and self._module.meaning(node).old:
            self._reference(node)
        meaning = self._module.meaning(node.func)
        if meaning.old:
            self._rename_arguments(node, meaning)
            self._call_of_old_name(node, meaning)

    def _rename_arguments(self, node: cst.Call, meaning: Meaning) -> None:
        renamed = {old: new for _, row in meaning.old for old, new in row.renamed.items()}
        keywords = [argument.keyword for argument in node.args if argument.keyword]
        for keyword in keywords if node.func not in self._edits.frozen else ():
            if keyword.value in renamed:
                self._edits.replace_name(keyword, renamed[keyword.value])

    def _call_of_old_name(self, node: cst.Call, meaning: Meaning) -> None:
        if node.func in self._edits.frozen or not meaning.roles & {*names.WRAPPERS}:
            # Only the name of the function changes. `visit_Name` or `visit_Attribute` replaces it.
            return
        written = self._module.written(node, meaning)
        func = None if self._keeps_name(node.func, written.target) else written.target
        (self._edits.gone if func else self._edits.frozen).add(node.func)
        if func or not self._is_unchanged(node, written):
            self._edits.gone.update(written.consumed)
            self._edits.rewrite_call(node, written, func)

    def _is_unchanged(self, node: cst.Call, written: Written) -> bool:
        return list(written.arguments) == as_they_are(node) and (
            written.target == table.WRAPPER or not self._module.meaning(node.func).roles & {table.EXPERIMENTAL}
        )

    def _probe(self, node: cst.Call, is_getattr: bool) -> None:
        """Make `hasattr(module, "old name")`, and `getattr` with a default, look up the new name."""
        if (attribute := text(node.args[1].value)) is None or self._module.is_shim(node, attribute):
            return
        full = {names.canonical(f"{d}.{attribute}") for d in self._module.dotted(node.args[0].value) if d != UNKNOWN}
        if len(full) != 1:
            return
        (name,) = full
        old = table.OLD.get(name)
        if old and (old.role == table.OURS or (old.role == table.STABLE and not is_getattr)):
            # The module still has this name, so the call stays as it is.
            return
        new = table.WRAPPERS_WITH_OLD_ARGUMENTS.get(old.role, old.new) if old else table.MODULES.get(name)
        if new is None or new == f"{table.KERAS}.{attribute}":
            return
        module, short = (names.POLICIES if new == table.KERAS else new).rsplit(".", 1)
        if module != table.KERAS:
            self._edits.replace_name(node.args[0].value, module)
        if short != attribute:
            self._edits.replace(
                node.args[1].value,
                lambda updated, now: updated.with_changes(value=updated.value.replace(attribute, short)),
            )

    def visit_Comparison(self, node: cst.Comparison) -> None:
        """Replace `type(x) is LossScaleOptimizer` with `isinstance`, because wrappers are instances of subclasses."""
        tested = self._module.type_tested(node)
        if tested is None or not self._module.meaning(node.comparisons[0].comparator).roles & set(names.WRAPPERS):
            return
        is_not = isinstance(node.comparisons[0].operator, (cst.IsNot, cst.NotEqual))

        def make(updated: cst.CSTNode, now: Now) -> cst.CSTNode:
            cls = updated.comparisons[0].comparator
            call = cst.Call(cst.Name("isinstance"), [cst.Arg(now(tested), comma=COMMA), cst.Arg(cls)])
            return with_parentheses_of(updated, cst.UnaryOperation(cst.Not(), call) if is_not else call)

        self._edits.replace(node, make)

    # Names and attributes. --------------------------------------------------------------------------------------

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        if self._edits.is_settled(node):
            return False
        if not self._module.is_read(node):
            return self._assigned(node)
        # The attribute may be a whole statement, such as `module.name` in a `try` block.
        if isinstance(self._module.parents[node], cst.Expr) and self._module.is_shim(node, node.attr.value):
            self._edits.freeze(node)
            return False
        if node.attr.value == "mixed_precision" and self._is_in_unused_copy(node):
            self._out_of_unused_copy(node)
        meaning = self._module.meaning(node)
        if meaning.old:
            self._reference(node)
            return bool(meaning.roles & {table.KERAS_FUNCTION, table.POLICY}) and node not in self._edits.gone
        dotted = {names.canonical(d) for d in self._module.dotted(node) if d != UNKNOWN}
        if dotted & table.MODULES.keys():
            return self._removed_module(node, dotted)
        return self._without_counterpart(node, {d.rpartition(".")[0] for d in dotted})

    def _without_counterpart(self, node: cst.Attribute, owners: set[str]) -> bool:
        """Report a name that comes from a removed or private module and is missing from the table of old names."""
        if owners and owners <= table.MODULES.keys() - table.OLD.keys():
            self._edits.todo(node, f"{code(node)} has no counterpart.")
            return False
        if owners & names.PRIVATE and all(map(names.is_kept, self._module.dotted(node))):
            self._edits.notice(node, f"{code(node)} {names.STILL_THERE}")
        elif owners & names.PRIVATE:
            self._edits.todo(node, f"{code(node)} is private and has no counterpart.")
        return True

    def _is_in_unused_copy(self, node: cst.Attribute) -> bool:
        dotted = self._module.dotted(node)
        return all(map(names.in_unused_copy, dotted)) and not self._module.through_project(node)

    def _out_of_unused_copy(self, node: cst.Attribute) -> None:
        """Replace `tensorflow.python.keras.mixed_precision` with `tensorflow.keras.mixed_precision`."""
        python = node.value.value if isinstance(node.value, cst.Attribute) else None
        if isinstance(python, cst.Attribute) and python.attr.value == "python":
            self._edits.replace(python, lambda updated, now: updated.value)
        else:
            self._edits.todo(node, f"{code(node)} {names.NOT_USED} Import keras from tensorflow.")

    def _assigned(self, node: cst.Attribute) -> bool:
        """Report assignments to old names, such as `tf.keras.mixed_precision.LossScaleOptimizer = ...`."""
        if self._module.dotted(node.value) == {UNKNOWN}:
            return True
        if self._module.is_shim(node, node.attr.value):
            self._edits.freeze(node.value)
            return False
        gone = {names.canonical(d) for d in self._module.dotted(node)} & table.MODULES.keys()
        meaning, same = self._module.meaning(node), f"{table.KERAS}.{node.attr.value}"
        if not gone and {old.role for _, old in meaning.old if old.new != same} <= {table.OURS}:
            owners = {names.canonical(d) for d in self._module.dotted(node.value)}
            return bool(meaning.old) or self._without_counterpart(node, owners)
        self._edits.todo(node, "the rewritten code uses another name, so this assignment has no effect.")
        return False

    def visit_Name(self, node: cst.Name) -> None:
        if self._edits.is_settled(node) or not self._module.is_read(node):
            return
        if self._module.dotted(node) - {UNKNOWN}:
            self._out_of_sight(node)
        if self._module.meaning(node).old:
            self._reference(node)

    def _reference(self, node: cst.BaseExpression) -> None:
        """Plan the replacement of an old name that is not called as a wrapper's constructor."""
        meaning = self._module.meaning(node)
        roles = meaning.roles
        if roles & {table.KERAS_FUNCTION, table.POLICY}:
            self._policy_name(node, meaning)
            return
        target = self._target(node, roles)
        if target is None:
            self._edits.todo(
                node, f"{code(node)} may be either of two classes, which take different arguments. {_CHOOSE}"
            )
            target = table.WRAPPER
        if not self._keeps_name(node, target):
            self._edits.replace_name(node, target)

    def _target(self, node: cst.BaseExpression, roles: set[str]) -> str | None:
        if roles <= set(names.WRAPPERS):
            if roles <= {table.STABLE, table.OURS} or self._is_only_tested(node):
                return table.WRAPPERS_WITH_OLD_ARGUMENTS[table.CONTRIB] if roles == {table.CONTRIB} else table.WRAPPER
            subclass = self._module.parents.get(self._module.parents[node])
            if roles == _OF_TWO and isinstance(subclass, cst.ClassDef) and self._module.takes_newer_arguments(subclass):
                return table.WRAPPER
            return table.WRAPPERS_WITH_OLD_ARGUMENTS[next(iter(roles))] if len(roles) == 1 else None
        new = {old.new for _, old in self._module.meaning(node).old}
        return new.pop() if len(new) == 1 else None

    def _is_only_tested(self, node: cst.BaseExpression) -> bool:
        """Return whether this use of a class neither calls nor subclasses it.

        This is the case in an `isinstance` check, in an annotation, and in an assignment that only gives the class
        another name.
        """
        inner: cst.CSTNode = node
        for outer in self._module.ancestors(node):
            if isinstance(outer, (cst.Annotation, cst.Comparison, cst.Attribute, cst.MatchClass)):
                return True
            if getattr(outer, "test", None) is inner or m.matches(outer, _NOT):
                return True
            if isinstance(outer, cst.Call):
                is_test = any(self._module.is_builtin(outer.func, f) for f in ("isinstance", "issubclass"))
                return is_test or m.matches(outer.func, _ASSERTS) or self._module.dotted(outer.func) <= _TYPING
            if isinstance(outer, (cst.Assign, cst.AnnAssign, cst.NamedExpr)) and outer.value is inner:
                # An assigned class may be called directly, as in `(name := class)(...)`. If it is assigned in the body
                # of a class, it may be called through an instance, which the codemod does not track.
                is_called = getattr(self._module.parents[outer], "func", None) is outer
                in_class = isinstance(self._module.scopes.get(outer), ClassScope)
                return not (is_called or in_class or isinstance(inner, cst.BooleanOperation)) and _is_alias(outer)
            if not isinstance(outer, (*_TRANSPARENT, *_PARTS)):
                return False
            inner = outer
        return False

    def _keeps_name(self, node: cst.BaseExpression, target: str) -> bool:
        """Return whether a name can stay unchanged, because the import or assignment that binds it is rewritten."""
        if isinstance(node, cst.Name) and node.value in self._edits.pinned:
            return False
        meaning = self._module.meaning(node)
        if meaning.roles <= {table.OURS}:
            return target == table.WRAPPER
        bound = {table.WRAPPER if o.role in (table.STABLE, table.EXPERIMENTAL) else o.new for _, o in meaning.old}
        if bound != {target}:
            return False
        if isinstance(node, cst.Name):
            assignments = self._module.assignments(node)
            return bool(assignments) and not any(isinstance(getattr(a, "scope", None), ClassScope) for a in assignments)
        return self._module.through_project(node)

    def _policy_name(self, node: cst.BaseExpression, meaning: Meaning) -> None:
        short = {dotted.rsplit(".", 1)[1] for dotted, _ in meaning.old}
        if self._edits.legacy_policies and len(short) == 1 and not self._is_only_tested(node):
            self._edits.replace_name(node, f"{names.POLICIES}.{short.pop()}".replace("set_global_policy", "set_policy"))
        else:
            self._rename_keras(node, meaning)

    def _rename_keras(self, node: cst.BaseExpression, meaning: Meaning) -> None:
        """Rename `set_policy` in `x.experimental.set_policy`. `_removed_module` removes `.experimental`."""
        new = {old.new.rsplit(".", 1)[1] for _, old in meaning.old}
        old_module = any(not d.endswith(o.new) for d, o in meaning.old)
        if len(new) != 1 or not old_module or self._is_pinned(node):
            return
        (short,) = new
        if isinstance(node, cst.Attribute) and not self._module.through_project(node):
            shown = code(node.with_changes(attr=cst.Name(short))).replace(".experimental", "").replace(".policy", "")
            self._edits.replace(node, lambda u, now: u.with_changes(attr=cst.Name(short)), shown)
        elif isinstance(node, cst.Name) and not self._module.assignments(node) and short != node.value:
            self._edits.replace(node, lambda u, now: u.with_changes(value=short))

    def _is_pinned(self, node: cst.BaseExpression) -> bool:
        while isinstance(node, cst.Attribute):
            node = node.value
        return isinstance(node, cst.Name) and node.value in self._edits.pinned

    def _removed_module(self, node: cst.Attribute, dotted: set[str]) -> bool:
        parent = self._module.parents[node]
        if self._module.through_project(node):
            return True
        self._out_of_sight(node)
        new = {table.MODULES.get(name, name) for name in dotted}
        if len(new) == 1 and "keras.mixed_precision" in new:
            if node.attr.value in ("experimental", "policy"):
                self._edits.expressions[node] = lambda updated, now: updated.value
                if not isinstance(parent, cst.Attribute):
                    self._edits.replace(node, self._edits.expressions[node])
            return True
        if len(new) == 1 and not isinstance(parent, cst.Attribute):
            (module,) = new
            self._edits.replace_name(node, module)
            return False
        return True

    def _out_of_sight(self, node: cst.BaseExpression) -> None:
        """If a removed module is used as a value that the codemod cannot track, report it."""
        if not {names.canonical(dotted) for dotted in self._module.dotted(node)} & table.MODULES.keys():
            return
        outer = self._module.parents[node]
        while isinstance(outer, (cst.IfExp, cst.BooleanOperation)):
            outer = self._module.parents[outer]
        function = self._module.enclosing(outer, cst.FunctionDef)
        if isinstance(outer, cst.Return) and function and not function.decorators and not _must_be_given(function):
            # The codemod can track a Python module that is returned by a function without required arguments.
            return
        above = [outer, *self._module.ancestors(outer)]
        if any(isinstance(outer, kind) and not m.matches(above[up], follows) for kind, up, follows in _VALUES):
            self._edits.notice(node, _NOT_FOLLOWED)


def _must_be_given(function: cst.FunctionDef) -> bool:
    parameters = (*function.params.posonly_params, *function.params.params, *function.params.kwonly_params)
    return any(p.default is None and p.name.value not in ("self", "cls") for p in parameters)


def _is_alias(statement: cst.Assign | cst.AnnAssign | cst.NamedExpr) -> bool:
    """Return whether an assignment binds only variables, not attributes or items."""
    targets = [t.target for t in statement.targets] if isinstance(statement, cst.Assign) else [statement.target]
    return not any(m.findall(target, m.Attribute() | m.Subscript()) for target in targets)
