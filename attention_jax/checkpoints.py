"""Checkpoints that survive a kill: a step's folder gets its name only once it is whole (Orbax renames it then).

A checkpoint is a flat table from the path of each leaf to its array, and a JSON object of settings. What an interrupted
save leaves behind is never read, and is removed by the next save.
"""

import os
import pathlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import PyTree

from .errors import explain


def save(folder: str | os.PathLike, step: int, tree: PyTree, settings: dict[str, Any]) -> None:
    """Writes the arrays of a tree and JSON settings as the checkpoint of a step, and keeps the two newest steps.

    Returns when the checkpoint is on disk. A step that is there already is replaced.
    """
    for unfinished in pathlib.Path(folder).glob("*.orbax-checkpoint-tmp*"):
        shutil.rmtree(unfinished)
    with _manager(folder) as manager:
        if step in manager.all_steps():
            manager.delete(step)
        arrays, written = ocp.args.StandardSave(_table(tree)), ocp.args.JsonSave(settings)
        manager.save(step, args=ocp.args.Composite(arrays=arrays, settings=written))


def newest(folder: str | os.PathLike) -> int | None:
    """The newest whole step in a folder, or None."""
    if not pathlib.Path(folder).is_dir():
        return None
    with _manager(folder) as manager:
        return manager.latest_step()


def settings_of(folder: str | os.PathLike) -> dict[str, Any]:
    """The settings of the newest checkpoint in a folder.

    Raises:
        ValueError: there is no checkpoint.
    """
    with _manager(folder) as manager:
        args = ocp.args.Composite(settings=ocp.args.JsonRestore())
        return dict(manager.restore(_require("settings_of", manager, folder), args=args)["settings"])


def restore(folder: str | os.PathLike, like: PyTree) -> PyTree:
    """The newest checkpoint in a folder, as a tree of the same structure, shapes and dtypes as `like`.

    Raises:
        ValueError: there is no checkpoint, or its leaves are others than those of `like`.
    """
    with _manager(folder) as manager:
        step = _require("restore", manager, folder)
        expected = _table(like)
        stored = _shapes(manager.item_metadata(step)["arrays"].tree)
        for name in sorted(stored.keys() | expected.keys()):
            wanted = (expected[name].shape, str(expected[name].dtype)) if name in expected else None
            if stored.get(name) != wanted:
                facts = {"folder": folder, "leaf": name, "stored": stored.get(name), "wanted": wanted}
                raise ValueError(explain("restore", "the checkpoint is that of another model.", facts))
        table = manager.restore(step, args=ocp.args.Composite(arrays=ocp.args.StandardRestore(expected)))["arrays"]
    leaves, structure = jax.tree_util.tree_flatten_with_path(like)
    return jax.tree.unflatten(structure, [_as(leaf, table[_name(path)]) for path, leaf in leaves])


@contextmanager
def _manager(folder: str | os.PathLike) -> Iterator[ocp.CheckpointManager]:
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
    handlers = {"arrays": ocp.StandardCheckpointHandler(), "settings": ocp.JsonCheckpointHandler()}
    with ocp.CheckpointManager(pathlib.Path(folder).absolute(), options=options, item_handlers=handlers) as manager:
        yield manager


def _require(function: str, manager: ocp.CheckpointManager, folder: str | os.PathLike) -> int:
    step = manager.latest_step()
    if step is None:
        raise ValueError(explain(function, "the folder holds no checkpoint.", {"folder": folder}))
    return step


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _table(tree: PyTree) -> dict[str, jax.Array]:
    """Leaves by name; random keys as their words, since a checkpoint holds numbers."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {_name(path): jax.random.key_data(leaf) if _is_key(leaf) else leaf for path, leaf in leaves}


def _shapes(stored: dict[str, Any]) -> dict[str, tuple[tuple[int, ...], str]]:
    return {name: (tuple(leaf.shape), str(np.dtype(leaf.dtype))) for name, leaf in stored.items()}


def _is_key(leaf: Any) -> bool:
    return jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _as(leaf: Any, array: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf)) if _is_key(leaf) else array
