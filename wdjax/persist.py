"""Models, trainings and searches on disk: saved whole or not at all, restored strictly.

A path that ends in ``.safetensors`` is one such file; any other is a folder for Orbax. Both carry a
manifest: versions, the settings given, and type, shape and checksum of every leaf. This is the only
importer of Orbax.
"""

import contextlib
import glob
import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from wdjax import torch_file
from wdjax.core import Array, Model, PyTree

Tree = TypeVar("Tree")
_Facts = dict[str, dict[str, Any]]
_Path = str | PathLike[str]

_SCHEMA = "wdjax.checkpoint/1"
_MANIFEST = "manifest.json"


def exists(path: _Path) -> bool:
    """Whether :func:`restore` would find something at ``path``."""
    found = _newest(Path(path))
    return found.exists() and (found.is_file() or any(found.iterdir()))


def check_writable(path: _Path) -> None:
    """Refuses, before any work is done, a place where :func:`save` would fail."""
    folder = Path(path).absolute().parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error}; choose another path.") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"{folder} is not writable; choose another path for the checkpoint.")
    _check_replaceable(Path(path).absolute())


def save(path: _Path, tree: PyTree, settings: Mapping[str, Any] | None = None) -> None:
    """Saves a pytree of arrays, in place of an older one at the same path.

    The new checkpoint is complete before the old one goes, so an interruption leaves one of them
    whole. Leaves are stored under their paths in the tree, such as ``history.loss``.

    Args:
      path: a folder, or a file that ends in ``.safetensors``.
      tree: any pytree of arrays, numbers or random keys: a model, a training, a
        :class:`wdjax.Result`.
      settings: what to write down beside them, for :func:`manifest`; as JSON.

    Raises:
      ValueError: ``path`` holds something that is not a checkpoint, which is left alone; settings
        that are no JSON; or a leaf of a type that the file cannot hold.
    """
    path = Path(path).absolute()
    _check_replaceable(path)
    leaves = _named(tree)
    facts = {name: _facts(leaf) for name, leaf in leaves.items()}
    text = _manifest_text(facts, settings or {})
    path.parent.mkdir(parents=True, exist_ok=True)
    if _is_file(path):
        _write_safetensors(path, leaves, text)
    else:
        _write_folder(path, leaves, text)


def restore(path: _Path, like: Tree) -> Tree:
    """Reads a checkpoint written by :func:`save`.

    Args:
      path: its folder or file.
      like: a pytree of arrays or ``ShapeDtypeStruct`` with the structure, shapes and dtypes that
        are expected.

    Returns:
      A pytree like ``like``, on its devices.

    Raises:
      ValueError: no checkpoint there, a damaged one, or one of another structure, shape or dtype.
    """
    expected = _named(like)
    source, facts = _newest(Path(path)), manifest(path)["leaves"]
    _check_alike(facts, expected, path)
    found = (_read_safetensors if _is_file(source) else _read_folder)(source, expected)
    for name, leaf in found.items():
        if facts[name] != _facts(leaf):
            raise ValueError(f"the checkpoint {path} is damaged: {name} fails its checksum.")
    leaves = zip(jax.tree.leaves(like), (found[name] for name in expected))
    return jax.tree.unflatten(jax.tree.structure(like), [_as(leaf, kept) for leaf, kept in leaves])


def manifest(path: _Path) -> dict[str, Any]:
    """What a checkpoint says of itself.

    Args:
      path: its folder or file.

    Returns:
      ``schema``, ``versions``, ``settings`` as given to :func:`save`, and ``leaves``: of each name,
      ``dtype``, ``shape`` and ``crc32``.

    Raises:
      ValueError: no checkpoint there, or a damaged one.
    """
    source, text = _newest(Path(path)), ""
    if source.is_file() and _is_file(source):
        text = torch_file.read_metadata(source).get("wdjax", "")
    elif (source / _MANIFEST).is_file():
        text = (source / _MANIFEST).read_text(errors="replace")
        if not text:
            raise ValueError(f"the checkpoint {path} is damaged: its manifest is empty.")
    if not text:
        raise ValueError(
            f"{path} is not a checkpoint: it was not written by wdjax.persist; pass what "
            "wdjax.persist.save or save_model wrote."
        )
    try:
        content = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"the checkpoint {path} is damaged: its manifest ends early.") from error
    parts = content if isinstance(content, dict) else {}
    whole = all(isinstance(parts.get(part), dict) for part in ("versions", "settings", "leaves"))
    if not whole or parts.get("schema") != _SCHEMA:
        raise ValueError(f"{path} was not written by this version of wdjax.persist ({_SCHEMA}).")
    return parts


