"""What a wrapper consists of."""

from __future__ import annotations

from typing import Any

from tf_lossscale.core.clusters import Clusters
from tf_lossscale.core.diagnosis import Diagnosis
from tf_lossscale.core.exponents import Exponents
from tf_lossscale.wrapper.contract import Contract
from tf_lossscale.wrapper.family import Family
from tf_lossscale.wrapper.stall import Stall


class Parts:
    """The attributes of every wrapper; its methods are in the classes derived from this one.

    >>> Parts._family_class is None
    True
    """

    #: The class of the family whose optimizers this class wraps; None in classes that are for all families.
    _family_class: type[Family] | None = None

    _optimizer: Any
    _family: Family
    _loss_scale: Any
    _contract: Contract
    _stall: Stall
    _diagnosis: Diagnosis | None
    _exponents: Exponents | None
    _clusters: Clusters | None
    _traced: bool
