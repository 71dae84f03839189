"""AutoGraph leaves our code as it is, in a user's tf.function too: it is graph code already, and tracing is faster.

>>> @as_written
... def twice(x: int) -> int:
...     return 2 * x
>>> twice(2)
4
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

_Function = TypeVar("_Function", bound=Callable[..., Any])

#: TensorFlow's own decorator; for a type checker the function keeps its signature.
as_written: Callable[[_Function], _Function] = tf.autograph.experimental.do_not_convert
