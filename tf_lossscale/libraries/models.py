"""The variables of models and layers, in every version of Keras and in TensorFlow."""

from __future__ import annotations

from typing import Any


def variables_of(model: Any) -> list[Any]:
    """Return all variables of a model, a layer or a module. An object without variables has none."""
    try:
        return list(getattr(model, "variables", ()))
    except ValueError:  # tf_keras raises it for a Sequential model that is not built.
        return []


def of_no_metric(variables: list[Any], model: Any) -> list[Any]:
    """Return the variables that are no states of a model's metrics."""
    states = {id(state) for metric in getattr(model, "metrics", ()) for state in metric.variables}
    return [variable for variable in variables if id(variable) not in states]
