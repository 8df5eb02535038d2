"""Pytrees on disk: saved whole or not at all, restored strictly. The only importer of Orbax."""

import os
import shutil
from os import PathLike
from pathlib import Path
from typing import TypeVar

import jax
import jax.numpy as jnp

from wdjax.core import Array, PyTree

Tree = TypeVar("Tree")

_MARK = "_METADATA"


def exists(path: str | PathLike[str]) -> bool:
    """Whether :func:`restore` would find something at ``path``."""
    found = _newest(Path(path))
    return found.exists() and any(found.iterdir())


def check_writable(path: str | PathLike[str]) -> None:
    """Refuses, before any work is done, a place where :func:`save` would fail."""
    folder = Path(path).absolute().parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error}; choose another path.") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"{folder} is not writable; choose another path for the checkpoint.")


def save(path: str | PathLike[str], tree: PyTree) -> None:
    """Saves a pytree of arrays as an Orbax checkpoint, in place of an older one at the same path.

    The new checkpoint is complete before the old one goes, so an interruption leaves one of them
    whole. Leaves are stored under their paths in the tree, such as ``history.loss``.

    Args:
      path: a folder.
      tree: any pytree of arrays, numbers or random keys: a model, a training, a
        :class:`wdjax.Result`.

    Raises:
      ValueError: ``path`` holds something that is not a checkpoint; it is left alone.
    """
    import orbax.checkpoint

    path = Path(path).absolute()
    new, old = _beside(path)
    if path.exists() and not (path / _MARK).exists() and any(path.iterdir()):
        raise ValueError(f"{path} exists and is not a checkpoint; choose another path.")
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(new, _named(tree), force=True)
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
    new.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def restore(path: str | PathLike[str], like: Tree) -> Tree:
    """Reads a checkpoint written by :func:`save`.

    Args:
      path: its folder.
      like: a pytree of arrays with the structure, shapes and dtypes that are expected.

    Returns:
      A pytree like ``like``, on its devices.

    Raises:
      ValueError: no checkpoint there, a damaged one, or one of another structure, shape or dtype.
    """
    import orbax.checkpoint

    source = _newest(Path(path))
    if not (source / _MARK).exists():
        raise ValueError(
            f"{path} is not a checkpoint; pass a folder that wdjax.persist.save wrote."
        )
    expected = _named(like)
    try:
        with orbax.checkpoint.StandardCheckpointer() as checkpointer:
            stored = checkpointer.metadata(source).item_metadata.tree
            _check_alike(stored, expected, path)
            found = checkpointer.restore(source, expected)
    except _MismatchError:
        raise
    except Exception as error:  # Orbax and TensorStore raise many kinds for damaged files.
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"the checkpoint {path} is damaged: {reason[:300]}") from error
    leaves = zip(jax.tree.leaves(like), (found[name] for name in expected))
    return jax.tree.unflatten(jax.tree.structure(like), [_as(leaf, kept) for leaf, kept in leaves])


class _MismatchError(ValueError):
    """A whole checkpoint of something else."""


def _check_alike(
    stored: dict[str, Array], expected: dict[str, Array], path: str | PathLike[str]
) -> None:
    problems = [f"it has no {name}" for name in expected.keys() - stored.keys()]
    problems += [f"it has {name} besides" for name in stored.keys() - expected.keys()]
    for name in expected.keys() & stored.keys():
        want, have = expected[name], stored[name]
        if tuple(want.shape) != tuple(have.shape) or want.dtype != have.dtype:
            problems.append(
                f"{name} is {have.dtype}{list(have.shape)}, expected {want.dtype}{list(want.shape)}"
            )
    if problems:
        raise _MismatchError(
            f"the checkpoint {path} is of something else: {'; '.join(sorted(problems))}."
        )


def _named(tree: PyTree) -> dict[str, Array]:
    """The leaves under their paths: Orbax cannot rebuild every node (``Partial``), JAX can."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): _numbers(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _is_key(leaf: PyTree) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _numbers(leaf: PyTree) -> Array:
    return jax.random.key_data(leaf) if _is_key(leaf) else jnp.asarray(leaf)


def _as(leaf: PyTree, kept: Array) -> Array:
    return jax.random.wrap_key_data(kept, impl=jax.random.key_impl(leaf)) if _is_key(leaf) else kept


def _beside(path: Path) -> tuple[Path, Path]:
    return path.with_name(path.name + ".new"), path.with_name(path.name + ".old")


def _newest(path: Path) -> Path:
    """The checkpoint at ``path``, or the one it was about to replace when it was interrupted."""
    path = path.absolute()
    old = _beside(path)[1]
    return old if old.exists() and not path.exists() else path
