"""`python -m tools.fuzz.migrations`: migrates small programs that keep an old module or object and use it elsewhere.

    python -m tools.fuzz.migrations [--minutes 10] [--seed 1] [--seeds 500]

A program is reported (there is a finding), right (the old program under `tf_lossscale.install()` and the new one print
the same), impossible (the old program fails) or silent. Silent programs are printed, and the exit code is 1.
"""

import argparse
import collections
import dataclasses
import json
import pathlib
import random
import subprocess
import sys
import tempfile
import textwrap

from tf_lossscale.migrate.codemod import files

#: Each thing that is kept, with statements that come first, and its uses. In a use, {} stands for the thing.
MIXED = "tf.keras.mixed_precision"
_WRAPPED = ("({}).loss_scale().numpy()", "({}).loss_scale.increment_period", "({}).loss_scale._multiplier")
_COMPILED = (
    "float(({}).optimizer.loss_scale)",
    "int(({}).optimizer.dynamic_counter)",
    "hasattr(({}).optimizer, 'loss_scale')",
    "getattr(({}).optimizer, 'dynamic_counter', None) is None",
    "float(({}).optimizer.get_scaled_loss(2.0))",
)
_CALL = "LossScaleOptimizer(tf.keras.optimizers.SGD(), False, 128.0).initial_scale"
_OLD_CALL = "LossScaleOptimizer(tf.keras.optimizers.SGD(), 64.0).initial_scale"
_REWRITE = "enable_mixed_precision_graph_rewrite(tf.keras.optimizers.SGD(), 64.0).initial_scale"
_MODEL = f"""\
{MIXED}.set_global_policy("mixed_float16")
model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
model.compile("sgd", "mse")
"""
_WRAPPER = f"optimizer = {MIXED}.experimental.LossScaleOptimizer(tf.keras.optimizers.SGD(), 'dynamic')\n"
THINGS = {
    "tf": (
        "",
        (
            f"({{}}).keras.mixed_precision.{_CALL}",
            f"({{}}).keras.mixed_precision.experimental.{_OLD_CALL}",
            f"({{}}).train.experimental.{_REWRITE}",
            "({}).train.experimental.FixedLossScale(2.0)().numpy()",
        ),
    ),
    "tf.keras": (
        "",
        (
            f"({{}}).mixed_precision.{_CALL}",
            f"({{}}).mixed_precision.experimental.{_OLD_CALL}",
            f"getattr(({{}}).mixed_precision, 'LossScaleOptimizer'){_CALL[18:]}",
            "({}).mixed_precision.experimental.Policy('mixed_float16').loss_scale().numpy()",
        ),
    ),
    MIXED: (
        "",
        (f"({{}}).{_CALL}", f"getattr({{}}, 'LossScaleOptimizer'){_CALL[18:]}", f"({{}}).experimental.{_OLD_CALL}"),
    ),
    f"{MIXED}.LossScaleOptimizer": ("", (f"({{}}){_CALL[18:]}",)),
    f"{MIXED}.experimental": ("", (f"({{}}).{_OLD_CALL}", "({}).Policy('mixed_float16').loss_scale().numpy()")),
    "tf.train.experimental": ("", (f"({{}}).{_REWRITE}", "({}).DynamicLossScale().increment_period")),
    f"{MIXED}.experimental.Policy('mixed_float16')": (
        "",
        ("({}).loss_scale().numpy()", "({}).should_cast_variables", "getattr({}, 'loss_scale', None) is None"),
    ),
    "optimizer": (_WRAPPER, _WRAPPED),
    "optimizer.loss_scale": (_WRAPPER, ("({})().numpy()", "({}).increment_period", "({})._current_loss_scale.numpy()")),
    "model": (_MODEL, _COMPILED),
}
#: The ways in which a thing is kept as `held`, and the expression that reads it.
WAYS = {
    "alias": ("held = {}", "held"),
    "annotated": ("held: object = {}", "held"),
    "attribute": ("class Holder:\n    def __init__(self):\n        self.kept = {}\nheld = Holder()", "held.kept"),
    "class": ("class held:\n    kept = {}", "held.kept"),
    "property": (
        "class Holder:\n    @property\n    def kept(self):\n        return {}\nheld = Holder()",
        "held.kept",
    ),
    "namespace": ("import types\nheld = types.SimpleNamespace(kept={})", "held.kept"),
    "setattr": ("class held:\n    pass\nsetattr(held, 'kept', {})", "held.kept"),
    "dict": ("held = {{'kept': {}}}", "held['kept']"),
    "dict call": ("held = dict(kept={})", "held['kept']"),
    "item": ("held = {{}}\nheld['kept'] = {}", "held.get('kept')"),
    "tuple": ("held = (1, {})", "held[1]"),
    "list": ("held = []\nheld.append({})", "held[0]"),
    "star": ("first, *held = 1, {}", "held[0]"),
    "loop": ("for held in ({},):\n    pass", "held"),
    "walrus": ("if (held := {}) is not None:\n    pass", "held"),
    "conditional": ("import sys\nheld = {} if sys.argv else None", "held"),
    "or": ("held = None or {}", "held"),
    "two targets": ("held = other = {}", "held"),
    "return": ("def held():\n    return {}", "held()"),
    "default": ("def held(kept={}):\n    return kept", "held()"),
    "argument": ("def same(kept):\n    return kept\nheld = same({})", "held"),
    "lambda": ("held = lambda: {}", "held()"),
    "partial": ("import functools\nheld = functools.partial(lambda kept: kept, {})", "held()"),
    "closure": ("def make(kept):\n    return lambda: kept\nheld = make({})", "held()"),
    "global": ("def fill():\n    global held\n    held = {}\nfill()", "held"),
}
#: Where the thing is used, and the names of `held` and `kept`.
PLACES = ("module", "function", "helper", "method", "settings", "from settings")
NAMES = (("held", "kept"), ("holder", "k"), ("trainer", "mp"), ("policy", "policy"), ("scale", "loss_scale"))


