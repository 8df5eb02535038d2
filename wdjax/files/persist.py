"""Models, trainings and searches on disk: saved whole or not at all, restored strictly.

A path that ends in ``.safetensors`` is a single file; any other is a folder written by Orbax. Both
contain a manifest: versions, settings, type, shape and checksum of every leaf, and a checksum of
itself. Only this module imports Orbax.
"""

import contextlib
import json
import os
import re
import shutil
import threading
import zlib
from collections.abc import Iterator, Mapping
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import jax
import jax.numpy as jnp
import numpy as np

from wdjax import precision
from wdjax.core import PyTree
from wdjax.files import atomic, torch_file
from wdjax.files.state_pickle import MAX_BYTES, MAX_RANK, shown

if TYPE_CHECKING:
    from wdjax.models.saved import load_model, save_model

__all__ = [
    "check_writable", "exists", "load_model", "manifest", "restore", "save", "save_model",
]  # fmt: skip

Tree = TypeVar("Tree")
_Facts = dict[str, dict[str, Any]]
_Path = str | PathLike[str]

_SCHEMA = "wdjax.checkpoint/1"
_MANIFEST = "manifest.json"
_FILE = frozenset(map(str, torch_file.SAFE.values()))
_FOLDER = _FILE | {
    "complex64", "complex128", "int4", "float8_e3m4", "float8_e4m3b11fnuz", "float8_e4m3fn",
    "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
}  # fmt: skip
"""Dtypes that are restored bit for bit, in files and in folders."""

_ORBAX = threading.Lock()
"""Orbax counts operations per process: two at a time would deadlock or fail."""


def exists(path: _Path) -> bool:
    """Whether :func:`restore` would find something at ``path``.

    Args:
      path: a folder or a file.

    >>> exists("nothing.safetensors")
    False
    """
    found = _newest(path)
    return found.exists() and (found.is_file() or any(found.iterdir()))


def check_writable(path: _Path, tree: PyTree = ()) -> None:
    """Raises, before any work is done, if :func:`save` would fail for this path or tree.

    Args:
      path: a folder, or a file that ends in ``.safetensors``.
      tree: what will be saved.

    Raises:
      ValueError: the path cannot be written, another process or thread is writing it, or a leaf
        could not be restored bit for bit.

    >>> check_writable("trained.safetensors", {"w": np.ones(2, np.float32)})
    """
    path = atomic.resolved(path)
    with _owned(path):
        _check_replaceable(path)
        _check_storable(named(tree), _FILE if _is_file(path) else _FOLDER)


def save(path: _Path, tree: PyTree, settings: Mapping[str, Any] | None = None) -> None:
    """Saves a pytree of arrays; replaces an older checkpoint at the same path.

    The new checkpoint is complete before the old one is removed, so an interruption leaves one of
    them whole. Leaves are stored under their paths in the tree, such as ``history.loss``. The path
    is locked meanwhile (:func:`wdjax.files.atomic.exclusive`).

    Args:
      path: a folder, or a file that ends in ``.safetensors``. Links are followed.
      tree: any pytree of arrays, numbers or random keys: a model, a training, a
        :class:`wdjax.Result`.
      settings: JSON values to store beside the leaves, for :func:`manifest`.

    Raises:
      ValueError: ``path`` is not a checkpoint, or is being written by another process; settings
        that are not JSON; or a leaf that could not be restored bit for bit: of a dtype that the
        file does not support, traced, or with a name used twice. The path is then left as it is.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(f"{folder}/w.safetensors", {"w": np.ones(2)}, {"epochs": 3})
    ...     exists(f"{folder}/w.safetensors")
    True
    """
    path, leaves = atomic.resolved(path), named(tree)
    with _owned(path):
        check_writable(path, tree)
        text = _manifest_text({name: _facts(leaf) for name, leaf in leaves.items()}, settings or {})
        raw = {name: _raw(leaf) for name, leaf in leaves.items()}
        (_write_safetensors if _is_file(path) else _write_folder)(path, raw, text)


