"""Dtype policies with a loss scale, as in `tf.keras.mixed_precision.experimental` up to TensorFlow 2.3."""

from __future__ import annotations

import functools
import sys
from typing import Any

import tensorflow as tf
from absl import logging

from tf_lossscale import layers
from tf_lossscale.legacy import loss_scale as loss_scale_lib


class Policies:
    """The policy functions of `tf.keras.mixed_precision.experimental`, for one Keras library.

    `set_policy` gives the Keras library a policy of the library's own class, so that models are saved as usual. The old
    policy, which has the loss scale, is an attribute of it. To get the object for a Keras library, call `policies_of`.
    """

    def __init__(self, library: Any):
        self._library = library
        self.Policy: Any = _policy_class(library)
        self.PolicyV1: Any = self.Policy
        self.StablePolicy: Any = _stable_policy_class(library, self.Policy)

    def global_policy(self) -> Any:
        """Return the global policy, with its loss scale."""
        return self._with_loss_scale(self._library.global_policy())

    def set_policy(self, policy: Any) -> None:
        """Set the global policy."""
        if policy in (None, "infer", "_infer"):
            policy = "float32"
        if isinstance(policy, str):
            policy = self.Policy(policy)
        if isinstance(policy, self.Policy):
            old, policy = policy, self._library.Policy(policy.name)
            setattr(policy, _OLD, old)
        self.set_global_policy(policy)

    def set_global_policy(self, policy: Any) -> None:
        """Set the global policy with the library's own function, unless the policy conflicts with the graph rewrite."""
        name = str(getattr(policy, "name", policy))
        if name.startswith("mixed_") and tf.__internal__.train.is_mixed_precision_graph_rewrite_enabled():
            raise ValueError(
                f"The global dtype policy cannot be {name!r} after enable_mixed_precision_graph_rewrite was called. "
                f"{_USE_ONE}"
            )
        self._library.set_global_policy(policy)

    def get_layer_policy(self, layer: Any) -> Any:
        """Return a layer's policy, with its loss scale."""
        policy = getattr(layer, "dtype_policy", None)
        if not isinstance(policy, self._library.Policy):
            raise ValueError(f"get_layer_policy() can only be called on a layer, but got: {layer!r}.")
        return self._with_loss_scale(policy)

    def loss_scale_of(self, policy: Any) -> Any:
        """Return the loss scale of the wrapper for a model with this policy, or None if it needs no wrapper."""
        policy = getattr(policy, _OLD, policy)
        if self.is_old(policy) and not policy.has_default_loss_scale:
            return policy.loss_scale
        return "dynamic" if policy.name == "mixed_float16" else None

    def is_old(self, policy: Any) -> bool:
        """Return whether a policy was set with the old `set_policy`, or is an instance of the old `Policy`."""
        return isinstance(getattr(policy, _OLD, policy), self.Policy)

    def _with_loss_scale(self, policy: Any) -> Any:
        policy = getattr(policy, _OLD, policy)
        return self.Policy(policy.name) if type(policy) is self._library.Policy else policy


# `set_policy` stores the old policy under this name in the plain policy that it sets, which layers keep.
_OLD = "_tf_lossscale_old_policy"


@functools.cache
def policies_of(library: str) -> Policies:
    """Return the object that stores the loss scale of a Keras library's global policy."""
    return Policies(layers.layers_in(library))


def require_no_mixed_policy() -> None:
    """Raise an error if a Keras library has a mixed global policy. Only imported libraries are checked."""
    for package in ("keras", "tf_keras"):
        mixed_precision = getattr(sys.modules.get(package), "mixed_precision", None)
        name = "" if mixed_precision is None else mixed_precision.global_policy().name
        if name.startswith("mixed_"):
            raise ValueError(
                f"The graph rewrite cannot be enabled, because the global dtype policy of {package} is {name!r}. "
                f"{_USE_ONE}"
            )


_USE_ONE = (
    "Both turn mixed precision on: use one of them. If in doubt, use the policy; it works in eager mode too, and each "
    "layer can have its own."
)


def _policy_class(library: Any) -> Any:
    @library.library.saving.register_keras_serializable("tf_lossscale.legacy")
    class Policy(library.Policy):
        """A dtype policy with a loss scale. `compile` wraps the optimizer with this loss scale.

        Args:
            name: "mixed_float16", "mixed_bfloat16" or the name of a dtype.
            loss_scale: "dynamic", a number, a LossScale, a config, or None for no loss scale. The default, "auto",
                means "dynamic" for "mixed_float16" and None otherwise.

        Source: `tf.keras.mixed_precision.experimental.Policy`,
        https://www.tensorflow.org/versions/r2.3/api_docs/python/tf/keras/mixed_precision/experimental/Policy
        """

        def __init__(self, name: str, loss_scale: Any = "auto"):
            super().__init__(name)
            self.has_default_loss_scale = isinstance(loss_scale, str) and loss_scale == "auto"
            if self.has_default_loss_scale:
                loss_scale = "dynamic" if name == "mixed_float16" else None
            # A dynamic loss scale has variables, so it is created on first access.
            self._loss_scale = loss_scale if self.has_default_loss_scale else loss_scale_lib.get(loss_scale)
            if self._loss_scale is not None and self.compute_dtype != "float16":
                logging.warning(
                    "Policy(%r, loss_scale=%r): only float16 gradients need a loss scale. Leave out `loss_scale`.",
                    name,
                    loss_scale,
                )

        @property
        def loss_scale(self) -> Any:
            """The policy's LossScale, or None if the policy has no loss scale."""
            self._loss_scale = loss_scale_lib.get(self._loss_scale)
            return self._loss_scale

        @property
        def should_cast_variables(self) -> bool:
            """Whether layers cast their variables to the compute dtype."""
            return self.variable_dtype != self.compute_dtype

        def get_config(self) -> dict[str, Any]:
            if self.has_default_loss_scale:
                return {"name": self.name}
            scale = self.loss_scale
            return {"name": self.name, "loss_scale": None if scale is None else config_of(scale)}

        @classmethod
        def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> Any:
            del custom_objects
            return cls(**config)

        def __repr__(self) -> str:
            return f'<Policy "{self.name}", loss_scale={self.loss_scale!r}>'

    Policy.__qualname__ = "Policy"
    return Policy


def _stable_policy_class(library: Any, with_loss_scale: Any) -> Any:
    plain: Any = library.Policy

    class Policies(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, plain) if cls is Policy else super().__instancecheck__(instance)

    class Policy(plain, metaclass=Policies):
        """Creates Keras's own dtype policy, or the old `Policy` with a loss scale if `loss_scale` is passed."""

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            if cls is not Policy:
                return super().__new__(cls)
            has_loss_scale = "loss_scale" in kwargs or len(args) > 1
            return (with_loss_scale if has_loss_scale else plain)(*args, **kwargs)

    return Policy


def config_of(loss_scale: Any) -> dict[str, Any]:
    """Return a loss scale's config, which `legacy.loss_scale.get` accepts."""
    return {"class_name": type(loss_scale).__name__, "config": loss_scale.get_config()}
