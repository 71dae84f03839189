"""Runs a recording program in the virtual environment of its original.

    python -m record.program RECORDING CASES.json RESULT.json [PATTERN [distributed]]

CASES.json is an earlier recording, from which only the inputs of the cases are read. PATTERN selects cases by
"part/case".

With the argument `distributed`, only cases under MirroredStrategy are recorded, on two virtual CPUs. Without it, all
other cases are recorded, on one CPU, because a `tf.function` of TensorFlow 1.15 may fail on virtual CPUs.
"""

import datetime
import fnmatch
import importlib
import json
import os
import platform
import re
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

#: For each recording, the module that makes it, and the libraries whose versions are recorded.
RECORDERS = {
    "lso_experimental_tf23": ("loss_scale_optimizer", ("tensorflow", "numpy")),
    "lso_tf24": ("loss_scale_optimizer", ("tensorflow", "numpy")),
    "lso_tf28": ("loss_scale_optimizer", ("tensorflow", "keras", "numpy")),
    "lso_tfkeras221_legacy": ("loss_scale_optimizer", ("tensorflow", "tf_keras", "numpy")),
    "lso_tfkeras221_new": ("loss_scale_optimizer", ("tensorflow", "tf_keras", "numpy")),
    "keras3_lso": ("loss_scale_optimizer", ("tensorflow", "keras", "numpy")),
    "dynamic_loss_scale_tf115": ("dynamic_loss_scale", ("tensorflow", "numpy")),
    "dynamic_loss_scale_tf23": ("dynamic_loss_scale", ("tensorflow", "numpy")),
    "dynamic_loss_scale_compat_v1_tf221": ("dynamic_loss_scale", ("tensorflow", "numpy")),
    "contrib_exponential_manager_tf115": ("tensorflow_1", ("tensorflow", "numpy")),
    "mixed_precision_lso_tf115": ("tensorflow_1", ("tensorflow", "numpy")),
    "torch_adafactor": ("torch_adafactor", ("torch", "numpy")),
    "mindspore_managers": ("mindspore_managers", ("mindspore", "numpy")),
}


def virtual_cpus():
    """Create two virtual CPUs. TensorFlow must not have been used before."""
    import tensorflow as tf

    config = getattr(tf.config, "list_physical_devices", None)
    if config is not None and hasattr(tf.config, "set_logical_device_configuration"):
        one = tf.config.LogicalDeviceConfiguration()
        tf.config.set_logical_device_configuration(config("CPU")[0], [one, one])
    else:
        one = tf.config.experimental.VirtualDeviceConfiguration()
        [cpu] = tf.config.experimental.list_physical_devices("CPU")
        tf.config.experimental.set_virtual_device_configuration(cpu, [one, one])


def without_folders(text):
    """Remove the folders of libraries and of the repository from messages, because they differ between computers."""
    checkout = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
    text = re.sub(r"/[^\s\"\\]*/site-packages/", "", text)
    return text.replace(checkout + "/", "").replace(checkout, ".")


def main(name, cases, result, pattern="*", distributed=""):
    """Record the cases whose "part/case" matches the pattern."""
    module, libraries = RECORDERS[name]
    if distributed:
        virtual_cpus()

    def chosen(part, case):
        under_strategy = part.startswith(("distributed", "strategies"))
        return under_strategy == bool(distributed) and fnmatch.fnmatchcase(part + "/" + case, pattern)

    recorder = importlib.import_module("." + module, __package__)
    with open(cases) as file:
        inputs = json.load(file)
    recorded = recorder.record(name, inputs, chosen)
    made_with = {
        "program": "tools/record/{}.py".format(module),
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
    }
    made_with.update({library: importlib.import_module(library).__version__ for library in libraries})
    with open(result, "w") as file:
        file.write(without_folders(json.dumps(dict({"file": name, "made_with": made_with}, **recorded))))


if __name__ == "__main__":
    main(*sys.argv[1:])
