"""`python -m tools.fuzz.restores`: restores random checkpoints, each of whose numbers is unique, into new programs.

    python -m tools.fuzz.restores [--minutes 10] [--seed 1]

A case is right, refused, noted (a note names each variable that has a wrong or no value) or silent. A silent case is
shrunk and printed, and the exit code is 1.
"""

import collections
import dataclasses
import gc
import inspect
import itertools
import pathlib
import random
import sys
import tempfile
import time

import numpy as np
import tensorflow as tf
import tf_keras

from tf_lossscale import LossScaleOptimizer, migrate
from tf_lossscale.migrate.checkpoints import slots as slot_names

KERAS = {"keras3": tf.keras, "tf_keras": tf_keras, "legacy": tf_keras}
OPTIMIZERS = {"keras3": tf.keras.optimizers, "tf_keras": tf_keras.optimizers, "legacy": tf_keras.optimizers.legacy}
STRUCTURES = ("named", "unnamed", "module", "sequential", "nested", "layers", "replaced", "two models")
#: The classes in `tf.compat.v1.train`.
OF_TF1 = {"Adam": "AdamOptimizer", "momentum": "MomentumOptimizer", "RMSprop": "RMSPropOptimizer"}


@dataclasses.dataclass(frozen=True)
class Case:
    """A file, and a program that restores it."""

    writer: str = "keras3"
    reader: str = "keras3"
    kind: str = "checkpoint"
    structure: str = "named"
    optimizer: str = "Adam"
    #: The change of the new program: none, layers that are created earlier, another order of creation, one layer more
    #: or less.
    change: str = "same"
    given: str = "objects"
    match: str = "name"
    partial: bool = False
    #: The variables that the old optimizer trained.
    trained: str = "all"
    frozen: bool = False
    explicit_names: bool = False
    option: str = ""
    float16: bool = False
    seed: int = 0


#: The values of each field; the first one is the simplest, and the more frequent ones occur several times.
CHOICES = {
    "writer": ["keras3", "tf_keras", "legacy", "tf1"],
    "reader": ["keras3", "keras3", "tf_keras", "legacy"],
    "kind": [*["checkpoint"] * 5, "h5", "h5", "live", "live", "SavedModel"],
    "structure": STRUCTURES,
    "optimizer": ["Adam", "SGD", "momentum", "Nadam", "RMSprop", "Adadelta", "own"],
    "change": ["same", "same", "renumbered", "reordered", "one more", "one less"],
    "given": ["objects", "objects", "model", "list", "list", "trainable", "part of the list", "part", "dict"],
    "match": ["name", "name", "name", "name", "order"],
    "partial": [False, False, False, True],
    "trained": ["all", "all", "some", "reversed"],
    "frozen": [False, True],
    "explicit_names": [False, True],
    "option": ["", "", "use_ema", "gradient_accumulation_steps"],
    "float16": [False, False, False, True],
    "seed": range(1000),
}


def drawn(seed):
    """Return the case of a seed."""
    rng = random.Random(seed)
    return Case(**{field: rng.choice(values) for field, values in CHOICES.items()})


def reduced(case):
    """Return a simpler case that is silent, too: each field has its simplest value or the one that it had."""
    for field, values in CHOICES.items():
        simpler = dataclasses.replace(case, **{field: values[0]})
        if simpler != case and verdict(simpler)[0] == "silent":
            case = simpler
    return case


class Own(tf_keras.optimizers.legacy.Adam):
    """Has Adam's slots, and another name."""

    def __init__(self, rate):
        super().__init__(rate, name="LAMB")