@dataclasses.dataclass(frozen=True)
class Case:
    """A program."""

    thing: str
    use: str
    way: str
    place: str = "module"
    names: tuple[str, str] = NAMES[0]

    def files(self):
        """Map the names of the program's files to their code."""
        first, _ = THINGS[self.thing]
        setup, read = WAYS[self.way]
        start = "import tensorflow as tf\n"
        keep = f"{start}{first}{setup.format(self.thing)}\n"
        in_settings = self.place.endswith("settings")
        use = self.use.format(f"settings.{read}" if self.place == "settings" else read)
        function = f"def use(held):\n    return {use}\n"
        if self.place == "module":
            found = {"main.py": f"{keep}print({use})\n"}
        elif self.place == "function":
            found = {"main.py": f"{keep}{function}print(use(held))\n"}
        elif self.place == "helper":
            found = {"helper.py": start + function, "main.py": f"from helper import use\n{keep}print(use(held))\n"}
        elif self.place == "method":
            body = use.replace("held", "self.held")
            method = "class User:\n    def __init__(self, held):\n        self.held = held\n    def use(self):\n"
            method += f"        return {body}\n"
            found = {
                "helper.py": start + method,
                "main.py": f"from helper import User\n{keep}print(User(held).use())\n",
            }
        else:
            imported = "import settings" if self.place == "settings" else "from settings import held"
            found = {"settings.py": keep, "main.py": f"{start}{imported}\nprint({use})\n"}
        assert in_settings == ("settings.py" in found)
        held, kept = self.names
        return {name: code.replace("held", held).replace("kept", kept) for name, code in found.items()}


def drawn(seed):
    """Return the program of a seed."""
    rng = random.Random(seed)
    thing = rng.choice(list(THINGS))
    return Case(thing, rng.choice(THINGS[thing][1]), rng.choice(list(WAYS)), rng.choice(PLACES), rng.choice(NAMES))


#: Runs the programs in folders, and prints what each printed.
_RUN = """
import contextlib, io, json, os, runpy, sys, warnings
import tensorflow as tf
if sys.argv[1] == "old":
    import tf_lossscale
    tf_lossscale.install()
printed = []
for folder in json.load(sys.stdin):
    sys.path.insert(0, folder)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            runpy.run_path(os.path.join(folder, "main.py"), run_name="__main__")
        except Exception as error:
            print(type(error).__name__, error)
            if sys.argv[1] == "old":
                out.truncate(0)
    printed.append(out.getvalue())
    sys.path.remove(folder)
    for name in ("helper", "settings"):
        sys.modules.pop(name, None)
    tf.keras.mixed_precision.set_global_policy("float32")
json.dump(printed, sys.stdout)
"""


def _printed(kind, folders):
    done = subprocess.run(
        [sys.executable, "-c", _RUN, kind],
        input=json.dumps(list(map(str, folders))),
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def verdicts(cases):
    """Migrate the programs, run those without a finding, and return the verdict on each with the new code."""
    found, silent = {}, []
    with tempfile.TemporaryDirectory() as root:
        for number, case in enumerate(cases):
            paths = {}
            for kind in ("old", "new"):
                for name, code in case.files().items():
                    paths[kind, name] = pathlib.Path(root, kind, str(number), name)
                    paths[kind, name].parent.mkdir(parents=True, exist_ok=True)
                    paths[kind, name].write_text(code)
            new = [str(path) for (kind, _), path in paths.items() if kind == "new"]
            reports = list(files.write(files.run(new)))
            code = "\n".join(pathlib.Path(path).read_text() for path in new)
            found[case] = ("error" if any(each.error for each in reports) else "reported"), code
            if not any(each.findings or each.error for each in reports):
                silent.append(
                    (case, code, pathlib.Path(root, "old", str(number)), pathlib.Path(root, "new", str(number)))
                )
        before = _printed("old", [each[2] for each in silent]) if silent else []
        after = _printed("new", [each[3] for each in silent]) if silent else []
    for (case, code, _, _), old, new in zip(silent, before, after, strict=True):
        found[case] = ("impossible" if not old else "right" if old == new else "silent"), f"{code}\n{old}{new}"
    return found


def main():
    """Migrate the programs of consecutive seeds, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz.migrations", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="the first seed")
    parser.add_argument("--seeds", type=int, default=500, help="the number of programs")
    chosen = parser.parse_args()
    print(f"seed {chosen.seed}", flush=True)
    found = verdicts(dict.fromkeys(map(drawn, range(chosen.seed, chosen.seed + chosen.seeds))))
    for case, (verdict, why) in found.items():
        if verdict in ("silent", "error"):
            print(f"\n{verdict}: {case!r}\n{textwrap.indent(why, '    ')}")
    print(dict(collections.Counter(verdict for verdict, _ in found.values())))
    return int(any(verdict in ("silent", "error") for verdict, _ in found.values()))


if __name__ == "__main__":
    sys.exit(main())