def restore(path: _Path, like: Tree) -> Tree:
    """Reads a checkpoint written by :func:`save`.

    Args:
      path: its folder or file.
      like: a pytree of arrays or ``ShapeDtypeStruct`` with the expected structure, shapes and
        dtypes.

    Returns:
      A pytree like ``like``: JAX arrays on its devices; NumPy arrays and numbers on the host.

    Raises:
      ValueError: no checkpoint, a damaged one, or one of another structure, shape or dtype.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(f"{folder}/w.safetensors", {"w": np.ones(2)}, {"epochs": 3})
    ...     restore(f"{folder}/w.safetensors", {"w": np.zeros(2)})
    {'w': array([1., 1.])}
    """
    expected = named(like)
    source, facts = _newest(path), manifest(path)["leaves"]
    _check_alike(facts, expected, path)
    wanted = {name: _raw(leaf) for name, leaf in expected.items()}
    found = (_read_safetensors if _is_file(source) else _read_folder)(source, wanted)
    for name, leaf in found.items():
        if facts[name]["crc32"] != _checksum(leaf):
            raise ValueError(f"the checkpoint {path} is damaged: {shown(name)} fails its checksum.")
    leaves = zip(jax.tree.leaves(like), (found[name] for name in expected))
    return jax.tree.unflatten(jax.tree.structure(like), [_as(leaf, kept) for leaf, kept in leaves])