class Program:
    """The objects of a program, each of whose variables has a key that is the same in both programs."""

    def __init__(self, case, keras, change):
        self.case, self.keras, self.change = case, keras, change
        self.dtype = "float16" if case.float16 else "float32"
        self.objects, self.layers = {}, {}
        self.frozen = set()
        getattr(self, "_" + case.structure.replace(" ", "_"))()

    def variables(self):
        """Map each key to its variable."""
        found = {}
        for key, each in self.layers.items():
            for weight in [each] if hasattr(each, "assign") else each.weights:
                name = getattr(weight, "path", weight.name).partition(":")[0].rpartition("/")[2]
                found[f"{key}/{name}" if hasattr(each, "weights") else key] = weight
        return found

    def trained(self):
        """Map each key to its variable, in the order of the models, if the program trains the variable."""
        parts = [[each] if hasattr(each, "assign") else each.trainable_variables for each in self.objects.values()]
        keys = {id(variable): key for key, variable in self.variables().items()}
        each = [variable for part in parts for variable in part if getattr(variable, "trainable", True)]
        return {keys[id(variable)]: variable for variable in each}

    def _plain(self, names):
        keys = ["a", "b", "c", "d"][: 3 + (self.change == "one more") - (self.change == "one less")]
        made = {}
        for key in keys[::-1] if self.change == "reordered" else keys:
            name = f"{key}/kernel" if names else "Variable"
            trainable = not (self.case.frozen and key == "b")
            made[key] = tf.Variable(tf.zeros([2], self.dtype), name=name, trainable=trainable)
        return made

    def _named(self):
        self.objects = self.layers = self._plain(names=True)

    def _unnamed(self):
        self.objects = self.layers = self._plain(names=False)

    def _module(self):
        made, module = self._plain(names=self.case.explicit_names), tf.Module(name="module")
        module.first, *others = made.values()
        module.others = others
        keys = dict(zip(sorted(made), made.values())) if self.change != "reordered" else made
        self.layers, self.objects = keys, {"module": module}
        if self.change == "reordered":
            module.first, module.others = made["a"], [made[key] for key in sorted(made) if key != "a"]

    def _dense(self, key, **more):
        name = {"name": f"layer_{key}"} if self.case.explicit_names else {}
        made = self.keras.layers.Dense(
            2, dtype=self.dtype, trainable=not (self.case.frozen and key == "b"), **name, **more
        )
        self.layers[key] = made
        return made

    def _start(self):
        if self.change == "renumbered":
            for _ in range(2):
                self.keras.layers.Dense(2).build((None, 2))

    def _sequence(self, prefix=""):
        keys = ["a", "b", "c"][: 2 + (self.change == "one more")][(self.change == "one less") :]
        made = {key: self._dense(prefix + key) for key in (keys[::-1] if self.change == "reordered" else keys)}
        norm = self.layers[f"{prefix}norm"] = self.keras.layers.BatchNormalization(dtype=self.dtype)
        layers = [made[key] for key in (["c"] if "c" in made else []) + [key for key in keys if key != "c"]]
        return self.keras.Sequential([self.keras.Input((2,), dtype=self.dtype), *layers[:1], norm, *layers[1:]])

    def _sequential(self):
        self._start()
        self.objects = {"model": self._sequence()}

    def _two_models(self):
        self._start()
        names = ["disc", "gen"]
        made = {name: self._sequence(f"{name}.") for name in (names[::-1] if self.change == "reordered" else names)}
        self.objects = dict(sorted(made.items()))

    def _nested(self):
        self._start()
        inner = self._sequence("inner.")
        x = self.keras.Input((2,), dtype=self.dtype)
        shared = self._dense("shared")
        self.objects = {"model": self.keras.Model(x, shared(inner(shared(x))))}

    def _replaced(self):
        self._layers(replaced=True)

    def _layers(self, replaced=False):
        self._start()
        program = self

        class Layers(self.keras.Model):
            def __init__(self):
                super().__init__()
                if program.change == "reordered":
                    self.out = program._dense("out")
                self.hidden = [program._dense("a"), program._dense("b")]
                self.table = {"x": program._dense("x")}
                if replaced:
                    # Keras 3 still knows the variables of a layer whose attribute was assigned again.
                    self.out = program._dense("before")
                    self.out.build((None, 2))
                if program.change != "reordered" or replaced:
                    self.out = program._dense("out")
                if program.change == "one more":
                    self.more = program._dense("more")
                self.again = self.out
                self.built_late = Late()

            def call(self, x):
                for layer in (*self.hidden, self.table["x"], self.out, self.built_late):
                    x = layer(x)
                return self.more(x) if hasattr(self, "more") else x

        class Late(self.keras.layers.Layer):
            def build(self, shape):
                self.dense = program._dense("late")
                self.dense.build(shape)
                if program.change != "one less":
                    self.gain = self.add_weight(shape=(2,), initializer="zeros", name="gain", dtype=program.dtype)
                    program.layers["gain"] = self.gain
                super().build(shape)

            def call(self, x):
                return self.dense(x)

        model = Layers()
        model(tf.zeros([1, 2], self.dtype))
        self.objects = {"model": model}


