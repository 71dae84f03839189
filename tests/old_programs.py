"""Programs as each generation's documentation taught them, in `tests/old_scripts`, and what they print."""

import pathlib

from tests.processes import call

FOLDER = pathlib.Path(__file__).parent / "old_scripts"

#: Script -> its arguments, where CHECKPOINT stands for the path of a new file, and the lines that it prints.
SCRIPTS = {
    "graph_session_tf115.py": (["60", "CHECKPOINT"], ["steps 59 scale 2048.0 learned True saved True"]),
    "graph_keras_tf215.py": (
        ["CHECKPOINT"],
        ["learned True scale 4096.0 fell 0.5 skipped True restored True", "steps 49"],
    ),
    "contrib_managers_tf114.py": (
        [],
        ["grew 6553.60009765625 fell 0.800000011920929 skipped True", "learned True"],
    ),
    "experimental_keras_tf22.py": (
        [],
        [
            "Compute dtype: float16 Variable dtype: float32",
            "Loss scale period: 2000",
            "fit: LossScaleOptimizer scale 32768",
            "fit learned True",
            "loop learned True iterations 16",
            "Current loss scale: 32768.0",
        ],
    ),
    "custom_loop_tf24.py": (
        ["CHECKPOINT"],
        ["learned True scale 8192.0 counter 5", "iterations 41 lr 0.01 inner adam", "restored True"],
    ),
    "gan_two_optimizers_tf23.py": ([], ["finite True", "d_scale 32768 g_scale 1024", "steps 8 8"]),
    "gradient_accumulation_tf24.py": (
        ["--accumulate", "4"],
        ["updates 10 scale 128.0 learned True", "last loss 0.288"],
    ),
}

#: Programs that need Keras 2 in the place of Keras 3.
OF_KERAS_2 = {"graph_keras_tf215.py"}


def prints_what_it_did(name, command, folder, **environment):
    """Run a script with a command, and assert that it prints the lines of the table."""
    arguments, expected = SCRIPTS[name]
    arguments = [folder / "saved" if word == "CHECKPOINT" else word for word in arguments]
    if name in OF_KERAS_2:
        environment["TF_USE_LEGACY_KERAS"] = "1"
    done = call([*command, *arguments], **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == expected