def save_model(path: _Path, model: Model, architecture: Mapping[str, Any]) -> None:
    """Saves a model with what it takes to build it again, for :func:`load_model`.

    Args:
      path: a folder, or a file that ends in ``.safetensors``; an older checkpoint is replaced.
      model: of an architecture of :mod:`wdjax.models`.
      architecture: ``family``, ``options`` and ``normalize`` as for
        :func:`wdjax.models.zoo.build`; the report of a conversion has it.

    Raises:
      ValueError: the parameters are not those of the architecture, or not finite.
    """
    expected = _build(architecture)
    if expected.func != model.func:
        raise ValueError(f"the model is {model.func!r}, the architecture {expected.func!r}.")
    facts = {name: _facts(leaf) for name, leaf in _named(model.args[0]).items()}
    _check_alike(facts, _named(expected.args[0]), "given")
    _check_parameters(model.args[0], "the model")
    save(path, model.args[0], {"architecture": dict(architecture)})


def load_model(path: _Path) -> Model:
    """Loads what :func:`save_model` wrote, as strictly as a conversion.

    Args:
      path: the ``.safetensors`` file or the folder.

    Returns:
      The model, bit for bit.

    Raises:
      ValueError: it does not come from :func:`save_model`; a tensor is missing, unknown, damaged,
        of another shape or dtype, not finite, or a negative variance.
    """
    settings = manifest(path)["settings"]
    if not isinstance(settings.get("architecture"), dict):
        raise ValueError(f"{path} is a checkpoint, but of no model: save_model did not write it.")
    expected = _build(settings["architecture"])
    params = restore(path, expected.args[0])
    _check_parameters(params, str(path))
    return Model(expected.func, params)


def _build(architecture: Mapping[str, Any]) -> Model:
    from wdjax.models import zoo
    from wdjax.models.functional import functional

    family, options, normalize = map(architecture.get, ("family", "options", "normalize"))
    if not isinstance(family, str) or not isinstance(options, Mapping):
        raise ValueError(f"an architecture has family, options, normalize; got {architecture!r}.")
    return functional(zoo.build(family, options, "" if normalize is None else normalize))


def _check_parameters(params: PyTree, where: str) -> None:
    from wdjax.models.pytorch import faults_of

    faults = []
    for name, leaf in _named(params).items():
        variance = name.rpartition(".")[2] == "var"
        faults += faults_of(name, np.asarray(leaf), leaf.shape, variance=variance)
    if faults:
        raise ValueError(f"{where}: {'; '.join(faults[:8])}.")


@contextlib.contextmanager
def replacing(path: _Path) -> Iterator[Path]:
    """A temporary file in the same folder that takes the place of ``path`` when the block ends.

    An exception, or the end of the process, leaves what was at ``path`` as it was.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with replacing(Path(folder) / "note.txt") as new:
    ...         _ = new.write_text("whole")
    ...     [file.name for file in Path(folder).iterdir()]
    ['note.txt']
    """
    path = Path(path).absolute()
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.new"):
        if not _runs(left.name.split(".")[-2]):
            left.unlink(missing_ok=True)
    try:
        yield new
        with new.open("r+b") as file:
            os.fsync(file.fileno())
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def _runs(process: str) -> bool:
    """Whether a process may still be writing."""
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, ValueError, OverflowError):
        return False
    except PermissionError:  # Another user's.
        pass
    return True


def _is_file(path: Path) -> bool:
    return path.suffix == ".safetensors"