def optimizer_of(case, library):
    """Make an optimizer, and return it with the name of the class whose slots it has."""
    if case.optimizer == "own" and library == "legacy":
        return Own(1.0), "Adam"
    name = {"momentum": "SGD", "own": "Adam"}.get(case.optimizer, case.optimizer)
    options = {"momentum": 0.5} if case.optimizer == "momentum" else {}
    if case.option == "use_ema" and library != "legacy":
        options["use_ema"] = True
    if case.option == "gradient_accumulation_steps" and library == "keras3":
        options["gradient_accumulation_steps"] = 2
    return getattr(OPTIMIZERS[library], name)(1.0, **options), name


def slots_of(optimizer, kind, variables):
    """Map (key of a variable, slot) to the slot's variable."""
    found = {}
    for key, variable in variables.items():
        for slot, attribute in slot_names.ATTRIBUTES[kind].items():
            if hasattr(optimizer, "_slots"):
                each = optimizer._slots.get(variable._unique_id, {}).get(slot)
            else:
                try:
                    index = optimizer._get_variable_index(variable)
                except AttributeError:
                    index = optimizer._index_dict.get(optimizer._var_key(variable))
                except KeyError:
                    index = None
                listed = getattr(optimizer, attribute, None) or []
                each = listed[index] if index is not None and index < len(listed) else None
            if each is not None:
                found[key, slot] = each
    return found


def build(optimizer, variables):
    (optimizer._create_all_weights if hasattr(optimizer, "_slots") else optimizer.build)(variables)


def trained_by_old(case, program):
    """Return the variables that the old optimizer trains, in their order."""
    trained = program.trained()
    if case.structure == "two models" and case.trained != "all":
        trained = {key: each for key, each in trained.items() if key.startswith("disc.")}
    elif case.trained == "some":
        trained = dict(list(trained.items())[1:])
    return dict(reversed(trained.items())) if case.trained == "reversed" else trained


def number(values):
    """Give each variable a number of its own, and return the numbers by key."""
    counter = itertools.count(1)
    numbers = {key: next(counter) for key in values}
    for key, value in numbers.items():
        values[key].assign(np.full(tuple(values[key].shape), value))
    return numbers


@dataclasses.dataclass
class Source:
    """The old program's file or optimizer, its objects, and what was saved."""

    source: object
    numbers: dict
    names: dict
    program: object = None


def with_tf1(case, folder):
    """Save a file of TensorFlow 1's Saver, which may lack a part of the variables."""
    rng, v1, path = random.Random(case.seed), tf.compat.v1, f"{folder}/ckpt"
    kind = case.optimizer if case.optimizer in OF_TF1 else "Adam"
    scope = "scope/" if case.explicit_names else ""
    with tf.Graph().as_default(), v1.Session() as session:
        names = {"a": f"{scope}w", "b": "x/w", "c": "x/scope/w"}
        weights = {key: v1.get_variable(name, shape=[2]) for key, name in names.items()}
        options = {} if kind == "Adam" else {"momentum": 0.5}
        optimizer = getattr(v1.train, OF_TF1[kind])(1.0, **options)
        loss = tf.add_n([tf.reduce_sum(weight) for weight in weights.values()])
        optimizer.apply_gradients(optimizer.compute_gradients(loss, list(weights.values())))
        slots = {
            (key, new): optimizer.get_slot(weight, old)
            for key, weight in weights.items()
            for old, new in {"m": "m", "v": "v", "momentum": "momentum", "rms": "rms"}.items()
            if old in optimizer.get_slot_names()
        }
        everything = {**weights, **slots}
        numbers = {key: value for value, key in enumerate(everything, 1)}
        session.run(v1.global_variables_initializer())
        for key, value in numbers.items():
            everything[key].load(np.full(2, value, "float32"), session)
        saved = v1.global_variables()
        lost = rng.choice([None, None, "a", "b"])
        saved = [each for each in saved if lost is None or each is not weights[lost]]
        v1.train.Saver(saved).save(session, path)
    return Source(path, {key: each for key, each in numbers.items() if key != lost}, names), kind


