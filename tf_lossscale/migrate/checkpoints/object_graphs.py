"""Reads files that contain an object graph: checkpoints from `tf.train.Checkpoint`, and variables of SavedModels."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from typing import Any

from tf_lossscale.core.loss_scale import STEP_COUNTS
from tf_lossscale.migrate.checkpoints import slots as slot_names
from tf_lossscale.migrate.checkpoints.saved import (
    LIBRARIES,
    File,
    FileError,
    Optimizer,
    Slot,
    Tensor,
    explaining_damage,
    scale_values,
)
from tf_lossscale.migrate.checkpoints.savers import MIXED_PRECISION, last_part

KEY = "_CHECKPOINTABLE_OBJECT_GRAPH"
# tf_keras may omit the optimizer's name from the names of slot variables, which then begin with the slot's name. Maps
# these names to the class. If several names are present, the first of them in this dict tells the class.
_CLASS_BY_SLOT = {
    "velocity": "RMSprop",
    "u": "Adamax",
    "linear": "Ftrl",
    "accumulated_grad": "Adadelta",
    "accumulator": "Adagrad",
    "v": "Adam",
    "m": "SGD",
}
_OF_TF22 = "LossScaleOptimizer of 1.14 to 2.2"
_SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"
_NEITHER_MODEL_NOR_OPTIMIZER = re.compile(r"(^|/)(save_counter$|keras_api/)")


def read(path: str, reader: Any, tensor: Any) -> File:
    """Read a checkpoint that has an object graph."""
    with explaining_damage(path, "its object graph"):
        graph = _Graph(path, parse(reader.get_tensor(KEY)), tensor)
        optimizers = [graph.optimizer(node) for node in graph.optimizers()]
        variables, order_is_known = graph.variables()
    return File(path, "tf.train.Checkpoint", _writer(optimizers), variables, optimizers, order_is_known, graph)


def parse(serialized: bytes) -> Any:
    """Parse the serialized object graph of a checkpoint."""
    from tensorflow.core.protobuf import trackable_object_graph_pb2 as trackable

    return trackable.TrackableObjectGraph.FromString(serialized)


def _writer(optimizers: list[Optimizer]) -> str:
    if any(optimizer.wrapper == _OF_TF22 for optimizer in optimizers):
        return "TensorFlow 1.14 to 2.2 (tf.keras)"
    return LIBRARIES[optimizers[0].family] if optimizers else "TensorFlow"


class _Graph:
    def __init__(self, path: str, graph: Any, tensor: Any):
        self._path = path
        self._nodes = graph.nodes
        self._tensor = tensor
        self._children = [{child.local_name: child.node_id for child in node.children} for node in graph.nodes]
        self._paths = self._shortest_paths()
        #: Maps the path of each object to its node. An object has one path for each of its names.
        self.places = {"": 0}
        for node, path in self._paths.items():
            self.places |= {f"{path}/{name}".lstrip("/"): child for name, child in self._children[node].items()}
        self._of_optimizers: set[int] = set()
        lists = [children["_trainable_variables"] for children in self._children if "_trainable_variables" in children]
        self._trained = {slot.original_variable_node_id for node in self._nodes for slot in node.slot_variables}
        self._trained.update(node for each in lists for node in self._children[each].values())
        #: The nodes whose values are part of an `Optimizer`.
        self._read: set[int] = set()

    def _shortest_paths(self) -> dict[int, str]:
        paths = {0: ""}
        # The loop also visits the nodes that it adds to the list.
        for node in (waiting := [0]):
            for name, child in self._children[node].items():
                if child not in paths:
                    paths[child] = f"{paths[node]}/{name}".lstrip("/")
                    waiting.append(child)
        return paths

    def _attribute(self, node: int) -> Any:
        return next((a for a in self._nodes[node].attributes if a.name == "VARIABLE_VALUE"), None)

    def tensor(self, node: int) -> Tensor | None:
        attribute = self._attribute(node)
        if attribute is None:
            return None
        key = attribute.checkpoint_key
        path = self._paths.get(node, key.removesuffix(_SUFFIX))
        return self._tensor(key, path, attribute.full_name or path)

    def _full_names(self, nodes: Iterable[int]) -> list[str]:
        return [attribute.full_name for node in nodes if (attribute := self._attribute(node))]

    def _number(self, node: int, name: str) -> Any:
        tensor = self._part(node, name, ())
        return None if tensor is None else tensor.number()

    def _part(self, node: int, name: str, shape: tuple[int, ...]) -> Tensor | None:
        """Return the variable of a name and a shape in an object, which is going to be read."""
        child = self._children[node].get(name)
        tensor = None if child is None else self.tensor(child)
        if child is None or tensor is None or tensor.shape != shape:
            return None
        self._read.add(child)
        return tensor

    def optimizers(self) -> list[int]:
        """Return the nodes of the optimizers. A wrapped optimizer is represented by the node of its wrapper."""
        nodes = [node for node in sorted(self._paths) if self._is_optimizer(node)]
        inner = {self._inner(node) for node in nodes if self._inner(node) != node}
        return [node for node in nodes if node not in inner]

    def _is_optimizer(self, node: int) -> bool:
        children = self._children[node]
        return (
            {"_iterations", "_learning_rate"} <= children.keys()
            or {"_iterations", "_variables"} <= children.keys()
            or {"base_optimizer", "loss_scale"} <= children.keys()
            or ("iter" in children and bool({"learning_rate", "decay", "beta_1", "rho"} & children.keys()))
            or bool(self._nodes[node].slot_variables)
        )

    def _inner(self, node: int) -> int:
        children = self._children[node]
        for name in ("inner_optimizer", "base_optimizer"):
            # TensorFlow 2.3 to 2.15 save an empty `base_optimizer`, and store all state in the wrapper.
            if name in children and (self._children[children[name]] or self._nodes[children[name]].slot_variables):
                return children[name]
        if "iter" not in children and "_iterations" not in children:
            return children.get("base_optimizer", node)
        return node

    def optimizer(self, node: int) -> Optimizer:
        inner = self._inner(node)
        children = self._children[inner]
        if "_iterations" in children:
            family = "keras3" if "_trainable_variables" in children else "tf_keras"
            made = self._with_lists(inner, family)
        else:
            made = self._with_slot_variables(inner, "tf_keras_legacy" if "iter" in children else "tf1")
        made.path = self._paths[node]
        self._loss_scale(node, inner, made)
        own = self._descendants(node)
        self._of_optimizers |= own
        others = [self.tensor(each) for each in sorted(own - self._read - self._trained)]
        made.others = [tensor.path for tensor in others if tensor is not None]
        return made

    def _loss_scale(self, node: int, inner: int, made: Optimizer) -> None:
        children = self._children[node]
        if "dynamic_scale" in children:
            made.wrapper, of_scale = "Keras 3's LossScaleOptimizer", node
            # This wrapper saves a step count and a learning rate that it does not use.
            self._read |= {children[name] for name in ("_iterations", "_learning_rate") if name in children}
        elif "loss_scale" in children:
            of_scale = children["loss_scale"]
            special = {"keras3": "tf_lossscale", "tf1": MIXED_PRECISION}
            if inner != node:
                special["tf_keras_legacy"] = _OF_TF22
            made.wrapper = special.get(made.family, "LossScaleOptimizer")
            made.scale_is_fixed = not self._children[of_scale]
        else:
            if "base_optimizer" in children:
                made.wrapper, made.scale_is_fixed = "LossScaleOptimizer with a fixed scale", True
            return
        made.scale_state = scale_values(lambda name: self._number(of_scale, name))
        # Only a SavedModel of this package contains them.
        counts = self._part(of_scale, "step_counts", (len(STEP_COUNTS),)) if made.scale_state else None
        if counts is not None:
            made.scale_state |= dict(zip(STEP_COUNTS, counts.value().tolist()))

    def _descendants(self, node: int) -> set[int]:
        def parts(each: int) -> list[int]:
            slots = [slot.slot_variable_node_id for slot in self._nodes[each].slot_variables]
            return [*self._children[each].values(), *slots]

        return {*_reached(node, parts)}

    def _with_slot_variables(self, node: int, family: str) -> Optimizer:
        """Read an optimizer from TensorFlow 1, TensorFlow 2.0 to 2.10 or tf_keras.optimizers.legacy."""
        slots: dict[str, list[Slot]] = {}
        for slot in self._nodes[node].slot_variables:
            tensor = self.tensor(slot.slot_variable_node_id)
            owner = self.tensor(slot.original_variable_node_id)
            if tensor is not None:
                slots.setdefault(slot.slot_name, []).append(Slot(tensor, owner))
                self._read.add(slot.slot_variable_node_id)
        names = self._full_names(self._children[node].values())
        hyper = {name: self._number(node, name) for name in self._children[node]}
        numbers: dict[str, Any] = {name: value for name, value in hyper.items() if value is not None}
        powers = {name: numbers.pop(name) for name in list(numbers) if name.endswith("_power")}
        product = numbers.pop("momentum_cache", None)
        rate = numbers.pop("learning_rate", None)
        iterations = numbers.pop("iter", None)
        of_tf1 = family == "tf1"
        if of_tf1:
            slots = slot_names.of_tf1(slots)
            steps, is_exact = slot_names.steps_of_powers(powers)
            iterations = steps if is_exact else self._number(0, "global_step")
        slot_variables = [slot.tensor.name for each in slots.values() for slot in each]
        names = (
            [slot_names.today(last_part(variable)) for variable in slot_variables]
            if of_tf1
            else names or slot_variables
        )
        name = slot_names.class_of(set(slots), names, is_nadam=product is not None)
        if not slots and (of_tf1 or ("momentum" in hyper and "rho" not in hyper)):
            # In TensorFlow 2, only SGD and RMSprop have a hyperparameter `momentum`, and only RMSprop also has `rho`.
            name = "SGD"
        return Optimizer(
            "", family, name, None, iterations, rate, numbers, slots=slots, nadam_product=product, powers=powers
        )

    def _with_lists(self, node: int, family: str) -> Optimizer:
        """Read a Keras 3 or tf_keras optimizer, which stores a list of variables for each slot."""
        children = self._children[node]
        order = self._children[children["_trainable_variables"]] if family == "keras3" else {}
        trained = [self.tensor(order[i]) for i in sorted(order, key=int)]
        lists: dict[str, list[Slot]] = {}
        for attribute, child in children.items():
            entries = self._children[child]
            if attribute in ("_variables", "_trainable_variables") or not all(i.isdigit() for i in entries):
                continue
            for i in sorted(entries, key=int):
                tensor = self.tensor(entries[i])
                if tensor is not None:
                    owner = self.tensor(order[i]) if i in order else None
                    lists.setdefault(attribute, []).append(Slot(tensor, owner))
                    self._read.add(entries[i])
        names = [each.rpartition("/")[0] for each in self._full_names([children["_iterations"]])]
        names += [each[0].tensor.name.partition("/")[0] for each in lists.values()]
        if family == "tf_keras":
            names += [each for slot, each in _CLASS_BY_SLOT.items() if slot in names][:1]
        product = self._number(node, "_u_product")
        name = slot_names.class_of(set(lists), names, is_nadam=product is not None)
        # SGD without momentum has only a step count and a learning rate. Muon has slots in lists that are not saved.
        if name is None and not lists and "momentums" in children and len(self._children[children["_variables"]]) <= 2:
            name = "SGD"
        iterations, rate = self._number(node, "_iterations"), self._number(node, "_learning_rate")
        slots = slot_names.canonical(name, lists)
        made = Optimizer("", family, name, None, iterations, rate, slots=slots, nadam_product=product)
        made.trained = [tensor for tensor in trained if tensor is not None]
        return made

    def variables(self) -> tuple[list[Tensor], bool]:
        """Return the variables outside the optimizers, and whether they are in Keras's order.

        The caller must have called `optimizer` for every optimizer.
        """
        listed = self.under(0)
        # The object graph does not contain the layers that a Keras 3 model has in a Python list or dict, so the places
        # of their variables among the other variables are unknown.
        known = {tensor.path for tensor in listed}
        tensors = map(self.tensor, sorted({*range(len(self._nodes))} - self._own()))
        unplaced = [tensor for tensor in tensors if tensor is not None and tensor.path not in known]
        found = [each for each in (*listed, *unplaced) if not _NEITHER_MODEL_NOR_OPTIMIZER.search(each.path)]
        return found, not unplaced

    def _own(self) -> set[int]:
        """Return the optimizers' own nodes."""
        return self._of_optimizers - self._trained

    def under(self, start: int) -> list[Tensor]:
        """Return the variables that can be reached from a node without passing through the optimizers' own nodes.

        As in Keras, a layer's own variables precede the variables of its sublayers, and the trained ones come first.
        """

        def parts(node: int) -> list[int]:
            children = self._children[node].values()
            return sorted(children, key=lambda part: (self._attribute(part) is None, part not in self._trained))

        found = map(self.tensor, _reached(start, parts, self._own()))
        return [each for each in found if each is not None and not _NEITHER_MODEL_NOR_OPTIMIZER.search(each.path)]

    def match(self, start: int, given: Any) -> list[tuple[Tensor, Any]]:
        """Pair the variables under a node with the variables of an object that have the same paths.

        This is the rule of `tf.train.Checkpoint.restore`. Some variables of Keras 3's layers have a name with a leading
        underscore, which tf_keras's do not have.
        """
        import tensorflow as tf

        # A Checkpoint turns a list or dict into an object with children.
        holder: Any = tf.train.Checkpoint(given=given)
        view = tf.train.TrackableView(holder)
        found, nodes = {start: holder.given}, {id(holder.given): start}
        for node in (waiting := [start]):
            others = view.children(found[node])
            for name, child in self._children[node].items():
                names = (name, name.lstrip("_"), f"_{name}")
                other = next((others[each] for each in names if each in others), None)
                if other is None or child in self._own():
                    continue
                if child not in found:
                    waiting.append(child)
                if found.setdefault(child, other) is not other or nodes.setdefault(id(other), child) != child:
                    self._require_none_under(child, name)
        pairs = [(self.tensor(node), each) for node, each in found.items() if hasattr(each, "assign")]
        return [(tensor, each) for tensor, each in pairs if tensor is not None]

    def _require_none_under(self, node: int, name: str) -> None:
        if shared := self.under(node):
            raise FileError(
                f"{self._path}: the objects are not connected as in the file: {name} leads to {shared[0].path}, which "
                "another name in the file or in yours also leads to, but not in both. Pass a dict {path in the file: "
                "model or variable} of the parts."
            )


def _reached(start: int, parts: Callable[[int], list[int]], without: Collection[int] = ()) -> dict[int, None]:
    """Return the nodes that can be reached without passing through some nodes, in the order of a depth-first search."""
    order: dict[int, None] = {}
    waiting = [start]
    while waiting:
        node = waiting.pop()
        if node not in order and node not in without:
            order[node] = None
            waiting += reversed(parts(node))
    return order
