"""Loss scaling in TensorFlow alone: no Keras, no optimizer classes."""

import importlib.util

if importlib.util.find_spec("tf_lossscale.core.fast"):  # without the folder the package works, and is slower
    from tf_lossscale.core import fast as fast
