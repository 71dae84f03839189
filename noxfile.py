"""Tests on old and new TensorFlow, and of the installed package: `nox --list` lists the sessions.

`nox -s "tests(2.16-3.11-all)"` runs one session. Arguments after `--` replace the tests chosen here:
`nox -s ... -- tests/test_fit.py`. A session is skipped if its Python is not installed.
"""

import pathlib
import shutil
import tempfile

import nox

nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = False
nox.options.download_python = "never"

# TensorFlow -> its release of TensorFlow Probability, and the Pythons without and with all optional libraries. Seeded
# models of tf_keras 2.16 and 2.18 fail on Python 3.12: tf_keras passes a float to `random.randint`.
RELEASES = {
    "2.15": ("0.23", {"none": ("3.10", "3.11"), "all": ("3.11",)}),
    "2.16": ("0.24", {"none": ("3.10", "3.11", "3.12"), "all": ("3.10", "3.11")}),
    "2.18": ("0.25", {"none": ("3.10", "3.11", "3.12"), "all": ("3.10", "3.11")}),
    "2.21": ("0.25", {"none": ("3.10", "3.11", "3.12", "3.13"), "all": ("3.10", "3.11", "3.12", "3.13")}),
}

# "none": some of the tests that need only TensorFlow. "all": tests of every family, and of reading old files.
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
    """Tests one release of TensorFlow on one Python, with none or all of the optional libraries."""
    needed = [f"tensorflow=={tensorflow}.*"]
    if libraries == "all":
        probability = RELEASES[tensorflow][0]
        needed += [f"tensorflow-probability=={probability}.*", *ALL]
        if tensorflow != "2.15":  # Keras is Keras 2 there
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


# TensorFlow -> the libraries of docs/libraries.md that are tried with it; keras-tuner imports
# tensorboard, and qkeras pyparsing.
LIBRARIES = {
    "2.15": ("deepctr", "larq", "qkeras<1", "pyparsing", "tensorflow-ranking", "tf-agents"),
    "2.21": (
        *("keras-hub", "keras-rs", "keras-tuner", "spektral", "tensorboard", "tensorflow-gnn", "tf-keras==2.21.*"),
        *("tensorflow-model-optimization", "tensorflow-recommenders", "transformers<5"),
    ),
}


@nox.session(python="3.11")
@nox.parametrize("tensorflow", [nox.param(each, id=each) for each in LIBRARIES])
def libraries(session, tensorflow):
    """Tries today's libraries under mixed_float16: docs/libraries.md."""
    session.install(f"tensorflow=={tensorflow}.*", *LIBRARIES[tensorflow], ".", *ALONE)
    session.run("python", "-m", "pytest", "-q", "-rs", "tests/libraries/test_trials.py", env={"PYTHONPATH": "."})


@nox.session(python="3.11")
@nox.parametrize("version", [nox.param("==1.1.0", id="oldest"), nox.param(">=1.1.0", id="newest")])
def libcst(session, version):
    """Tests `tf-lossscale migrate` with the oldest LibCST that setup.cfg allows, and the newest."""
    session.install("tensorflow==2.21.*", "tf-keras==2.21.*", ".[migrate]", f"libcst{version}", *ALONE)
    session.run("python", "-m", "pytest", "-q", "tests/migrate/codemod", env={"PYTHONPATH": "."})


# Extras that the doctests, the promises and the demo need.
EXTRAS = "migrate,plot,probability,sonnet,tf-keras,train"
# Files with one family's promises; `-k` leaves out strategies.
PROMISES = ("tests/wrapper/test_contract.py", "tests/wrapper/test_optimizer.py", "tf_function_tests/test_promises.py")


@nox.session
def installed(session):
    """Runs the demo, the doctests and one family's promises from the wheel and the sdist, in empty environments."""
    session.install("build")
    with tempfile.TemporaryDirectory() as folder:
        away = pathlib.Path(folder)  # outside the checkout, so that nothing imports it
        session.run("python", "-m", "build", "--outdir", str(away / "dist"))
        for name in ("tests", "tf_function_tests", "conftest.py", "pyproject.toml"):
            copy = shutil.copytree if pathlib.Path(name).is_dir() else shutil.copy
            copy(name, away / name)
        session.chdir(away)
        for file in sorted((away / "dist").iterdir()):  # the wheel first
            try_out(session, file)


def try_out(session, file):
    """Installs a file in the session's current folder, and runs the installed package."""
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