def manifest(path: _Path) -> dict[str, Any]:
    """The manifest of a checkpoint, verified.

    Args:
      path: its folder or file.

    Returns:
      ``schema``, ``versions``, ``settings`` as given to :func:`save`, and ``leaves``: for each name
      ``dtype``, ``shape`` and ``crc32``.

    Raises:
      ValueError: no checkpoint, or a damaged one.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(f"{folder}/w.safetensors", {"w": np.ones(2)}, {"epochs": 3})
    ...     manifest(f"{folder}/w.safetensors")["settings"]
    {'epochs': 3}
    """
    source, text = _newest(path), ""
    if source.is_file() and _is_file(source):
        text = torch_file.read_metadata(source).get("wdjax", "")
    elif (source / _MANIFEST).is_file():
        with (source / _MANIFEST).open(errors="replace") as file:
            text = file.read(MAX_BYTES + 1)
        if not text or len(text) > MAX_BYTES:
            how = "too long" if text else "empty"
            raise ValueError(f"the checkpoint {path} is damaged: its manifest is {how}.")
    if not text:
        raise ValueError(
            f"{path} is not a checkpoint: it was not written by wdjax.files.persist; pass what "
            "wdjax.files.persist.save or save_model wrote."
        )
    try:
        content = json.loads(text, object_pairs_hook=_once)
        parts = content if isinstance(content, dict) else {}
        kept = parts.pop("crc32", None)
        crc32 = zlib.crc32(json.dumps(parts).encode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the checkpoint {path} is damaged: its manifest is no JSON.") from error
    whole = all(isinstance(parts.get(part), dict) for part in ("versions", "settings", "leaves"))
    if not whole or parts.get("schema") != _SCHEMA:
        raise ValueError(
            f"{path} was not written by this version of wdjax.files.persist ({_SCHEMA})."
        )
    for name, facts in parts["leaves"].items():
        if not _are_facts(facts):
            raise ValueError(
                f"the checkpoint {path} is damaged: its manifest describes {shown(name)} by "
                "something else than dtype, shape and crc32."
            )
    if kept not in (crc32, None):
        raise ValueError(f"the checkpoint {path} is damaged: its manifest fails its checksum.")
    return parts


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object as a dict; raises if a key is there twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found


def _are_facts(facts: Any) -> bool:
    """Whether a manifest's entry of a leaf has dtype, shape and crc32, of the right types."""
    if not isinstance(facts, dict) or facts.keys() != {"dtype", "shape", "crc32"}:
        return False
    numbers = [facts["crc32"], *(facts["shape"] if type(facts["shape"]) is list else [None])]
    return type(facts["dtype"]) is str and all(type(n) is int and n >= 0 for n in numbers)


def _is_file(path: Path) -> bool:
    """Whether a checkpoint of this path is a single safetensors file."""
    return path.suffix == ".safetensors"


def _owned(path: Path) -> contextlib.AbstractContextManager[None]:
    """The lock of ``path``, unless this task holds it; makes the folder that contains the path.

    Raises if nothing of that name can be written there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error}; choose another path.") from error
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ValueError(f"{path.parent} is not writable; choose another path for the checkpoint.")
    if len(os.fsencode(path.name)) > 200:
        raise ValueError(f"{path} has a name of more than 200 bytes; choose another path.")
    return contextlib.nullcontext() if atomic.held(path) else atomic.exclusive(path)


def _check_replaceable(path: Path) -> None:
    """Raises if something is at the path that is not a checkpoint or an empty folder."""
    if _is_file(path) and path.is_dir():
        raise ValueError(f"{path} is a folder; choose another path.")
    if not path.exists():
        return
    ours = path.is_dir() and not any(path.iterdir())
    with contextlib.suppress(ValueError, OSError):
        if _is_file(path):
            ours = "wdjax" in torch_file.read_metadata(path)
        elif not ours:
            with (path / _MANIFEST).open(errors="replace") as file:
                ours = _SCHEMA.partition("/")[0] in file.read(100)
    if not ours:
        raise ValueError(f"{path} exists and is not a checkpoint; choose another path.")


def _check_storable(leaves: Mapping[str, Any], dtypes: frozenset[str]) -> None:
    """Raises for leaves that could not be restored bit for bit from a file or a folder.

    ``leaves`` are arrays by name, ``dtypes`` the names of those that the format stores. Leaves
    without values (tracers), too many axes and reserved names are refused too.
    """
    for name, leaf in leaves.items():
        what = f"{shown(name)} is {leaf.dtype} of rank {leaf.ndim}"
        if isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct):
            raise ValueError(f"{what} without values; save arrays, outside of jit.")
        if name != name.encode(errors="replace").decode():
            raise ValueError(f"{shown(name)} is not a name that UTF-8 can encode; rename it.")
        if name == "__metadata__" and dtypes is _FILE:
            raise ValueError(f"safetensors files reserve the name {name}; save to a folder.")
        if leaf.ndim >= MAX_RANK or (str(leaf.dtype) not in dtypes and not _is_key(leaf)):
            where = "a safetensors file" if dtypes is _FILE else "a checkpoint"
            raise ValueError(f"{what}, which {where} cannot store; convert it.")


def _manifest_text(facts: _Facts, settings: Mapping[str, Any]) -> str:
    """The manifest as JSON with a checksum of itself; raises if settings are not JSON.

    ``facts`` are dtype, shape and checksum of every leaf. A manifest that is too long raises, too.
    """
    from wdjax import __version__

    versions = {"wdjax": __version__, "jax": jax.__version__}
    content = {"schema": _SCHEMA, "versions": versions, "settings": settings, "leaves": facts}
    try:
        text = json.dumps(content)
        json.loads(text, object_pairs_hook=_once)
        text = json.dumps(content | {"crc32": zlib.crc32(text.encode())})
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"settings must be JSON: {error}.") from error
    if len(text) > MAX_BYTES:
        raise ValueError(f"names and settings take {len(text)} bytes, of at most {MAX_BYTES}.")
    return text


def _write_safetensors(path: Path, leaves: dict[str, Any], text: str) -> None:
    """Writes a checkpoint as one safetensors file: arrays by name, and the manifest ``text``."""
    import safetensors.numpy

    arrays = {name: np.asarray(leaf, order="C") for name, leaf in leaves.items()}
    content = safetensors.numpy.save(arrays, {"wdjax": text})
    header = int.from_bytes(content[:8], "little")
    if header > MAX_BYTES:
        raise ValueError(f"{path}: names and settings take {header} bytes; save to a folder.")
    atomic.write(path, content)


def _read_safetensors(source: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """Reads a checkpoint's file: arrays by name, those of ``wanted``, placed like them."""
    arrays = torch_file.read_safetensors(source)
    if _kinds(arrays) != _kinds(wanted):
        raise ValueError(f"{source} is damaged: its manifest and its tensors differ.")
    return {name: _placed(arrays[name], leaf) for name, leaf in wanted.items()}


def _write_folder(path: Path, leaves: dict[str, Any], text: str) -> None:
    """Writes a checkpoint as a folder by Orbax, beside the old one, which it then replaces.

    ``leaves`` are arrays by name; ``text`` is the manifest. Names are quoted, since Orbax takes
    them for file paths; empty arrays are left out, since Orbax loses them.
    """
    import orbax.checkpoint

    new, old = _beside(path)
    stored = {
        quote(name, safe=""): np.asarray(leaf) if _wide(leaf) else leaf
        for name, leaf in leaves.items()
        if leaf.size
    }
    _sweep(path)
    try:
        new.mkdir()
        if stored:
            with _orbax() as checkpointer:
                checkpointer.save(new, orbax.checkpoint.args.StandardSave(stored), force=True)
        atomic.write(new / _MANIFEST, text)
        if path.exists():
            path.rename(old)
        new.rename(path)
    finally:
        _sweep(path)


def _read_folder(source: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """Reads a checkpoint's folder by Orbax: arrays by name, of the shapes and dtypes of ``wanted``.

    Arrays that JAX would cut to 32 bits are read by NumPy; empty arrays are created. Any error of
    Orbax becomes a ValueError that the checkpoint is damaged.
    """
    import orbax.checkpoint

    found: dict[str, Any] = {}
    asked = {
        quote(name, safe=""): _host_like(leaf) if _wide(leaf) else leaf
        for name, leaf in wanted.items()
        if leaf.size
    }
    try:
        if asked:
            with _orbax() as checkpointer:
                stored = checkpointer.metadata(source).item_metadata.tree
                if _kinds(stored) != _kinds(asked):
                    raise ValueError("its manifest and its arrays differ")
                found = checkpointer.restore(source, orbax.checkpoint.args.StandardRestore(asked))
    except Exception as error:  # Orbax and TensorStore raise many kinds for damaged files.
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"the checkpoint {source} is damaged: {shown(reason)}") from error
    return {
        name: _placed(found[quote(name, safe="")] if leaf.size else _host_like(leaf), leaf)
        for name, leaf in wanted.items()
    }


@contextlib.contextmanager
def _orbax() -> Iterator[Any]:
    """Orbax's checkpointer, one at a time in a process.

    It works in this thread: the asynchronous one, after an error, holds up the end of the process
    for five minutes.
    """
    import orbax.checkpoint

    handler = orbax.checkpoint.StandardCheckpointHandler()
    with _ORBAX, orbax.checkpoint.Checkpointer(handler) as checkpointer:
        yield checkpointer


def _host_like(leaf: Any) -> np.ndarray:
    """A NumPy array of the leaf's shape and dtype that takes no memory."""
    return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)


