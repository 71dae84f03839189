"""Which attributes of an optimizer are its hyperparameters, for families that do not say so themselves."""

from __future__ import annotations

# What each optimizer's original (TensorFlow 2.4 to 2.8) passed to `_set_hyper`, so that `wrapper.beta_1` means what
# it meant. Optimizers that are younger than that follow their nearest relative.
_NAMES = {
    "Adadelta": ("rho",),
    "Adam": ("beta_1", "beta_2"),
    "Adafactor": ("beta_2_decay",),
    "AdamW": ("beta_1", "beta_2"),
    "Adamax": ("beta_1", "beta_2"),
    "Ftrl": ("learning_rate_power", "l1_regularization_strength", "l2_regularization_strength"),
    "Lamb": ("beta_1", "beta_2"),
    "Lion": ("beta_1", "beta_2"),
    "Nadam": ("beta_1", "beta_2"),
    "RMSprop": ("rho", "momentum"),
    "SGD": ("momentum",),
}


def names(optimizer: object) -> tuple[str, ...]:
    """Returns the names of an optimizer's hyperparameters, beside the learning rate.

    An optimizer class of your own names its own, in a class attribute `hyperparameter_names`.

    >>> class MyAdam:
    ...     hyperparameter_names = ("temperature",)
    >>> names(MyAdam())
    ('temperature',)

    Args:
        optimizer: an optimizer object of any library.

    Returns:
        The names, sorted as the class lists them; empty where nothing is known.
    """
    own = getattr(optimizer, "hyperparameter_names", None)
    if own is not None:
        return tuple(own)
    for base in type(optimizer).__mro__:
        if base.__name__ in _NAMES:
            return _NAMES[base.__name__]
    return ()
