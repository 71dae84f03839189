"""Loss scaling in pure TensorFlow, without Keras or optimizer classes."""

import importlib.util

# The core/fast folder is optional: if it is deleted, the package still works, but more slowly.
if importlib.util.find_spec("tf_lossscale.core.fast"):
    from tf_lossscale.core import fast as fast