def _kinds(leaves: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every leaf, by name, for comparisons."""
    return {name: (tuple(leaf.shape), str(np.dtype(leaf.dtype))) for name, leaf in leaves.items()}


def check_alike(tree: PyTree, like: PyTree) -> None:
    """Raises unless two trees have leaves of the same names, shapes and dtypes."""
    facts = {name: _facts(leaf) for name, leaf in named(tree).items()}
    _check_alike(facts, named(like), "given")


def _check_alike(stored: _Facts, expected: Mapping[str, Any], path: _Path) -> None:
    """Raises unless a checkpoint's leaves have the names, shapes and dtypes of the expected tree.

    ``stored`` are the manifest's facts. The error lists up to eight differences.
    """
    problems = [f"it has no {shown(name)}" for name in expected.keys() - stored.keys()]
    problems += [f"it has {shown(name)} besides" for name in stored.keys() - expected.keys()]
    for name in expected.keys() & stored.keys():
        want, have = expected[name], stored[name]
        if list(want.shape) != have["shape"] or str(want.dtype) != have["dtype"]:
            kept = shown(f"{have['dtype']}{have['shape']}")
            problems.append(f"{shown(name)} is {kept}, expected {want.dtype}{list(want.shape)}")
    if problems:
        more = [f"and {len(problems) - 8} more"] if len(problems) > 8 else []
        told = "; ".join(sorted(problems)[:8] + more)
        raise ValueError(f"the checkpoint {path} is of something else: {told}.")


def _facts(leaf: Any) -> dict[str, Any]:
    """The manifest's entry of a leaf: dtype, shape and checksum."""
    return {"dtype": str(leaf.dtype), "shape": list(leaf.shape), "crc32": _checksum(_raw(leaf))}


def _checksum(leaf: Any) -> int:
    """The CRC-32 of an array's bytes, 0 if it is empty."""
    content = np.asarray(leaf, order="C")
    return zlib.crc32(content.reshape(-1).view(np.uint8).data) if content.size else 0


def named(tree: PyTree) -> dict[str, Any]:
    """The leaves of a tree by paths such as ``layers.0.kernel``; numbers become arrays.

    Raises for two leaves of one name and for leaves that are neither arrays nor numbers. Names are
    used since Orbax cannot rebuild every node (``Partial``), but JAX can.
    """
    named: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if name in named:
            raise ValueError(f"two leaves are called {shown(name)}; rename a key that has a dot.")
        if isinstance(leaf, int) and not -(1 << 63) <= leaf < 1 << 63:
            raise ValueError(f"{shown(name)} is a whole number beyond 64 bits; save less.")
        masked = isinstance(leaf, np.ma.MaskedArray)  # Its mask would be lost.
        if isinstance(leaf, np.ndarray | np.generic | bool | int | float | complex) and not masked:
            leaf = np.asarray(leaf)
        elif not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            raise ValueError(f"{shown(name)} is a {type(leaf).__name__}; save arrays and numbers.")
        named[name] = leaf
    return named


def _is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of typed random keys."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _raw(leaf: Any) -> Any:
    """The key data of random keys; other leaves unchanged."""
    if not _is_key(leaf):
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.eval_shape(jax.random.key_data, leaf)
    return jax.random.key_data(leaf)


def _wide(leaf: Any) -> bool:
    """Whether JAX, as now configured, would cut the leaf to 32 bits."""
    on_device = isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)
    return on_device and jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype


