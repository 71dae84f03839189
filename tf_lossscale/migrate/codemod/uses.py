"""Finds the uses of old names in a file, and the facts about the file on which their rewrite depends."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable
from typing import NamedTuple

from tf_lossscale.legacy import table
from tf_lossscale.migrate.codemod import keras_3, names, old_state
from tf_lossscale.migrate.codemod.scopes import UNKNOWN, Scopes, Variable, string

_MODULES = {*table.PRIVATE, *table.MODULES}
_IN_COPY = (
    "is in TensorFlow's private copy of Keras and is left unchanged. It has no effect on tf.keras: if the layers and "
    "optimizers come from tf.keras, import it from tensorflow.keras and migrate again."
)
_BACKEND = "may run on another backend, because this file does not import TensorFlow."
_OF_KERAS_3 = [f"{root}{table.KERAS}.LossScaleOptimizer" for root in ("", "tensorflow.", "tensorflow.compat.v2.")]
_KERAS_3 = "is left unchanged, because this file uses methods that only Keras 3's class has."
# The names of layers, models and optimizers. The first group is the library.
_MODELS = re.compile(r"((?:tensorflow\.(?:python\.)?)?keras)\.(engine|[lL]ayer|[mM]odel|optimi|Sequential)")


class Project(NamedTuple):
    """Facts about the other files of a project that change how one file is migrated."""

    #: The names that other files may read in this file. "*" stands for all of its names.
    requested: frozenset[str] = frozenset()
    #: The names of the project's modules.
    modules: frozenset[str] = frozenset()
    #: Whether this file, a file that imports it, or a module that these files import, wraps the optimizers.
    wraps: bool = False
    #: Whether some file makes wrappers that have no old loss scale object any more.
    makes_wrappers: bool = False
    #: Whether some file makes or sets policies that have no loss scale any more.
    has_policies: bool = False
    #: Whether some file reads an old name in an object that may be a module.
    reads_modules: bool = False


#: The project of a file that is migrated alone.
ALONE = Project()


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
        return set(map(table.canonical, self.dotted))

    @property
    def is_sure(self) -> bool:
        """Whether the expression can only be a name of TensorFlow, Keras or this package."""
        return all(each.startswith(("keras.", "tensorflow.", "tf_lossscale.")) for each in self.canonical)


class Uses(Scopes):
    """The uses of old names in one file.

    >>> uses = Uses(b"from tensorflow.keras import mixed_precision as mp\\nmp.experimental.Policy('float32')")
    >>> [use.rows[0].new for use in uses.uses]
    ['keras.mixed_precision.Policy']
    """

    def __init__(self, content: bytes, project: Project = ALONE):
        super().__init__(content)
        self.project = project
        #: True if this file imports TensorFlow or tf_keras. Otherwise, Keras may run on another backend in this file.
        self.imports_tensorflow: bool = any(re.match(r"(tensorflow|tf_keras)\b", module) for module in self.modules)
        #: The uses of old names, in the order of the file.
        self.uses: list[Use] = []
        #: Old names in f-strings. Before Python 3.12, the parser does not know their places.
        self.in_f_strings: dict[ast.JoinedStr, Use] = {}
        #: Maps each variable to the names that read or delete it.
        self.names: dict[Variable, list[ast.Name]] = {}
        f_strings = {node: each for each in self.nodes(ast.JoinedStr) for node in ast.walk(each)}
        inner: set[ast.AST] = set()
        for node in self.parents:
            if isinstance(node, ast.Name):
                if isinstance(node.ctx, ast.Store):
                    continue
                if variable := self.variable(node):
                    self.names.setdefault(variable, []).append(node)
            if node in inner or not isinstance(node, (ast.Name, ast.Attribute)):
                continue
            if use := self._use(node):
                inner.update(ast.walk(node))
                if node in f_strings:
                    self.in_f_strings[f_strings[node]] = use
                else:
                    self.uses.append(use)
        #: The roles of the old names in this file.
        self.roles: set[str] = {role for use in self.uses for role in use.roles}

    def _use(self, node: ast.expr) -> Use | None:
        dotted = self.dotted(node)
        known = {table.canonical(each) for each in dotted}
        found = dotted | self.looked_up(node, dotted)
        if any(each.startswith(f"{table.LEGACY_MODULE}.") or self.stays(each) for each in found):
            return None
        rows = tuple(table.OLD[each] for each in sorted(known) if each in table.OLD)
        is_value = not isinstance(self.parents[node], ast.Attribute)
        modules = {*_MODULES, table.KERAS} if is_value else {*table.MODULES}
        is_module = bool(known & modules) or self.is_old(self.looked_up(node, dotted))
        if not rows and not is_module and not {each.rpartition(".")[0] for each in known} & _MODULES:
            return None
        root = self.root(node)
        return Use(node, dotted, rows, self.variable(root) if root and self.is_old(self.dotted(root)) else None)

    def known(self, variable: Variable) -> set[str]:
        """Return the canonical names that a variable may stand for."""
        return set(map(table.canonical, self.meanings(variable)))

    def roles_of(self, variable: Variable) -> set[str]:
        """Return the roles of the old names that a variable may stand for."""
        return {table.OLD[name].role for name in self.known(variable) & table.OLD.keys()}

    def stays(self, dotted: str) -> str | None:
        """Return the reason why a name that looks like an old one is not changed, or None."""
        if not self.imports_tensorflow and dotted == f"{table.KERAS}.LossScaleOptimizer":
            return _BACKEND
        if dotted in _OF_KERAS_3 and self._is_for_keras_3:
            return _KERAS_3
        return _IN_COPY if names.in_copy(dotted) else None

    @functools.cached_property
    def _is_for_keras_3(self) -> bool:
        return keras_3.is_for_keras_3(self)

    def has_no_effect(self, dotted: str) -> bool:
        """Return whether a public name is in TensorFlow's copy of Keras, and this file's models may not be."""
        found = {match[1] for match in map(_MODELS.match, self.mentioned) if match}
        return names.in_copy(dotted) and "._" not in dotted and found != {"tensorflow.python.keras"}

    def looked_up(self, node: ast.AST, dotted: Iterable[str]) -> set[str]:
        """Return the qualified names that a call with a module and a string, such as `hasattr`, looks up."""
        call = self.parents[node]
        is_first = isinstance(call, ast.Call) and len(call.args) > 1 and call.args[0] is node
        name = string(call.args[1]) if isinstance(call, ast.Call) and is_first else None
        return {f"{each}.{name}" for each in dotted if name and each != UNKNOWN}

    def root(self, node: ast.AST) -> ast.Name | None:
        """Return the name at the beginning of a dotted name."""
        while isinstance(node, ast.Attribute):
            node = node.value
        return node if isinstance(node, ast.Name) else None

    def is_old(self, dotted: Iterable[str]) -> bool:
        """Return whether one of these names is an old name, or a module whose names are all old."""
        return any(table.canonical(each) in {*table.OLD, *_MODULES} for each in dotted)

    def called(self, use: Use) -> ast.Call | None:
        """Return the call of a use, or None if the use is not called."""
        call = self.parents[use.node]
        return call if isinstance(call, ast.Call) and call.func is use.node else None

    def is_tested(self, node: ast.AST) -> bool:
        """Return whether a class is tested, annotated, or asked for an attribute, rather than called or stored."""
        while True:
            node, inner = self.parents[node], node
            if variable := self.aliases.get(inner):
                # The uses of the variable are uses of the class as well.
                return not self.is_requested(variable)
            if isinstance(node, (ast.Attribute, ast.Compare, ast.MatchClass, ast.arg)):
                return True
            if isinstance(node, ast.Call):
                return self.is_builtin(node.func, "isinstance", "issubclass")
            if inner in (getattr(node, name, None) for name in ("test", "annotation", "returns")):
                return True
            if not isinstance(node, (ast.BinOp, ast.BoolOp, ast.List, ast.Subscript, ast.Tuple, ast.UnaryOp)):
                return False

    @functools.cached_property
    def aliases(self) -> dict[ast.AST, Variable]:
        """Maps the value of each assignment to the variable that it is assigned to."""
        return {each.value: variable for variable, bound in self.bindings.items() for each in bound if each.value}

    def is_requested(self, variable: Variable) -> bool:
        """Return whether other code may read a variable of this file: another file, a string, or a class's objects."""
        scope, name = variable
        is_imported = isinstance(scope, ast.Module) and bool({name, "*"} & self.project.requested)
        return is_imported or name in self.quoted or isinstance(scope, ast.ClassDef)

    @functools.cached_property
    def compiled_with(self) -> list[ast.expr]:
        """The optimizers that this file passes to the method `compile` of a model."""
        calls = [call for call in self.nodes(ast.Call) if self.dotted(call.func) == {UNKNOWN}]
        calls = [call for call in calls if getattr(call.func, "attr", "") == "compile"]
        named = [each.value for call in calls for each in call.keywords if each.arg in ("optimizer", None)]
        return [*(call.args[0] for call in calls if call.args), *named]

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
        return any(f"{dotted}.".startswith(f"{table.LEGACY_MODULE}.") for dotted in self.mentioned)

    @functools.cached_property
    def changes_compile(self) -> bool:
        """Whether this file makes `compile` wrap optimizers in this package's class."""
        return not self.mentioned.isdisjoint({"tf_lossscale.install", "tf_lossscale.wrap_in_compile"})

    @functools.cached_property
    def keeps_old_state(self) -> bool:
        """Whether this file makes the experimental wrapper, and reads the state of its old loss scale object."""
        made = any(use.roles == {table.EXPERIMENTAL} and not self.is_tested(use.node) for use in self.uses)
        return made and bool(self.old_reads)

    @functools.cached_property
    def old_reads(self) -> list[ast.expr]:
        """The expressions that read the old loss scale object of a wrapper."""
        return old_state.reads(self)
