"""Loss scaling in pure TensorFlow, without Keras or optimizer classes."""

import importlib.util

if importlib.util.find_spec("tf_lossscale.core.fast"):  # without this folder the package is slower but works
    from tf_lossscale.core import fast as fast