def _check_replaceable(path: Path) -> None:
    if _is_file(path) and path.is_dir():
        raise ValueError(f"{path} is a folder; choose another path.")
    if _is_file(path) or not path.exists():
        return
    if path.is_file() or (not (path / _MANIFEST).exists() and any(path.iterdir())):
        raise ValueError(f"{path} exists and is not a checkpoint; choose another path.")


def _manifest_text(facts: _Facts, settings: Mapping[str, Any]) -> str:
    from wdjax import __version__

    versions = {"wdjax": __version__, "jax": jax.__version__}
    content = {"schema": _SCHEMA, "versions": versions, "settings": settings, "leaves": facts}
    try:
        return json.dumps(content)
    except TypeError as error:
        raise ValueError(f"settings must be JSON: {error}.") from error


def _write_safetensors(path: Path, leaves: dict[str, Array], text: str) -> None:
    import safetensors.numpy

    arrays = {name: np.asarray(leaf, order="C") for name, leaf in leaves.items()}
    with replacing(path) as new:
        try:
            new.write_bytes(safetensors.numpy.save(arrays, {"wdjax": text}))
        except safetensors.SafetensorError as error:
            raise ValueError(f"{path}: safetensors cannot hold these leaves: {error}") from error


def _read_safetensors(source: Path, expected: dict[str, Array]) -> dict[str, Array]:
    arrays = torch_file.read_safetensors(source)
    if arrays.keys() != expected.keys():
        odd = sorted(arrays.keys() ^ expected.keys())
        raise ValueError(f"{source} is damaged: its manifest and its tensors differ in {odd}.")
    return {
        name: jax.device_put(arrays[name], getattr(leaf, "sharding", None))
        for name, leaf in expected.items()
    }


def _write_folder(path: Path, leaves: dict[str, Array], text: str) -> None:
    import orbax.checkpoint

    new, old = _beside(path)
    stored = {name: leaf for name, leaf in leaves.items() if leaf.size}
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(new, stored, force=True)
    with replacing(new / _MANIFEST) as file:
        file.write_text(text)
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
    new.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def _read_folder(source: Path, expected: dict[str, Array]) -> dict[str, Array]:
    """Orbax keeps no empty arrays; those are made anew."""
    import orbax.checkpoint

    wanted = {name: leaf for name, leaf in expected.items() if leaf.size}
    try:
        with orbax.checkpoint.StandardCheckpointer() as checkpointer:
            stored = checkpointer.metadata(source).item_metadata.tree
            if _shapes(stored) != _shapes(wanted):
                raise ValueError("its manifest and its arrays differ")
            found = checkpointer.restore(source, wanted)
    except Exception as error:  # Orbax and TensorStore raise many kinds for damaged files.
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"the checkpoint {source} is damaged: {reason[:300]}") from error
    empty = expected.keys() - wanted.keys()
    return found | {name: jnp.zeros(expected[name].shape, expected[name].dtype) for name in empty}


def _shapes(leaves: Mapping[str, Array]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(leaf.shape) for name, leaf in leaves.items()}


def _check_alike(stored: _Facts, expected: dict[str, Array], path: _Path) -> None:
    problems = [f"it has no {name}" for name in expected.keys() - stored.keys()]
    problems += [f"it has {name} besides" for name in stored.keys() - expected.keys()]
    for name in expected.keys() & stored.keys():
        want, have = expected[name], stored[name]
        if list(want.shape) != have["shape"] or str(want.dtype) != have["dtype"]:
            problems.append(
                f"{name} is {have['dtype']}{have['shape']}, expected {want.dtype}{list(want.shape)}"
            )
    if problems:
        raise ValueError(
            f"the checkpoint {path} is of something else: {'; '.join(sorted(problems))}."
        )


def _facts(leaf: Array) -> dict[str, Any]:
    content = np.asarray(leaf, order="C")
    checksum = zlib.crc32(content.reshape(-1).view(np.uint8).data) if content.size else 0
    return {"dtype": str(leaf.dtype), "shape": list(leaf.shape), "crc32": checksum}


def _named(tree: PyTree) -> dict[str, Array]:
    """The leaves under their paths: Orbax cannot rebuild every node (``Partial``), JAX can."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): _numbers(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _is_key(leaf: PyTree) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _numbers(leaf: PyTree) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
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
