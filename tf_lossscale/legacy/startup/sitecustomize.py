"""Calls `install` when Python starts. `tf-lossscale run` puts this file's folder on PYTHONPATH."""

import os
import sys

import tf_lossscale

tf_lossscale.install()

# The program sees neither this folder nor this module. The environment may have a sitecustomize of its own.
sys.path.remove(os.path.dirname(__file__))
_this = sys.modules.pop("sitecustomize")
try:
    import sitecustomize  # noqa: F401
except ModuleNotFoundError:
    sys.modules["sitecustomize"] = _this
