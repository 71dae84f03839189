"""Reports old names in strings, in unpacked arguments and in modules that cannot be resolved."""

from __future__ import annotations

import re

import libcst as cst
import libcst.matchers as m
from libcst.helpers import get_full_name_for_node

from tf_lossscale.legacy import table
from tf_lossscale.migrate.codemod import names
from tf_lossscale.migrate.codemod.arguments import keyword_of, text
from tf_lossscale.migrate.codemod.edits import Visitor
from tf_lossscale.migrate.codemod.project import leads_to_old
from tf_lossscale.migrate.codemod.resolve import LIBRARIES

# The last part of each old name, without its module.
_SHORT = {name.rsplit(".", 1)[1] for name in table.OLD}
_IN_A_STRING = re.compile(
    r"[\w.]*mixed_precision\.(experimental(\.\w+)*|LossScaleOptimizer|set_policy)"
    r"|tensorflow\.contrib\.mixed_precision[\w.]*"
    r"|(from|import)\s+(tensorflow|tf_keras|keras)[\w.]*(\.mixed_precision\b|\s+import\s+mixed_precision\b).*",
    re.DOTALL,
)
_IMPORTED = re.compile(r"(tensorflow|tf_keras|keras)(\.[\w.]+)?\.mixed_precision")
_IMPORTS = m.Call(m.Name("__import__") | m.Name("import_module") | m.Attribute(attr=m.Name("import_module")))
_UNPACKED = (
    "loss_scale is an argument of the old class only. The codemod does not follow a dict to the call that unpacks it."
)


class UnseenPlanner(Visitor):
    """Plans TODO comments and notices for a module's uses of old names that the other planners cannot resolve."""

    def visit_Arg(self, node: cst.Arg) -> None:
        call = self._module.parents[node]
        is_of_dict = isinstance(call, cst.Call) and self._module.is_builtin(call.func, "dict")
        if is_of_dict and keyword_of(node) == "loss_scale" and text(node.value) == "dynamic":
            self._in_a_dict(node)

    def _in_a_dict(self, node: cst.CSTNode) -> None:
        """Report `loss_scale="dynamic"` in a dict if the file imports TensorFlow or uses an old name."""
        if self._module.imports_tensorflow or self._module.uses_an_old_name:
            self._edits.notice(node, _UNPACKED)

    def visit_Attribute(self, node: cst.Attribute) -> None:
        name = get_full_name_for_node(node)
        if isinstance(node.value, cst.Call) and node.attr.value in _SHORT:
            func = get_full_name_for_node(node.value.func) or ""
            if func.rsplit(".", 1)[-1] == "mixed_precision" and not self._module.meaning(node).old:
                self._edits.notice(
                    node,
                    "the module is the result of a call, which this tool does not follow. If it is an old module of "
                    "TensorFlow, call tf_lossscale.install(), which restores its names.",
                )
        if name is None or name.split(".", 1)[0] not in LIBRARIES:
            return
        root = name.split(".", 1)[0]
        old = table.OLD.get(names.canonical(LIBRARIES[root] + name[len(root) :]))
        if old is None or (old.role == table.POLICY and "experimental" not in name):
            return
        dotted = self._module.dotted(node)
        if name in dotted and root == "keras" and not self._module.imports_tensorflow:
            self._edits.notice(node, "this file does not import TensorFlow, so keras may run on another backend.")
        elif all(not leads_to_old(d) for d in dotted):
            change = "is now another class" if old.role == table.STABLE else "no longer exists"
            self._edits.todo(
                node,
                f"this file does not show where {root} comes from. If it comes from TensorFlow or Keras, {name} "
                f"{change}. Write {table.WRAPPERS_WITH_OLD_ARGUMENTS.get(old.role, old.new)}.",
            )

    def visit_SimpleString(self, node: cst.SimpleString) -> None:
        parent = self._module.parents.get(node)
        if "mixed_precision" not in node.value or isinstance(parent, cst.Expr) or (value := text(node)) is None:
            return
        is_imported = isinstance(parent, cst.Arg) and m.matches(self._module.parents[parent], _IMPORTS)
        if _IN_A_STRING.fullmatch(value) or (is_imported and _IMPORTED.fullmatch(value)):
            self._edits.notice(
                node, "strings are not changed. If the program looks this old name up, call tf_lossscale.install()."
            )
        elif names.in_unused_copy(value):
            self._edits.notice(node, f"{value} {names.NOT_USED}")

    def visit_DictElement(self, node: cst.DictElement) -> None:
        if text(node.key) == "loss_scale" and text(node.value) == "dynamic":
            self._in_a_dict(node.value)

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        owner = self._module.enclosing(node, cst.ClassDef)
        if node.name.value in names.HOOKS and self._module.is_wrapper_class(owner):
            self._edits.todo(
                node.name,
                f"{node.name.value} overrides a private method of the old class, which tf_lossscale does not call.",
            )