def keras_of(library):
    """Return a Keras library, in which the numbers in names begin again."""
    keras = KERAS[library]
    clear = keras.backend.clear_session
    # Keras 3 collects garbage here, which took a third of the time.
    clear(**{name: False for name in inspect.signature(clear).parameters if name == "free_memory"})
    return keras


def write(case, folder):
    """Run the old program."""
    keras = keras_of(case.writer)
    program = Program(case, keras, "same")
    variables = program.variables()
    optimizer, kind = optimizer_of(case, case.writer)
    trained = trained_by_old(case, program)
    build(optimizer, list(trained.values()))
    slots = slots_of(optimizer, kind, trained)
    numbers = number({**variables, **slots})
    names = {key: getattr(each, "path", each.name.partition(":")[0]) for key, each in variables.items()}
    source, models = optimizer, [each for each in program.objects.values() if hasattr(each, "compile")]
    has_no_such_file = {"SavedModel": case.writer == "keras3", "h5": case.structure in ("layers", "replaced")}
    if case.kind == "checkpoint" or len(models) != 1 or has_no_such_file.get(case.kind):
        other = {}
        rest = [each for key, each in program.trained().items() if key not in trained]
        if case.structure == "two models" and rest:
            other["other_optimizer"] = optimizer_of(case, case.writer)[0]
            build(other["other_optimizer"], rest)
        if case.kind != "live":
            source = tf.train.Checkpoint(optimizer=optimizer, **program.objects, **other).write(f"{folder}/ckpt")
    elif case.kind != "live":
        (model,) = models
        model.compile(optimizer, "mse")
        source = f"{folder}/saved" + (".h5" if case.kind == "h5" else "")
        model.save(source, **({"save_format": "tf"} if case.kind == "SavedModel" else {}))
    return Source(source, numbers, names, program), kind


def given_of(case, program, source):
    """Return the third argument, and the keys of the variables that it contains."""
    rng = random.Random(case.seed)
    variables = program.variables()
    models = [each for each in program.objects.values() if not hasattr(each, "assign")]
    is_list = case.given in ("list", "trainable", "part of the list")
    if is_list:
        keys = [*(program.trained() if case.given == "trainable" else variables)]
        if case.given == "part of the list":
            keys = rng.sample(keys, rng.randint(1, len(keys)))
        return [variables[key] for key in keys], keys
    if case.given == "dict" and case.writer == "tf1":
        return {source.names[key]: each for key, each in variables.items() if key in source.names}, [*source.names]
    objects = dict([rng.choice([*program.objects.items()])]) if case.given == "part" else program.objects
    parts = [[each] if hasattr(each, "assign") else each.variables for each in objects.values()]
    own = {id(variable) for part in parts for variable in part}
    keys = [key for key, variable in variables.items() if id(variable) in own]
    if (case.given == "model" or str(source.source).endswith(("saved", ".h5"))) and len(models) == 1:
        return models[0], keys
    return objects, keys


def new_optimizer(case, kind):
    library = case.reader
    case = case if case.writer != "tf1" else dataclasses.replace(case, optimizer={"SGD": "momentum"}.get(kind, kind))
    inner, kind = optimizer_of(
        dataclasses.replace(case, optimizer="Adam") if case.optimizer == "own" else case, library
    )
    return LossScaleOptimizer(inner), inner, kind


def verdict(case):
    """Run a case. Return its verdict, and for a silent or wrong case the reason."""
    with tempfile.TemporaryDirectory() as folder:
        return _verdict(case, pathlib.Path(folder))


