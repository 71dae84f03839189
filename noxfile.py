"""Old and new TensorFlow, and the package as users install it, by hand: `nox --list` names the sessions.

One cell: `nox -s "tests(2.16-3.11-all)"`. What follows `--` goes to pytest in place of the tests chosen here:
`nox -s ... -- tests/test_fit.py`. A cell whose Python is not installed is skipped.
"""

import pathlib
import shutil
import tempfile

import nox

nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = False
nox.options.download_python = "never"

# TensorFlow -> the release of TensorFlow Probability that knows it, and the Pythons without and with all optional
# libraries. tf_keras 2.16 and 2.18 hand a float to `random.randint`, which Python 3.12 refuses: its seeded models fail.
RELEASES = {
    "2.15": ("0.23", {"none": ("3.10", "3.11"), "all": ("3.11",)}),
    "2.16": ("0.24", {"none": ("3.10", "3.11", "3.12"), "all": ("3.10", "3.11")}),
    "2.18": ("0.25", {"none": ("3.10", "3.11", "3.12"), "all": ("3.10", "3.11")}),
    "2.21": ("0.25", {"none": ("3.10", "3.11", "3.12", "3.13"), "all": ("3.10", "3.11", "3.12", "3.13")}),
}

# None: a few of the tests that need TensorFlow alone. All: what every family promises, and what is read from files.
TESTS = {
    "none": ("tests/core", "tests/test_examples.py", "-k", "not variational and not digits"),
    "all": (
        "tests/core",
        "tests/wrapper/test_contract.py",
        "tests/wrapper/test_optimizer.py",
        "tests/test_families.py",
        "tests/test_fit.py",
        "tests/test_probability.py",
        "tests/libraries/test_keras_versions.py",
        "tests/legacy/test_install.py",
        "tests/conformance/test_checkpoints.py",
        "tf_function_tests/test_compiled_steps.py",
    ),
}
ALONE = ("hypothesis", "pytest", "pytest-timeout")
ALL = (".[train,migrate,plot,sonnet]", "h5py", "tensorboard", *ALONE)

CELLS = [
    nox.param(python, tensorflow, libraries, id=f"{tensorflow}-{python}-{libraries}")
    for tensorflow, (_, choices) in RELEASES.items()
    for libraries, pythons in choices.items()
    for python in pythons
]


@nox.session
@nox.parametrize("python,tensorflow,libraries", CELLS)
def tests(session, tensorflow, libraries):
    """One release of TensorFlow on one Python, with none or all of the optional libraries."""
    needed = [f"tensorflow=={tensorflow}.*"]
    if libraries == "all":
        probability = RELEASES[tensorflow][0]
        needed += [f"tensorflow-probability=={probability}.*", *ALL]
        if tensorflow != "2.15":  # its own Keras is Keras 2
            needed += [f"tf-keras=={tensorflow}.*", ".[tf-keras,probability]"]
    else:
        needed += [".", *ALONE]
    session.install(*needed)
    session.run(
        "python",
        "-m",
        "pytest",
        "-q",
        "-m",
        "not slow",
        *(session.posargs or TESTS[libraries]),
        env={"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": "."},
    )


# What the doctests and the promises import, beside what the demo needs.
EXTRAS = "migrate,plot,probability,sonnet,tf-keras,train"
# One family's promises, without those under strategies.
PROMISES = ("tests/wrapper/test_contract.py", "tests/wrapper/test_optimizer.py", "tf_function_tests/test_promises.py")


@nox.session
def installed(session):
    """The wheel, then the sdist, each in an empty environment: the demo, the doctests and one family's promises."""
    session.install("build")
    with tempfile.TemporaryDirectory() as folder:
        away = pathlib.Path(folder)  # the checkout is not above it, nor is it on the path
        session.run("python", "-m", "build", "--outdir", str(away / "dist"))
        for name in ("tests", "tf_function_tests", "conftest.py", "pyproject.toml"):
            copy = shutil.copytree if pathlib.Path(name).is_dir() else shutil.copy
            copy(name, away / name)
        session.chdir(away)
        for file in sorted((away / "dist").iterdir()):  # the wheel first
            try_out(session, file)


def try_out(session, file):
    """Installs a file and runs what is installed, in the folder where the session is."""
    session.run("python", "-m", "venv", "--clear", "environment")
    scripts = pathlib.Path("environment/bin").absolute()

    def run(program, *arguments):
        session.run(
            str(scripts / program),
            *arguments,
            env={"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": None},
            external=True,
        )

    run("python", "-m", "pip", "install", "-q", f"tf-lossscale[{EXTRAS}] @ {file.as_uri()}")
    run("python", "-c", "import sys, tf_lossscale as ours; assert ours.__file__.startswith(sys.prefix), ours.__file__")
    run("tf-lossscale", "train", "--out", "runs")
    run("python", "-m", "pip", "install", "-q", "h5py", "tensorboard", *ALONE)
    pytest = ("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "pyproject.toml")
    run(*pytest, "--doctest-modules", "--pyargs", "tf_lossscale")
    run(*pytest, *PROMISES, "-k", "keras3 and not mirrored and not central_storage")
