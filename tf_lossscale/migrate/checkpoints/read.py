"""Reads a checkpoint or saved model: detects its file format, and calls the reader for that format."""

from __future__ import annotations

import glob
import math
import os
import pathlib
import re
from typing import Any

from tf_lossscale.migrate.checkpoints import object_graphs, savers
from tf_lossscale.migrate.checkpoints.saved import File, FileError, Tensor, explaining_damage
from tf_lossscale.writing import printable

# Matches the suffix of a checkpoint file's name, such as `.index` or `.data-00000-of-00001`.
_SUFFIX = re.compile(r"\.(index|data-\d+-of-\d+)$")


def read(path: str | os.PathLike[str]) -> File:
    """Read a checkpoint or a saved model."""
    given = os.fspath(path)
    with explaining_damage(given, "its content"):
        return _read(given)


def _read(given: str) -> File:
    path = pathlib.Path(given)
    prefix = _SUFFIX.sub("", given)
    if path.is_dir():
        if (path / "saved_model.pb").is_file():
            return _saved_model(path)
        return _checkpoint(_only_checkpoint_in(path))
    if path.is_file() and prefix == given:
        with explaining_damage(given, "its header"), path.open("rb") as file:
            begin = file.read(8)
        if begin[:4] == b"PK\x03\x04":
            raise FileError(
                f"{given}: a .keras file is loaded by the Keras library that wrote it, with the optimizer's iterations "
                "and slots. Call `model = keras.models.load_model(path)`, and pass `model.optimizer` to "
                "migrate.restore in place of the path."
            )
        if begin == b"\x89HDF\r\n\x1a\n":
            # `h5_files` imports TensorFlow, which is slow, so it is imported only for `.h5` files.
            from tf_lossscale.migrate.checkpoints import h5_files

            return h5_files.read(given)
        if not pathlib.Path(f"{given}.index").is_file():
            raise FileError(
                f"{given}: the file is neither a checkpoint nor an .h5 model. If it should be one of these, "
                "it is damaged. For a tf.train.Checkpoint, pass the prefix, without .index or .data."
            )
    return _checkpoint(prefix)


def _only_checkpoint_in(folder: pathlib.Path) -> str:
    prefixes = sorted(str(file.with_suffix("")) for file in folder.glob("*.index") if file.is_file())
    # `checkpoint` is not always a file. Some programs write checkpoints to a folder with this name.
    if (folder / "checkpoint").is_file():
        import tensorflow as tf
        from google.protobuf import text_format

        with explaining_damage(str(folder), "the file `checkpoint`"):
            # TensorFlow's own functions print the text of a damaged file, and look for the checkpoint wherever it is.
            state = tf.compat.v1.train.generate_checkpoint_state_proto(str(folder), "model")
            state.Clear()
            text_format.Merge((folder / "checkpoint").read_text("utf-8"), state)
            latest = str(folder / state.model_checkpoint_path) if state.model_checkpoint_path else ""
            if latest and not pathlib.Path(latest).parent.resolve().is_relative_to(folder.resolve()):
                raise FileError(
                    f"{folder}: the file `checkpoint` leads to another folder: {latest}. If you trust this file, pass "
                    "the path that it names."
                )
            prefixes = [latest] if latest and pathlib.Path(f"{latest}.index").is_file() else prefixes
    if not prefixes:
        raise _missing(f"{folder}: the folder has no checkpoint, and is not a SavedModel.")
    if len(prefixes) > 1:
        raise FileError(
            f"{folder}: the folder has {len(prefixes)} checkpoints. Pass one of them, for example {prefixes[-1]}."
        )
    return prefixes[0]


def _checkpoint(prefix: str) -> File:
    import tensorflow as tf

    name = glob.escape(pathlib.Path(prefix).name)
    shards = sorted(file for file in pathlib.Path(prefix).parent.glob(f"{name}.data-?????-of-?????") if file.is_file())
    # A pipe with the name of a checkpoint would never end, so it counts as missing.
    if not pathlib.Path(f"{prefix}.index").is_file():
        if shards:
            raise _missing(
                f"{prefix}.index: this file of the checkpoint is missing, and the data files cannot be read without it."
            )
        raise _missing(f"{prefix}: there is no such file, folder or checkpoint.")
    if not tf.io.gfile.glob(f"{prefix}.index"):
        raise FileError(
            f"{prefix}: TensorFlow cannot read this checkpoint, because it interprets the brackets in the path as a "
            "pattern. Rename the folder or the checkpoint's files."
        )
    with explaining_damage(f"{prefix}.index", "the list of variables"):
        reader = tf.train.load_checkpoint(prefix)
        shapes = reader.get_variable_to_shape_map()
        dtypes = reader.get_variable_to_dtype_map()
    _require_complete(prefix, shards, shapes, dtypes)

    def tensor(key: str, path: str, name: str) -> Tensor:
        def value() -> Any:
            with explaining_damage(prefix, f"the variable {path}"):
                return reader.get_tensor(key)

        return Tensor(path, name, tuple(shapes[key]), dtypes[key].name, value)

    if object_graphs.KEY in shapes:
        return object_graphs.read(prefix, reader, tensor)
    return savers.read(prefix, list(shapes), tensor)


def _require_complete(
    prefix: str, shards: list[pathlib.Path], shapes: dict[str, list[int]], dtypes: dict[str, Any]
) -> None:
    """Raise an error if data files are missing or too small for the variables, without reading the variables."""
    if not shards:
        raise _missing(f"{prefix}.data-00000-of-00001: this file of the checkpoint is missing.")
    count = int(shards[0].name.rpartition("-")[2])
    if len(shards) != count:
        raise _missing(f"{prefix}: {count - len(shards)} of its {count} data files are missing.")
    # The size of a string is 0 in this sum.
    needed = sum(dtypes[key].size * math.prod(shape) for key, shape in shapes.items())
    there = sum(shard.stat().st_size for shard in shards)
    if there < needed:
        raise FileError(
            f"{shards[-1]}: the variables need {needed} bytes, but the data files contain only {there}, so at "
            "least one of them is truncated. Use another copy of the checkpoint."
        )


def _missing(message: str) -> FileNotFoundError:
    return FileNotFoundError(printable(message))


def _saved_model(folder: pathlib.Path) -> File:
    from tensorflow.core.protobuf import saved_model_pb2

    file = folder / "saved_model.pb"
    with explaining_damage(str(file), "the model"):
        model = saved_model_pb2.SavedModel.FromString(file.read_bytes())
        version = model.meta_graphs[0].meta_info_def.tensorflow_version
    contents = _checkpoint(str(folder / "variables" / "variables"))
    contents.path, contents.kind = str(folder), "SavedModel"
    contents.writer = f"TensorFlow {version}" + (f" ({contents.writer})" if contents.optimizers else "")
    return contents
