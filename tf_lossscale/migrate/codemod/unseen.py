"""Reports old names in strings and dicts, old names of unknown origin, and attributes that only old objects have."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tf_lossscale.legacy import table
from tf_lossscale.migrate.codemod import names
from tf_lossscale.migrate.codemod.edits import Edits
from tf_lossscale.migrate.codemod.scopes import CUSTOMARY, UNKNOWN, string
from tf_lossscale.migrate.codemod.uses import Uses

# The last part of each old name, without its module.
_SHORT = {name.rsplit(".", 1)[1] for name in table.OLD}
_IN_A_STRING = re.compile(
    r"[\w.]*mixed_precision\.(experimental(\.\w+)*|LossScaleOptimizer|set_policy)"
    r"|tensorflow\.contrib\.mixed_precision[\w.]*"
    r"|(from|import)\s+(tensorflow|tf_keras|keras)[\w.]*(\.mixed_precision\b|\s+import\s+mixed_precision\b).*",
    re.DOTALL,
)
_IMPORTED = re.compile(r"(tensorflow|tf_keras|keras)(\.[\w.]+)?\.mixed_precision")
_IMPORTS = ("__import__", "import_module")
_STRING = "strings are not changed. If the program looks this old name up, call tf_lossscale.install()."
_CONFIG = (
    "the string names an old class. Restore the optimizer with tf_lossscale.LossScaleOptimizer.from_config(config), or "
    "call tf_lossscale.install()."
)
_UNPACKED = (
    "loss_scale is an argument of the old class only. The codemod does not follow a dict to the call that unpacks it."
)
_OF_CALL = (
    "the module is the result of a call, which this tool does not follow. If it is an old module of TensorFlow, call "
    "tf_lossscale.install(), which restores its names."
)
_TAKES = "_loss_scale takes an object with the methods __call__() and update(grads), such as a LossScale, not a number."
_NO_STATE = (
    "if {0} belongs to a tf_lossscale.LossScaleOptimizer, it {1}. Read the wrapper's loss_scale, initial_scale, "
    "dynamic_growth_steps and dynamic_counter, or make the wrapper with "
    "tf_lossscale.legacy.experimental.LossScaleOptimizer, which has the old object."
)
_DECAYED = "write {}._decayed_lr, which the wrapper has. Keras 3's optimizers have no such method."
#: The hint that a project gets at most once.
COMPILED = (
    "compile() under mixed_float16, and other libraries, wrap optimizers in Keras's own class: its objects are no "
    "instances of tf_lossscale.LossScaleOptimizer and have none of its methods. Give compile() a "
    "tf_lossscale.LossScaleOptimizer, or call tf_lossscale.wrap_in_compile()."
)
_RUN = f"tf.distribute has no {names.OLD_RUN} any more: write run."
_OWN_RUN = (
    f"this file defines {names.OLD_RUN} and keeps it. Calls in other files become run. Rename it in this file, too."
)
# What only the wrappers of TensorFlow 2 have, and Keras's own class has not.
_METHODS = ("get_scaled_loss", "get_unscaled_gradients")


class Unseen:
    """Plans the findings, and the renaming of `experimental_run_v2`, for one file.

    Args:
        source: the file.
        edits: receives the findings.
    """

    def __init__(self, source: Uses, edits: Edits):
        self._source = source
        self._edits = edits
        self._uses_wrapper = bool(source.roles & names.WRAPPERS)

    def apply(self) -> None:
        """Plan the findings."""
        for node in self._source.parents:
            if isinstance(node, ast.Attribute):
                self._attribute(node)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                self._string(node, node.value)
            elif isinstance(node, (ast.Dict, ast.keyword, ast.Assign)):
                for key, value in _items(self._source, node):
                    self._item(key, value)
            elif isinstance(node, ast.ClassDef):
                self._class(node)
        self._strategies()
        if not self._source.keeps_old_state and not self._source.uses_legacy:
            self._old_state()
        self._hint()

    def _attribute(self, node: ast.Attribute) -> None:
        source, code = self._source, self._source.code(node)
        is_called = isinstance(node.value, ast.Call) and re.match(r"(.*\.)?mixed_precision\(", code)
        if is_called and node.attr in _SHORT and source.dotted(node) == {UNKNOWN}:
            self._edits.notice(node, _OF_CALL)
        if node.attr == "_loss_scale" and isinstance(node.ctx, ast.Store) and self._uses_wrapper:
            owner = source.enclosing_class(node)
            if source.code(node.value) != "self" or (owner and self._is_wrapper(owner)):
                self._edits.notice(node, _TAKES)
        elif node.attr == "_decayed_lr" and isinstance(node.value, ast.Attribute) and self._uses_wrapper:
            if node.value.attr in ("inner_optimizer", "_optimizer"):
                self._edits.todo(node, _DECAYED.format(source.code(node.value.value)))
        elif node.attr in ("_raise_if_strategy_unsupported", "_unscale_grads") and self._uses_wrapper:
            self._edits.todo(node, f"{node.attr} {names.GONE_HOOK}")
        root = source.root(node) if code.replace(".", "").replace("_", "").isalnum() else None
        if root and root.id in CUSTOMARY and not any(map(names.leads_to_old, source.dotted(root))):
            name = names.canonical(CUSTOMARY[root.id] + code.removeprefix(root.id))
            row = table.OLD.get(name)
            if row and not (row.role == table.POLICY and "experimental" not in name):
                change = "is now another class" if row.role == table.STABLE else "no longer exists"
                self._edits.todo(
                    node,
                    f"this file does not show where {root.id} comes from. If it comes from TensorFlow or Keras, {code} "
                    f"{change}. Write {table.WRAPPERS_WITH_OLD_ARGUMENTS.get(row.role, row.new)}.",
                )

    def _class(self, node: ast.ClassDef) -> None:
        """Report private methods of the old wrapper classes that a subclass overrides or calls."""
        if not self._is_wrapper(node):
            return
        methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
        for method in methods:
            if method.name in names.HOOKS:
                reason = "overrides a private method of the old class, which tf_lossscale does not call."
                self._edits.todo(method, f"{method.name} {reason}")

    def _is_wrapper(self, node: ast.ClassDef) -> bool:
        """Return whether a class derives directly from an old wrapper class."""
        return any(use.node in node.bases and use.roles & names.WRAPPERS for use in self._source.uses)

    def _string(self, node: ast.Constant, value: str) -> None:
        source, parent = self._source, self._source.parents[node]
        if value == names.OLD_RUN:
            self._edits.notice(node, f"strings are not changed. {_RUN}")
        if "mixed_precision" not in value or isinstance(parent, ast.Expr):
            return
        is_imported = isinstance(parent, ast.Call) and source.code(parent.func).rsplit(".", 1)[-1] in _IMPORTS
        if _IN_A_STRING.fullmatch(value) or (is_imported and _IMPORTED.fullmatch(value)):
            self._edits.notice(node, _STRING)
        elif names.in_copy(value):
            self._edits.notice(node, f"{value} {names.IN_COPY}")

    def _item(self, key: str | None, value: ast.expr) -> None:
        """Report `loss_scale="dynamic"` and the class name of the old wrapper in a dict."""
        if key == "loss_scale" and (string(value) == "dynamic" or (self._uses_wrapper and isinstance(value, ast.Name))):
            if self._source.imports_tensorflow or self._source.roles - {table.OURS}:
                self._edits.notice(value, _UNPACKED)
        elif key == "class_name" and string(value) in ("LossScaleOptimizer", "LossScaleOptimizerV1"):
            self._edits.notice(value, _CONFIG)

    def _old_state(self) -> None:
        """Report the reads that fail if another file makes the wrapper with the new arguments."""
        source = self._source
        wraps = source.imports_tensorflow if source.around.wraps is None else source.around.wraps
        for node in source.old_state:
            parent = source.parents[node]
            is_called = isinstance(parent, ast.Call) and parent.func is node and source.code(node).count(".") > 0
            is_called = is_called and source.code(node) != "self.loss_scale"
            if (self._uses_wrapper or (is_called and wraps)) and not self._is_guarded(node):
                what = f"has no {parent.attr}" if isinstance(parent, ast.Attribute) else "is a tensor, not a function"
                self._edits.todo(node, _NO_STATE.format(source.code(node), what))

    def _is_guarded(self, node: ast.AST) -> bool:
        """Return whether an expression runs only if it is a loss scale object, as `callable` or `isinstance` say."""
        source, code = self._source, self._source.code(node)
        while node is not source.tree:
            outer, node = node, source.parents[node]
            if isinstance(node, (ast.If, ast.IfExp)) and outer is not node.test:
                tests = [part for part in ast.walk(node.test) if isinstance(part, ast.Call) and part.args]
                if any(
                    source.is_builtin(t.func, "callable", "isinstance") and source.code(t.args[0]) == code
                    for t in tests
                ):
                    return True
        return False

    def _strategies(self) -> None:
        """Rename `experimental_run_v2`. No other class had a method of this name, so every object's is renamed."""
        uses: list[ast.Attribute] = []
        own: list[ast.AST] = []
        for node in self._source.parents:
            if isinstance(node, ast.Attribute) and node.attr == names.OLD_RUN:
                outer = self._source.parents[node]
                # `strategy.run = strategy.experimental_run_v2` is a fallback for TensorFlow versions without `run`.
                is_shim = isinstance(outer, ast.Assign) and getattr(outer.targets[0], "attr", "") == "run"
                if isinstance(node.ctx, ast.Store):
                    own.append(node)
                elif not is_shim:
                    uses.append(node)
            elif names.OLD_RUN in (getattr(node, "name", None), getattr(node, "id", None)):
                own.append(node)
        for node in own:
            self._edits.notice(node, _OWN_RUN)
        for use in uses if not own else ():
            end = self._source.span(use)[1]
            self._edits.replace((end - len(names.OLD_RUN), end), "run")
            self._edits.rewritten(use)

    def _hint(self) -> None:
        """Give the project's hint for this file if a wrapper that `compile` makes may reach it."""
        source = self._source
        tests = [use.node for use in source.uses if use.roles & {table.STABLE, table.EXPERIMENTAL}]
        reads = [node for node in source.parents if self._reads_from_model(node)]
        if reads and (not source.constructs or self._compiles_bare()):
            self._edits.notice(reads[0], COMPILED)
        elif tests and not source.constructs:
            self._edits.notice(tests[0], COMPILED)

    def _reads_from_model(self, node: ast.AST) -> bool:
        """Return whether a node reads what Keras's own class does not have from `model.optimizer`."""
        if not isinstance(node, ast.Attribute) or getattr(node.value, "attr", "") != "optimizer":
            return False
        source = self._source
        return node.attr in _METHODS or (source.keeps_old_state and any(node is read for read in source.old_state))

    def _compiles_bare(self) -> bool:
        """Return whether this file certainly gives `compile` an optimizer that is not wrapped."""
        for node in self._source.parents:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "compile":
                optimizers = [k.value for k in node.keywords if k.arg == "optimizer"] or node.args[:1]
                for each in optimizers if node.keywords or len(node.args) > 1 else ():
                    is_wrapped = any(use.node is getattr(each, "func", None) for use in self._source.uses)
                    if string(each) or (isinstance(each, ast.Call) and not is_wrapped):
                        return True
        return False


def _items(source: Uses, node: ast.Dict | ast.keyword | ast.Assign) -> Iterator[tuple[str | None, ast.expr]]:
    """Yield the keys and values that a dict, a call of `dict` or an assignment to `name["key"]` contains."""
    if isinstance(node, ast.Dict):
        yield from ((string(key), value) for key, value in zip(node.keys, node.values, strict=True) if key)
    elif isinstance(node, ast.keyword):
        if source.is_builtin(getattr(source.parents[node], "func", node), "dict"):
            yield node.arg, node.value
    elif isinstance(node.targets[0], ast.Subscript):
        yield string(node.targets[0].slice), node.value
