"""What Keras 3 calls the parts of a model that Keras 2 saved, in a `tf.train.Checkpoint`."""

from __future__ import annotations

import re


def with_keras3_names(objects: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """Returns the objects of a file with Keras 3's names for their parts beside those of Keras 2.

    Keras 2 has a functional or sequential model's layers as `layer-0`, `layer-1`; Keras 3 has them in a list
    `_operations`, and a sequential model's one place further, behind its input, in `_functional`. A weight `kernel` is
    `_kernel` in some of its layers.

    >>> there = with_keras3_names({"model": {"layer-0": "dense"}, "dense": {"kernel": "weight"}})
    >>> there["dense"]
    {'kernel': 'weight', '_kernel': 'weight'}
    >>> there["model"]["_operations"], there["model/_operations"]
    ('model/_operations', {'0': 'dense'})

    Args:
        objects: path of an object -> name of a part -> path of that part.

    Returns:
        The same with more names.
    """
    found = {}
    for path, parts in objects.items():
        found[path] = dict(parts)
        layers = {int(name[6:]): part for name, part in parts.items() if re.fullmatch(r"layer-\d+", name)}
        if layers:
            lists = {
                f"{path}/_operations": {str(i): part for i, part in layers.items()},
                f"{path}/_functional/_operations": {str(i + 1): part for i, part in layers.items()},
                f"{path}/_functional": {"_operations": f"{path}/_functional/_operations"},
            }
            found.update(lists)
            found[path].update(_operations=f"{path}/_operations", _functional=f"{path}/_functional")
        for name, part in parts.items():
            if part not in objects and f"_{name}" not in parts:
                found[path][f"_{name}"] = part
    return found
