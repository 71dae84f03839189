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


def read(path: str | os.PathLike[str]) -> File:
    """Read a checkpoint or a saved model."""
    # A shell completes a checkpoint's prefix to the name of one of its files.
    given = re.sub(r"\.(index|data-\d+-of-\d+)$", "", os.fspath(path))
    with explaining_damage(given):
        return _read(given)


def _read(given: str) -> File:
    path = pathlib.Path(given)
    if (path / "saved_model.pb").is_file():
        contents = _checkpoint(str(path / "variables" / "variables"))
        contents.path, contents.kind = given, "SavedModel"
        return contents
    if path.is_dir():
        return _checkpoint(_latest_in(given))
    if path.is_file():
        with path.open("rb") as file:
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
            raise FileError(f"{given}: the file is neither a checkpoint nor an .h5 model, or it is damaged.")
    return _checkpoint(given)


def _latest_in(folder: str) -> str:
    import tensorflow as tf

    latest = tf.train.latest_checkpoint(folder) if os.path.isfile(os.path.join(folder, "checkpoint")) else None
    if latest is None:
        raise FileError(
            f"{folder}: the folder is not a SavedModel, and its file `checkpoint` is missing or names no checkpoint. "
            "Pass a checkpoint in it, such as ckpt-1."
        )
    if not os.path.realpath(latest).startswith(os.path.realpath(folder) + os.sep):
        raise FileError(f"{folder}: the file `checkpoint` leads to another folder. Pass {latest} if you trust it.")
    return latest


def _checkpoint(prefix: str) -> File:
    import tensorflow as tf

    index, name = pathlib.Path(f"{prefix}.index"), glob.escape(pathlib.Path(prefix).name)
    # Reading a pipe with the name of one of these files would never end, so it counts as missing.
    shards = sorted(file for file in index.parent.glob(f"{name}.data-?????-of-?????") if file.is_file())
    if not index.is_file() or not shards or len(shards) != int(shards[0].name.rpartition("-")[2]):
        raise FileNotFoundError(
            f"{prefix}: there is no such file, folder or checkpoint. A checkpoint has an .index and all data files."
        )
    reader = tf.train.load_checkpoint(prefix)
    shapes = reader.get_variable_to_shape_map()
    dtypes = reader.get_variable_to_dtype_map()
    # TensorFlow notices a truncated file only when it reads a missing value. The size of a string is 0 in this sum.
    needed = sum(dtypes[key].size * math.prod(shape) for key, shape in shapes.items())
    if sum(shard.stat().st_size for shard in shards) < needed:
        raise FileError(f"{prefix}: the data files are truncated or damaged. Use another copy.")

    def tensor(key: str, path: str, name: str) -> Tensor:
        def value() -> Any:
            with explaining_damage(f"{prefix}: {path}"):
                return reader.get_tensor(key)

        return Tensor(path, name, tuple(shapes[key]), dtypes[key].name, value)

    if object_graphs.KEY in shapes:
        return object_graphs.read(prefix, reader, tensor)
    return savers.read(prefix, list(shapes), tensor)
