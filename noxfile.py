"""Runs tests with several versions of TensorFlow and Python, and tests of the installed package.

`nox --list` lists the sessions, and `nox -s "tests(2.16-3.11-all)"` runs one session. To run other tests in a session,
name them after `--`: `nox -s ... -- tests/test_fit.py`. A session is skipped if its version of Python is not installed.
"""

import datetime
import json
import pathlib
import re
import shutil
import tempfile

import nox

nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = False
nox.options.download_python = "never"

# For each version of TensorFlow, the matching version of TensorFlow Probability and two lists of Python versions. The
# first list is tested without optional libraries ("none"), and the second with all of them ("all"). Python 3.12 is not
# tested with tf_keras 2.16 and 2.18, which pass a float to `random.randint` if a seed is set.
RELEASES = {
    "2.15": ("0.23", {"none": ("3.10", "3.11"), "all": ("3.11",)}),
    "2.16": ("0.24", {"none": ("3.10", "3.11", "3.12"), "all": ("3.10", "3.11")}),
    "2.18": ("0.25", {"none": ("3.10", "3.11", "3.12"), "all": ("3.10", "3.11")}),
    "2.21": ("0.25", {"none": ("3.10", "3.11", "3.12", "3.13"), "all": ("3.10", "3.11", "3.12", "3.13")}),
}

# The tests under "none" need only TensorFlow. The tests under "all" cover every optimizer family and old checkpoints.
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
# The tests of the next releases need no optional libraries that may not support these releases yet.
TESTS["next"] = (
    "tests/core",
    "tests/wrapper",
    "tests/test_families.py",
    "tests/test_fit.py",
    "tests/legacy",
    "tests/amp",
)
IN_CI = ("-m", "not (exhaustive or gpu or tpu)")
ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": "."}
VERSIONS = pathlib.Path(__file__).parent / "docs" / "versions.md"
ALONE = ("hypothesis", "pytest", "pytest-timeout")
ALL = (".[demo,plot,sonnet]", "h5py", "tensorboard", *ALONE)

CELLS = [
    nox.param(python, tensorflow, libraries, id=f"{tensorflow}-{python}-{libraries}")
    for tensorflow, (_, choices) in RELEASES.items()
    for libraries, pythons in choices.items()
    for python in pythons
]


@nox.session
@nox.parametrize("python,tensorflow,libraries", CELLS)
def tests(session, tensorflow, libraries):
    """Tests one version of TensorFlow on one version of Python, with all optional libraries or none of them."""
    needed = [f"tensorflow=={tensorflow}.*"]
    if libraries == "all":
        probability = RELEASES[tensorflow][0]
        needed += [f"tensorflow-probability=={probability}.*", *ALL]
        # Keras is still Keras 2 in TensorFlow 2.15, which therefore needs no tf_keras.
        if tensorflow != "2.15":
            needed += [f"tf-keras=={tensorflow}.*", ".[tf-keras,probability]"]
    else:
        needed += [".", *ALONE]
    session.install(*needed)
    session.run(
        "python",
        "-m",
        "pytest",
        "-q",
        *IN_CI,
        *(session.posargs or TESTS[libraries]),
        env=ENVIRONMENT,
    )
    if libraries == "all" and not session.posargs:
        note_date(tensorflow)


def note_date(tensorflow, result=""):
    """Writes today's date into the row of a TensorFlow release in docs/versions.md."""
    text = VERSIONS.read_text()
    row = re.search(rf"^\| {re.escape(tensorflow)} \|.*\|$", text, re.MULTILINE)
    if row is None:
        return
    *cells, _ = row[0].strip("| ").split(" | ")
    noted = " | ".join(["| " + cells[0], *cells[1:], f"{datetime.date.today()}{result} |"])
    VERSIONS.write_text(text.replace(row[0], noted))


@nox.session(name="next", python="3.11")
def next_releases(session):
    """Tests the newest pre-releases of TensorFlow, Keras 3 and tf_keras, and writes how many tests fail on them."""
    session.install("--pre", "tensorflow", "keras-nightly", "tf-keras-nightly")
    session.install(".", "dm-sonnet", "h5py", "tensorboard", *ALONE)
    listed = session.run("python", "-c", "import tensorflow; print(tensorflow.__version__)", silent=True)
    run = ("python", "-m", "pytest", "-q", "-rf", *IN_CI, *(session.posargs or TESTS["next"]))
    output = session.run(*run, env=ENVIRONMENT, silent=True, success_codes=[0, 1])
    session.log(output)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    note_date("next", f", TensorFlow {listed.split()[-1]}: {len(failed)} tests fail")


@nox.session(python="3.11")
def pyright(session):
    """Runs pyright, the type checker of many editors: it knows all public types, and finds errors in a program."""
    session.install("pyright[nodejs]", "mypy", "types-tensorflow", f".[{EXTRAS}]", *ALONE)
    arguments = ("--verifytypes", "tf_lossscale", "--ignoreexternal", "--outputjson")
    report = session.run("pyright", *arguments, silent=True, success_codes=[0, 1])
    score = json.loads(report[report.index("{") :])["typeCompleteness"]["completenessScore"]
    session.log(f"{score:.1%} of the public names have a known type.")
    if score < TYPES_KNOWN:
        session.error(f"The limit is {TYPES_KNOWN:.1%}. `pyright {' '.join(arguments[:3])}` lists the others.")
    session.run("python", "-m", "pytest", "-q", "tests/test_typing_and_help.py", "-k", "type_checker", env=ENVIRONMENT)


TYPES_KNOWN = 1.0
# For each version of TensorFlow, the libraries of docs/libraries.md that are tested with it. tensorboard is in the list
# because keras-tuner imports it, and pyparsing because qkeras imports it.
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
    """Tests the libraries of docs/libraries.md under the policy mixed_float16."""
    session.install(f"tensorflow=={tensorflow}.*", *LIBRARIES[tensorflow], ".", *ALONE)
    session.run("python", "-m", "pytest", "-q", "-rs", "tests/libraries/test_trials.py", env={"PYTHONPATH": "."})


# The extras of setup.cfg that the doctests, the contract tests and the demo need.
EXTRAS = "demo,plot,probability,sonnet,tf-keras"
# The contract tests, which `installed` runs for Keras 3's optimizers without distribution strategies.
PROMISES = ("tests/wrapper/test_contract.py", "tests/wrapper/test_optimizer.py", "tf_function_tests/test_promises.py")


@nox.session
def installed(session):
    """Runs the demo, the doctests and some tests of the wheel and of the sdist, in empty environments."""
    session.install("build")
    with tempfile.TemporaryDirectory() as folder:
        # Outside the checkout, no test can import the package from the checkout.
        away = pathlib.Path(folder)
        session.run("python", "-m", "build", "--outdir", str(away / "dist"))
        for name in ("tests", "tf_function_tests", "examples", "conftest.py", "pyproject.toml"):
            copy = shutil.copytree if pathlib.Path(name).is_dir() else shutil.copy
            copy(name, away / name)
        session.chdir(away)
        for file in sorted((away / "dist").iterdir()):
            try_out(session, file)


def try_out(session, file):
    """Installs a wheel or an sdist in a new environment, and tests the installed package."""
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
    run("python", "examples/float16_demo.py", "--out", "runs")
    run("python", "-m", "pip", "install", "-q", "h5py", "tensorboard", *ALONE)
    pytest = ("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "pyproject.toml")
    run(*pytest, "--doctest-modules", "--pyargs", "tf_lossscale")
    run(*pytest, *PROMISES, "-k", "keras3 and not mirrored and not central_storage")
