"""Finds the uses of old names in a file, and the facts about the file on which their rewrite depends."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tf_lossscale.legacy import table
from tf_lossscale.migrate.codemod import names
from tf_lossscale.migrate.codemod.scopes import UNKNOWN, Scopes, Variable, string

_TYPING = {"typing.cast", "typing.TypeVar"}
_ASSERTIONS = ("assertIsInstance", "assertNotIsInstance")
# In an `isinstance` check or annotation, the name of a class may be nested in nodes of these types, at any depth.
_TRANSPARENT = (ast.BinOp, ast.List, ast.Subscript, ast.Tuple, ast.keyword)
# The state that a wrapper's `_loss_scale` still has today.
_STILL_STATE = {"counter", "current_loss_scale", "growth_steps", "multiplier"}
# The names of Keras's own modules that exist on every backend.
_ON_ANY_BACKEND = {f"{table.KERAS}.{name}" for name in ("LossScaleOptimizer", "Policy")}


class Around(NamedTuple):
    """The facts about the other files of a project on which the migration of one file depends."""

    #: The names that other files import from this file, including "*" if they may use any of its names.
    requested: frozenset[str] = frozenset()
    #: Whether another file wraps an optimizer. None if there are no other files.
    wraps: bool | None = None


ALONE = Around()


class Use(NamedTuple):
    """An expression that refers to an old name, to a removed module, or to a name in a removed or private module."""

    node: ast.expr
    #: The qualified names that the expression may stand for.
    dotted: frozenset[str]
    #: The rows of the table of old names.
    rows: tuple[table.Old, ...]
    #: The variable at the beginning of the expression, if it stands for an old name or a removed module.
    variable: Variable | None

    @property
    def roles(self) -> set[str]:
        """The roles of the old names."""
        return {row.role for row in self.rows}

    @property
    def canonical(self) -> set[str]:
        """The canonical qualified names."""
        return {names.canonical(dotted) for dotted in self.dotted}

    @property
    def is_sure(self) -> bool:
        """Whether the expression can only be a name of TensorFlow, Keras or this package."""
        libraries = ("keras.", "tensorflow.", "tf_lossscale.")
        return all(names.canonical(dotted).startswith(libraries) for dotted in self.dotted)


class Uses(Scopes):
    """The uses of old names in one file.

    >>> uses = Uses(b"from tensorflow.keras import mixed_precision as mp\\nmp.experimental.Policy('float32')")
    >>> [use.rows[0].new for use in uses.uses]
    ['keras.mixed_precision.Policy']

    Args:
        content: the bytes of the file.
        around: facts about the other files of the project.

    Raises:
        ValueError: the file cannot be parsed.
    """

    def __init__(self, content: bytes, around: Around = ALONE):
        super().__init__(content)
        self.around = around
        #: True if this file imports TensorFlow or tf_keras. Otherwise, Keras may run on another backend in this file.
        self.imports_tensorflow = any(re.match(r"(tensorflow|tf_keras)\b", module) for module in self.modules)
        #: The uses of old names, in the order of the file.
        self.uses: list[Use] = []
        #: Assignments to old names in modules.
        self.assigned: list[ast.Attribute] = []
        #: Maps each variable to the names that read or delete it.
        self.names: dict[Variable, list[ast.Name]] = {}
        inner: set[ast.AST] = set()
        for node in self.parents:
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store) and (to := self.variable(node)):
                self.names.setdefault(to, []).append(node)
            if node in inner or not isinstance(node, (ast.Name, ast.Attribute, ast.Call)):
                continue
            if isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del)):
                if isinstance(node, ast.Attribute) and self.is_old(self.dotted(node)):
                    self.assigned.append(node)
                    inner.update(ast.walk(node))
            elif use := self._use(node):
                self.uses.append(use)
                inner.update(ast.walk(node.args[0] if isinstance(node, ast.Call) else node))
        #: The roles of the old names in this file.
        self.roles = {role for use in self.uses for role in use.roles}

    def _use(self, node: ast.expr) -> Use | None:
        dotted = self.dotted(node)
        known = {names.canonical(each) for each in dotted}
        parents = {each.rpartition(".")[0] for each in known}
        is_value = not isinstance(self.parents[node], ast.Attribute)
        modules = {*table.MODULES, table.KERAS, *names.PRIVATE} if is_value else {*table.MODULES}
        is_module = bool(known & modules) or self.is_old(self.looked_up(node, dotted))
        rows = tuple(table.OLD[each] for each in sorted(known) if each in table.OLD)
        if any(each.startswith(f"{table.LEGACY_MODULE}.") for each in dotted):
            return None
        if not rows and not is_module and not parents & (names.PRIVATE | table.MODULES.keys()):
            return None
        if any(map(names.in_copy, dotted)) or any(map(self.is_on_any_backend, dotted)):
            rows = ()
        root = self.root(node)
        variable = self.variable(root) if root else None
        return Use(node, dotted, rows, variable if root and self.is_old(self.dotted(root)) else None)

    def looked_up(self, node: ast.AST, dotted: Iterable[str]) -> set[str]:
        """Return the qualified names that a call with a module and a string, such as `hasattr`, looks up."""
        call = self.parents[node]
        is_first = isinstance(call, ast.Call) and len(call.args) > 1 and call.args[0] is node
        name = string(call.args[1]) if isinstance(call, ast.Call) and is_first else None
        return {f"{each}.{name}" for each in dotted if name and each != UNKNOWN}

    def root(self, node: ast.AST) -> ast.Name | None:
        """Return the name at the beginning of a dotted name, or of `getattr(dotted name, ...)`."""
        while isinstance(node, (ast.Attribute, ast.Call)):
            node = node.value if isinstance(node, ast.Attribute) else node.args[0]
        return node if isinstance(node, ast.Name) else None

    def is_old(self, dotted: Iterable[str]) -> bool:
        """Return whether one of these names is an old name, or a module whose names are all old."""
        return any(names.canonical(each) in {*table.OLD, *table.MODULES, *names.PRIVATE} for each in dotted)

    def is_on_any_backend(self, dotted: str) -> bool:
        """Return whether a name is Keras's own, in a file in which Keras may run on another backend."""
        return not self.imports_tensorflow and dotted.startswith("keras.") and dotted in _ON_ANY_BACKEND

    # Facts about a use. -----------------------------------------------------------------------------------------------

    def called(self, use: Use) -> ast.Call | None:
        """Return the call of a use, or None if the use is not called."""
        call = self.parents[use.node]
        return call if isinstance(call, ast.Call) and call.func is use.node else None

    def is_tested(self, node: ast.AST) -> bool:
        """Return whether a class is tested, annotated, or asked for a class method, rather than called or stored."""
        while True:
            node, outer = self.parents[node], node
            if isinstance(node, (ast.Attribute, ast.Compare, ast.MatchClass, ast.arg, ast.AnnAssign)):
                return not isinstance(node, ast.AnnAssign) or outer is node.annotation
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                return outer is node.returns
            if isinstance(node, ast.UnaryOp) or getattr(node, "test", None) is outer:
                return True
            if isinstance(node, ast.Call):
                is_assertion = isinstance(node.func, ast.Attribute) and node.func.attr in _ASSERTIONS
                is_test = self.is_builtin(node.func, "isinstance", "issubclass") or is_assertion
                return is_test or self.dotted(node.func) <= _TYPING
            if isinstance(node, ast.BoolOp) and not isinstance(self.parents[node], (ast.If, ast.IfExp, ast.While)):
                return False
            if not isinstance(node, (*_TRANSPARENT, ast.BoolOp)):
                return False

    def alias(self, node: ast.AST) -> Variable | None:
        """Return the variable to which an assignment gives an expression as another name, or None."""
        outer = self.parents[node]
        outer = self.parents[outer] if isinstance(outer, ast.Tuple) else outer
        if not isinstance(outer, (ast.Assign, ast.AnnAssign, ast.NamedExpr)):
            return None
        for variable, bindings in self.bindings.items():
            if any(binding.value is node for binding in bindings):
                return variable
        return None

    def is_exported(self, variable: Variable, uses: int) -> bool:
        """Return whether other code may read a variable of this file: another file, a string, or a class's objects.

        An import that nothing in this file uses is there for others.
        """
        scope, name = variable
        is_requested = isinstance(scope, ast.Module) and bool({name, "*"} & self.around.requested)
        return uses == 0 or is_requested or name in self.quoted or isinstance(scope, ast.ClassDef)

    # Facts about the file. --------------------------------------------------------------------------------------------

    @functools.cached_property
    def constructs(self) -> bool:
        """Whether this file wraps an optimizer."""
        made = (use.node for use in self.uses if use.roles & {*names.WRAPPERS, table.GRAPH_REWRITE})
        return self.uses_legacy or any(
            not self.is_tested(node) or getattr(self.parents[node], "attr", "") == "from_config" for node in made
        )

    @functools.cached_property
    def uses_legacy(self) -> bool:
        """Whether this file uses the names of this package that have their old meaning."""
        legacy = f"{table.LEGACY_MODULE}."
        attributes = [node for node in self.parents if isinstance(node, ast.Attribute)]
        return any(f"{module}.".startswith(legacy) for module in self.modules) or any(
            each.startswith(legacy) for node in attributes for each in self.dotted(node)
        )

    @functools.cached_property
    def keeps_old_state(self) -> bool:
        """Whether this file makes the experimental wrapper, and reads the state of its old loss scale object."""
        made = [use for use in self.uses if use.roles == {table.EXPERIMENTAL} and not self.is_tested(use.node)]
        return bool(made and self.old_state)

    @functools.cached_property
    def old_state(self) -> list[ast.expr]:
        """The expressions that a tensor in place of the old loss scale object breaks."""
        return list(self._reads_of_old_state())

    def _reads_of_old_state(self) -> Iterator[ast.expr]:
        values = [node for node in self.parents if isinstance(node, ast.Assign) and self.is_loss_scale(node.value)]
        kept = {target.id for node in values for target in node.targets if isinstance(target, ast.Name)}
        reads_config = any(isinstance(node, ast.Attribute) and node.attr == "get_config" for node in self.parents)
        for node in self.parents:
            if isinstance(node, ast.Call):
                is_kept = isinstance(node.func, ast.Name) and node.func.id in kept
                if not node.args and not node.keywords and (is_kept or self.is_loss_scale(node.func)):
                    yield node.func
                elif self.is_builtin(node.func, "isinstance") and self.is_loss_scale(node.args[0]):
                    yield node.args[0]
                elif self._makes(node, {table.STABLE, table.EXPERIMENTAL}):
                    given = (*node.args[1:], *(keyword.value for keyword in node.keywords))
                    yield from (value for value in given if self.is_shared(value))
            elif isinstance(node, ast.Attribute) and node.attr in names.STATE:
                inner = node.value
                is_kept = isinstance(inner, ast.Name) and inner.id in kept
                is_private = isinstance(inner, ast.Attribute) and inner.attr == "_loss_scale"
                if is_kept or self.is_loss_scale(inner) or (is_private and node.attr not in _STILL_STATE):
                    yield inner
            elif isinstance(node, ast.Subscript) and string(node.slice) in ("loss_scale", "optimizer") and reads_config:
                yield node.value

    def _makes(self, call: ast.AST, roles: set[str]) -> bool:
        """Return whether a node is a call to an old name with one of the given roles."""
        known = {names.canonical(dotted) for dotted in self.dotted(call.func)} if isinstance(call, ast.Call) else set()
        return any(table.OLD[name].role in roles for name in known if name in table.OLD)

    def _made(self, roles: set[str]) -> set[str]:
        """Return the variables and attributes to which this file assigns the results of calls to old names."""
        made = [node for node in self.parents if isinstance(node, ast.Assign) and self._makes(node.value, roles)]
        return {self.code(target) for node in made for target in node.targets}

    def is_shared(self, node: ast.AST) -> bool:
        """Return whether an expression is the loss scale of a wrapper that this file makes."""
        if not isinstance(node, ast.Attribute) or node.attr not in ("loss_scale", "_loss_scale"):
            return False
        return self.code(node.value) in self._made({table.STABLE, table.EXPERIMENTAL})

    def is_loss_scale(self, node: ast.AST) -> bool:
        """Return whether an expression reads an attribute `loss_scale` that may be an optimizer's."""
        if not isinstance(node, ast.Attribute) or node.attr != "loss_scale" or self.is_policy(node.value):
            return False
        methods = [each.name for each in self.parents if isinstance(each, ast.FunctionDef)]
        return not ("loss_scale" in methods and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))

    def is_policy(self, node: ast.AST) -> bool:
        """Return whether an expression's name, or the function that it calls, suggests that it is a dtype policy."""
        node = node.func if isinstance(node, ast.Call) else node
        name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
        return "policy" in str(name).lower() or (isinstance(node, ast.Name) and node.id in self.policies)

    @functools.cached_property
    def policies(self) -> set[str]:
        """The names to which this file assigns dtype policies."""
        assigned = [node for node in self.parents if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)]
        asked = [node for node in assigned if self.code(node.value).endswith("global_policy()")]
        return self._made({table.POLICY}) | {self.code(target) for node in asked for target in node.targets}
