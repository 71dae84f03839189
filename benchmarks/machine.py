"""Describes the computer that runs the benchmarks, and the installed versions of Python and the libraries."""

import importlib.metadata
import os
import pathlib
import platform

from benchmarks import contenders


def description() -> dict[str, object]:
    """Return the processor's model, the number of cores, and the versions of Python and the libraries."""
    libraries = ["tensorflow", "keras", "tf_keras", *(["torch"] if contenders.installed(contenders.TORCH) else [])]
    return {
        "processor": _model(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in libraries},
    }


def _model() -> str:
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()
