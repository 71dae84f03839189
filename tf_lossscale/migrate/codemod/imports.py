"""Plans the edits to import statements once it is known which imported names are still used."""

from __future__ import annotations

import libcst as cst
from libcst.metadata import GlobalScope, ImportAssignment

from tf_lossscale.legacy import table
from tf_lossscale.migrate.codemod import names
from tf_lossscale.migrate.codemod.bindings import join
from tf_lossscale.migrate.codemod.edits import Visitor
from tf_lossscale.migrate.codemod.resolve import module_of

_MIXED_PRECISION = "keras.mixed_precision"
# Modules that TensorFlow removed completely.
_GONE = (f"{_MIXED_PRECISION}.experimental.", "tensorflow.contrib.mixed_precision.", "tensorflow.mixed_precision.")


class ImportPlanner(Visitor):
    """Plans the edits to a module's imports after the uses of the imported names have been edited."""

    def visit_ImportFrom(self, node: cst.ImportFrom) -> None:
        module = module_of(node)
        if isinstance(node.names, cst.ImportStar):
            self._star(node, node.names, module)
            return
        for alias in node.names:
            if alias.evaluated_name not in self._module.around.known.get(module, {}):
                bound = alias.evaluated_alias or alias.evaluated_name
                self._decide(node, alias, join(module, alias.evaluated_name), bound)

    def visit_Import(self, node: cst.Import) -> None:
        for alias in node.names:
            dotted = alias.evaluated_name
            if alias.asname:
                self._decide(node, alias, dotted, alias.evaluated_alias or "")
            elif names.canonical(dotted) in table.MODULES or names.canonical(dotted).startswith(_GONE):
                self._edits.replace_import(node, alias, f"import {dotted.split('.', 1)[0]}")

    def _decide(self, node: cst.CSTNode, alias: cst.ImportAlias, dotted: str, bound: str) -> None:
        name = names.canonical(dotted)
        new = self._new(dotted, name, bound)
        if names.is_kept(dotted):
            self._edits.notice(node, f"{alias.evaluated_name} {names.STILL_THERE}")
        elif new is None and name not in names.EMPTIED:
            if name not in table.OLD:
                self._without_counterpart(node, alias, dotted, bound)
        # In a file that does not import TensorFlow, Keras may run on another backend.
        elif self._module.imports_tensorflow or not dotted.startswith("keras.") or "experimental" in dotted:
            self._with_counterpart(node, alias, dotted, bound, new)

    def _without_counterpart(self, node: cst.CSTNode, alias: cst.ImportAlias, dotted: str, bound: str) -> None:
        """Plan how to edit the import of a name that is missing from the table of old names.

        The name may come from a removed module, a private module or another library.
        """
        name = names.canonical(dotted)
        short = dotted.rpartition(".")[2]
        is_private, is_gone = name.rpartition(".")[0] in names.PRIVATE, name.startswith(_GONE)
        if not is_private and not is_gone:
            if names.in_unused_copy(dotted):
                self._edits.notice(node, f"{dotted} {names.NOT_USED}")
        elif is_gone and not self._uses(node, bound)[0] and not self._is_exported(node, bound):
            self._edits.replace_import(node, alias, None)
        elif moved := names.moved(dotted):
            self._edits.replace_import(node, alias, _import(moved, bound))
            if names.in_unused_copy(moved):
                self._edits.notice(node, f"{moved} {names.NOT_USED}")
        elif is_private:
            self._edits.todo(node, f"{short} is private and has no counterpart.")
        else:
            self._edits.todo(node, f"{dotted} no longer exists and has no counterpart.")

    def _with_counterpart(
        self, node: cst.CSTNode, alias: cst.ImportAlias, dotted: str, bound: str, new: str | None
    ) -> None:
        """Plan how to edit the import of an old name, or of a module that contains only old names.

        `new` is the code of the new import, or None if there is nothing to import instead.
        """
        is_gone = names.canonical(dotted).startswith(_GONE)
        uses, remain = self._uses(node, bound)
        may_go = not remain and not self._is_exported(node, bound)
        if bound in self._edits.pinned:
            if new is not None:
                self._edits.notice(node, f"{bound} stays because not every use of it could be rewritten.")
        elif may_go and (uses or (new is None and is_gone)):
            self._edits.replace_import(node, alias, None)
        elif new is not None:
            self._edits.replace_import(node, alias, new)
        elif not remain and is_gone:
            self._edits.todo(node, f"{dotted} no longer exists. Other files import {bound} from this file.")

    def _new(self, dotted: str, name: str, bound: str) -> str | None:
        old, target = table.OLD.get(name), table.MODULES.get(name)
        if old is not None:
            target = table.WRAPPER if old.role == table.EXPERIMENTAL else old.new
        elif names.in_unused_copy(dotted) and name in names.CURRENT:
            target = name
        if target is None:
            return None
        if target.startswith("keras."):
            target = _library(dotted) + target[len("keras") :]
        return None if target == dotted else _import(target, bound)

    def _star(self, node: cst.ImportFrom, star: cst.ImportStar, module: str) -> None:
        name = names.canonical(module)
        if table.MODULES.get(name) == _MIXED_PRECISION or (name == _MIXED_PRECISION and names.in_unused_copy(module)):
            self._edits.replace_import(node, star, f"from {_library(module)}.mixed_precision import *")
        elif name in table.MODULES or (name in names.EMPTIED and name != _MIXED_PRECISION):
            self._edits.replace_import(node, star, None)

    def _uses(self, statement: cst.CSTNode, bound: str) -> tuple[int, int]:
        """Return how often this file uses an imported name, and how many of the uses remain after the edits."""
        uses = remain = 0
        for node in self._module.names.get(bound, ()):
            if not self._module.is_read(node) and not self._module.is_deleted(node):
                continue
            assignments = self._module.assignments(node)
            if any(isinstance(a, ImportAssignment) and a.node is statement for a in assignments):
                uses += 1
                gone = self._edits.gone
                remain += node not in gone and not any(a in gone for a in self._module.ancestors(node))
        return uses, remain + (bound in self._module.annotated)

    def _is_exported(self, statement: cst.CSTNode, bound: str) -> bool:
        is_global = isinstance(self._module.scopes.get(statement), GlobalScope)
        return is_global and bool({bound, "*"} & (self._module.around.requested | self._module.listed_in_all))


def _import(dotted: str, bound: str) -> str:
    module, _, name = dotted.rpartition(".")
    return f"from {module} import {name}" + ("" if bound == name else f" as {bound}")


def _library(dotted: str) -> str:
    for root in ("tf_keras", "keras"):
        if dotted.startswith(f"{root}."):
            return root
    return "tensorflow.keras"
