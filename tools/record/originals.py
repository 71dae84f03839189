"""Lists the original implementations, their environments and their recordings."""

import dataclasses
import glob
import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
ENVIRONMENTS = ROOT / ".venv-record"


@dataclasses.dataclass(frozen=True)
class Original:
    """An implementation in another library, whose behavior is recorded.

    Args:
        python: the version of Python that it needs, such as "3.8".
        requirements: the requirements that pip installs.
        recordings: names of its recordings.
        environment: the name of its virtual environment, which several originals may share.
    """

    python: str
    requirements: tuple[str, ...]
    recordings: tuple[str, ...]
    environment: str


_TODAY = ("tensorflow==2.21.0", "tf_keras==2.21.0", "keras==3.15.1", "numpy==2.4.6")
ORIGINALS = {
    "tf115": Original(
        "3.7",
        ("tensorflow==1.15.5", "numpy==1.18.5", "protobuf<3.21"),
        ("dynamic_loss_scale_tf115", "contrib_exponential_manager_tf115", "mixed_precision_lso_tf115"),
        "tf115",
    ),
    "tf23": Original(
        "3.8",
        ("tensorflow==2.3.4", "numpy==1.18.5", "protobuf<3.21"),
        ("lso_experimental_tf23", "dynamic_loss_scale_tf23"),
        "tf23",
    ),
    "tf24": Original("3.8", ("tensorflow==2.4.4", "numpy==1.19.5"), ("lso_tf24",), "tf24"),
    "tf28": Original("3.8", ("tensorflow==2.8.4", "numpy==1.24.4", "protobuf<3.21"), ("lso_tf28",), "tf28"),
    "tf_keras": Original(
        "3.11",
        _TODAY,
        ("lso_tfkeras221_legacy", "lso_tfkeras221_new", "dynamic_loss_scale_compat_v1_tf221"),
        "tf221",
    ),
    "keras3": Original("3.11", _TODAY, ("keras3_lso",), "tf221"),
    "mindspore": Original("3.11", ("mindspore==2.10.0", "numpy==1.26.4"), ("mindspore_managers",), "mindspore"),
    "torch": Original("3.11", ("torch==2.13.0", "numpy==2.4.6"), ("torch_adafactor",), "torch"),
}


class NotHere(Exception):
    """The original cannot be installed on this computer. The message contains the reason."""


def interpreter(version):
    """Return the path of a Python interpreter of this version.

    It is the running interpreter, an interpreter on the search path, or an interpreter that pyenv installed.

    Raises:
        NotHere: there is no such interpreter.
    """
    pyenv = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
    candidates = [sys.executable, f"python{version}", *glob.glob(f"{pyenv}/versions/{version}.*/bin/python")]
    for candidate in candidates:
        path = shutil.which(candidate)
        found = path and subprocess.run([path, "--version"], capture_output=True, text=True).stdout
        if found and found.startswith(f"Python {version}."):
            return path
    raise NotHere(f"there is no Python {version} here: install one, for example with pyenv")


def environment(name):
    """Return the path of Python in an original's environment. Create the environment if it is missing.

    Raises:
        NotHere: there is no such Python, or pip cannot install the requirements.
    """
    original = ORIGINALS[name]
    folder = ENVIRONMENTS / original.environment
    python = folder / "bin" / "python"
    done = folder / "installed"
    if not done.exists():
        base = interpreter(original.python)
        for command in (
            [base, "-m", "venv", "--clear", str(folder)],
            [str(python), "-m", "pip", "install", "-q", *original.requirements],
        ):
            print("$ " + " ".join(command), flush=True)
            made = subprocess.run(command, capture_output=True, text=True)
            if made.returncode:
                raise NotHere(f"`{' '.join(command)}` failed: {made.stderr.strip()[-2000:]}")
        done.write_text("\n".join(original.requirements) + "\n")
    return str(python)