def _placed(array: Any, leaf: Any) -> Any:
    """A stored array placed like ``leaf``: on its devices, or as a copy on the host."""
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return np.array(array)
    if isinstance(array, jax.Array):
        return array
    with precision.float64():
        return jax.device_put(array, getattr(leaf, "sharding", None))


def _as(leaf: PyTree, kept: Any) -> Any:
    """A stored array converted to the type of ``leaf``: random key, array or number."""
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        if not _is_key(leaf):
            return kept
        found: list[Any] = []
        jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), leaf)
        return jax.random.wrap_key_data(kept, impl=found[0])
    if isinstance(leaf, np.ndarray):
        return kept
    return kept[()] if isinstance(leaf, np.generic) else kept.item()


def _beside(path: Path) -> tuple[Path, Path]:
    """Two temporary paths of this process beside ``path``: for the new and the old checkpoint."""
    name = f".{path.name}.{os.getpid()}"
    return path.with_name(f"{name}.new"), path.with_name(f"{name}.old")


def _left(path: Path, kind: str) -> list[Path]:
    """Temporary folders that saves to ``path`` left, of any process; ``kind`` is "new" or "old".

    Orbax may have appended to their names.
    """
    name = re.compile(rf"\.{re.escape(path.name)}\.\d+\.{kind}(\.orbax.*)?")
    there = path.parent.iterdir() if path.parent.is_dir() else ()
    return [folder for folder in there if name.fullmatch(folder.name)]


def _sweep(path: Path) -> None:
    """Removes leftovers of interrupted saves; the old checkpoint only if there is a new one."""
    for left in _left(path, "new") + (_left(path, "old") if path.exists() else []):
        shutil.rmtree(left, ignore_errors=True)


def _newest(path: _Path) -> Path:
    """The checkpoint at ``path``, or the old one if its replacement was interrupted."""
    path = atomic.resolved(path)
    if path.exists():
        return path
    return max(_left(path, "old"), key=lambda folder: folder.stat().st_mtime, default=path)


def _found(name: str) -> Any:
    """The public names that need architectures, which lie above; the module's ``__getattr__``."""
    if name in ("load_model", "save_model"):
        return getattr(import_module("wdjax.models.saved"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if not TYPE_CHECKING:  # Type checkers see the import above, and what is missing.
    __getattr__ = _found