def _verdict(case, folder):
    if case.writer == "tf1":
        case = dataclasses.replace(case, structure="named", frozen=False, float16=False)
        source, kind = with_tf1(case, folder)
    else:
        try:
            source, kind = write(case, folder)
        except (NotImplementedError, ValueError, TypeError) as error:
            return "impossible", f"the library cannot save it: {error}"
    # The new program belongs to another library if the optimizer does.
    keras = keras_of(case.reader)
    program = Program(case, keras, case.change)
    if case.writer == "tf1":
        program.layers = {key: tf.Variable(tf.zeros([2]), name=name) for key, name in source.names.items()}
        module = tf.Module()
        module.parts = list(program.layers.values())
        program.objects = {"module": module}
    variables = program.variables()
    for variable in variables.values():
        variable.assign(np.full(tuple(variable.shape), -2000.0))
    given, keys = given_of(case, program, source)
    optimizer, inner, kind = new_optimizer(case, kind)
    name = "optimizer" if case.structure == "two models" and case.kind != "live" and case.writer != "tf1" else None
    try:
        notes = migrate.restore(
            source.source, optimizer, given, name=name, match=case.match, partial=case.partial
        ).notes
    except ValueError as error:
        changed = [key for key, each in variables.items() if not np.all(np.asarray(each) == -2000.0)]
        if changed:
            return "silent", f"refused, but {changed} changed"
        has_remedy = any(word in str(error) for word in ("Pass", "pass", "Use", "Save", "Create"))
        return ("refused" if has_remedy else "silent"), f"{error}"
    text = "\n".join(notes)
    of_slots = slots_of(inner, kind, {key: each for key, each in program.trained().items() if key in keys})
    bad, silent = [], []
    is_live = case.kind == "live" and not isinstance(source.source, str)
    for key in keys:
        value, name = (
            float(np.ravel(np.asarray(variables[key]))[0]),
            getattr(variables[key], "path", variables[key].name),
        )
        name = name.partition(":")[0]
        expected = source.numbers.get(key, -2000.0)
        if value != expected and not (is_live and value == -2000.0):
            bad.append(f"{key} is {value}, not {expected}")
            silent += [] if name in text else bad[-1:]
    lost = [line for line in notes if "slots" in line or "not restored" in line or "do not change" in line]
    for (key, slot), place in of_slots.items():
        value, expected = abs(float(np.ravel(np.asarray(place))[0])), source.numbers.get((key, slot))
        if expected is not None and value == expected:
            continue
        is_of_another = value in source.numbers.values() and value > 2
        is_average = slot == "average" and value == abs(float(np.ravel(np.asarray(variables[key]))[0]))
        if expected is None and (not is_of_another or is_average):
            continue
        bad.append(f"the slot {slot} of {key} is {value}, not {expected}")
        name = getattr(variables[key], "path", variables[key].name).partition(":")[0]
        is_noted = (name in text or key in text) if is_of_another else bool(lost)
        silent += [] if is_noted else bad[-1:]
    if silent:
        return "silent", f"{'; '.join(silent)}. Notes: {text}"
    return ("noted" if bad else "right"), f"{'; '.join(bad)}. Notes: {text}"


def main():
    """Restore the cases of consecutive seeds, and return the exit code."""
    from tools.fuzz.__main__ import MOST_FAILURES, options

    chosen = options("python -m tools.fuzz.restores", __doc__)
    counts, deadline, failures = collections.Counter(), time.monotonic() + 60 * chosen.minutes, 0
    # Keras collects garbage when a session is cleared, which takes long if it visits the libraries' objects.
    gc.freeze()
    for seed in itertools.count(chosen.seed):
        if time.monotonic() > deadline or failures == MOST_FAILURES:
            break
        case = drawn(seed)
        found, _ = verdict(case)
        form = "objects" if case.given in ("objects", "model", "part") else "others"
        counts[form if case.change == "same" and not case.partial else "changed", found] += 1
        if found == "silent":
            failures += 1
            case = reduced(case)
            print(f"\n{verdict(case)[1]}\nAdd to FOUND in tests/test_fuzz_restores.py:\n    {case!r},", flush=True)
    for (form, found), number_of in sorted(counts.items()):
        print(f"{form}: {number_of} {found}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
