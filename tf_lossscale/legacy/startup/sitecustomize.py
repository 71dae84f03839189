"""Calls `install` when Python starts. `tf-lossscale run` puts this file's folder on PYTHONPATH."""

import os
import sys

try:
    import tf_lossscale

    tf_lossscale.install()
except (ImportError, SyntaxError):
    # The program has started another Python, in which this package is not installed or too new.
    pass

# The program sees neither this folder nor this module. The environment may have a sitecustomize of its own.
sys.path.remove(os.path.dirname(__file__))
_this = sys.modules.pop("sitecustomize")
try:
    import sitecustomize  # noqa: F401
except ImportError as _error:
    if getattr(_error, "name", "sitecustomize") != "sitecustomize":
        raise
    sys.modules["sitecustomize"] = _this
