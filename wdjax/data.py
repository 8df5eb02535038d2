"""Data sets: scikit-learn's digits, and files and folders whose samples may stay on the disk."""

import contextlib
import os
import warnings
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from wdjax.files import archive
from wdjax.files.state_pickle import BrokenError, RefusedError, shown

_TEST_PER_CLASS = 35


class Dataset(NamedTuple):
    """Samples and labels on the host."""

    x: np.ndarray
    """``[n, *shape]`` float32 in ``[0, 1]``; images are NHWC."""
    y: np.ndarray
    """``[n]`` int32 from 0."""

    def take(self, n: int) -> "Dataset":
        """The first ``n`` samples (all, if there are fewer)."""
        return Dataset(self.x[:n], self.y[:n])


class Split(NamedTuple):
    """A training and a test set that share no sample."""

    train: Dataset
    test: Dataset


def digits() -> Split:
    """Handwritten digits of 8 x 8 pixels: no download, the default of the audit.

    Of each class, every fifth sample is held out until there are 35; the rest is for training. In
    both sets the classes alternate, so that the first ``10 k`` test samples hold ``k`` of every
    class. Nothing is random.

    Returns:
      A :class:`Split`: 1447 training and 350 test images ``[n, 8, 8, 1]`` with 17 grey levels.

    Source: the optical recognition of handwritten digits test set [alpaydin1998], as it comes in
      scikit-learn.

    >>> train, test = digits()
    >>> train.x.shape, test.x.shape, test.y[:12].tolist()
    ((1447, 8, 8, 1), (350, 8, 8, 1), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1])
    """
    from sklearn import datasets

    bunch = datasets.load_digits()
    x = (bunch.images[..., None] / 16).astype(np.float32)
    y = bunch.target.astype(np.int32)
    classes = [np.flatnonzero(y == label) for label in range(10)]
    held = [indices[::5][:_TEST_PER_CLASS] for indices in classes]
    rest = [np.setdiff1d(indices, out) for indices, out in zip(classes, held)]
    train, test = (_in_turns(parts) for parts in (rest, held))
    return Split(Dataset(x[train], y[train]), Dataset(x[test], y[test]))


def _in_turns(parts: Sequence[npt.NDArray[np.int_]]) -> npt.NDArray[np.int_]:
    """The indices of all parts, the first of each, then the second of each, and so on."""
    turn = np.concatenate([np.arange(len(part)) for part in parts])
    return np.concatenate(parts)[np.argsort(turn, kind="stable")]


def load_npz(path: str | PathLike) -> Dataset:
    """Reads samples ``x`` and labels ``y`` from a NumPy archive.

    Args:
      path: a ``.npz`` file with ``x`` ``[n, *shape]``, either uint8 (divided by 255) or floats in
        ``[0, 1]``, and ``y`` ``[n]`` integers from 0. Other entries are ignored.

    Returns:
      A :class:`Dataset` in float32 and int32.

    Raises:
      ValueError: no such file, not an archive, a missing entry, pickled objects (they could run
        code, and are never loaded), a bad shape or dtype, values that are not finite or outside
        ``[0, 1]``, negative labels, or more bytes claimed than the file can hold: compressed
        arrays may expand to 64 MB, or to a hundred times what is stored.

    Cost: one pass over ``x`` and ``y``, which are in memory twice.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(f"{folder}/d.npz", x=np.full((2, 1), 255, np.uint8), y=[0, 1])
    ...     load_npz(f"{folder}/d.npz").x.tolist()
    [[1.0], [1.0]]
    """
    path = Path(path)
    with _reading(path):
        if not path.is_file():
            raise BrokenError("it is no file")
        with path.open("rb") as file:
            x, y = _samples(file)
        return as_dataset(x, y, str(path))


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """A context whose errors say that the file or folder cannot be read, and what can."""
    try:
        yield
    except MemoryError:
        raise ValueError(f"cannot read {path}: it holds more than there is memory for.") from None
    except (OSError, BrokenError, RefusedError) as error:
        raise ValueError(
            f"cannot read {path}: {error}. Save plain arrays with np.savez(path, x=x, y=y)."
        ) from error


def _samples(file: BinaryIO, names: str = "xy") -> list[np.ndarray]:
    """Some of the arrays ``x`` and ``y`` of an open npz archive; raises if either is missing."""
    size = os.fstat(file.fileno()).st_size
    opened, entries = archive.opened(file, size)
    with opened:
        held = [name.removesuffix(".npy") for name in entries]
        missing = " and ".join(sorted({"x", "y"} - set(held)))
        if missing:
            raise BrokenError(f"it lacks {missing}; it has {shown(', '.join(held)) or 'nothing'}")
        content = [archive.content(opened, entries, f"{n}.npy", size, deflated=True) for n in names]
    return [archive.array(whole, name) for whole, name in zip(content, names)]


def as_dataset(x: npt.ArrayLike, y: npt.ArrayLike, name: str = "the data set") -> Dataset:
    """Checks and converts arrays: uint8 images become floats in ``[0, 1]``.

    Args:
      x: ``[n, *shape]``, uint8 or floats in ``[0, 1]``.
      y: ``[n]`` integers from 0.
      name: name of the data set in error messages.

    Returns:
      A :class:`Dataset` in float32 and int32.

    Raises:
      ValueError: as :func:`load_npz`.

    >>> as_dataset(np.array([[0, 255]], np.uint8), np.array([3]))
    Dataset(x=array([[0., 1.]], dtype=float32), y=array([3], dtype=int32))
    """
    x = _images(x, name)
    return Dataset(x, _labels(y, len(x), name))


def _labels(y: npt.ArrayLike, n: int, name: str) -> np.ndarray:
    """Labels ``[n]`` as int32; raises as :func:`as_dataset`."""
    y = np.asarray(y)
    if y.shape != (n,):
        raise ValueError(f"{name}: y must be [{n}] like x, got shape {list(y.shape)}.")
    if y.dtype.kind not in "iu":  # Time differences are integers to NumPy.
        raise ValueError(f"{name}: y must be integer labels, got {y.dtype}; convert them.")
    if y.min() < 0 or y.max() > np.iinfo(np.int32).max:
        raise ValueError(f"{name}: labels must count from 0, got {y.min()}..{y.max()}.")
    return y.astype(np.int32)


def _images(x: npt.ArrayLike, name: str, first: int = 0) -> np.ndarray:
    """Samples ``[n, *shape]`` in float32; raises as :func:`as_dataset`.

    ``first`` is the number of the first of them in the data set.
    """
    x = np.asarray(x)
    if x.ndim < 2 or x.size == 0:
        raise ValueError(f"{name}: x must be [n, *shape] with n >= 1, got shape {list(x.shape)}.")
    if x.dtype == np.uint8:
        if x.max() == 1:
            warnings.warn(
                f"{name}: uint8 samples are divided by 255, and these hold 0 and 1 only; save 0 "
                "and 1 as floats.",
                stacklevel=3,
            )
        x = x.astype(np.float32)
        x /= 255
    elif not np.issubdtype(x.dtype, np.floating):
        raise ValueError(f"{name}: x must be uint8 or floats in [0, 1], got {x.dtype}.")
    low, high = x.min(), x.max()
    if not (np.isfinite(low) and np.isfinite(high)):
        bad = np.flatnonzero(~np.isfinite(x).reshape(len(x), -1).all(axis=1))[0] + first
        raise ValueError(f"{name}: x[{bad}] holds a value that is not finite; remove or repair it.")
    if low < 0 or high > 1:
        raise ValueError(
            f"{name}: x spans [{low:.10g}, {high:.10g}], outside [0, 1]; rescale it, and put a "
            "normalisation inside the model."
        )
    return x.astype(np.float32)


class Sliced(Protocol):
    """Samples or labels that are read by slices, which are arrays or become such.

    An array, a memory map, a tensor on the host, a data set of HDF5 or zarr, a table's column.
    """

    def __len__(self) -> int: ...
    def __getitem__(self, rows: slice, /) -> npt.ArrayLike: ...


class Unread:
    """Samples that are read, checked and converted when they are indexed, as by :func:`as_dataset`.

    Args:
      rows: where they are.
      name: name of the data set in error messages.
      n: the first ``n`` of them only.

    Raises:
      ValueError: none is there, or the first is none; later what is bad among those that are read.

    Cost: memory for what an index asks for and all that lies between.

    >>> x = Unread(np.array([[[0, 255]], [[51, 0]]], np.uint8))
    >>> x.shape, x[1:], x[[1, 0]].ravel()
    ((2, 1, 2), array([[[0.2, 0. ]]], dtype=float32), array([0.2, 0. , 0. , 1. ], dtype=float32))
    """

    dtype = np.dtype(np.float32)

    def __init__(self, rows: Sliced, name: str = "the data set", n: int | None = None) -> None:
        self._rows, self._name = rows, name
        count = len(rows) if n is None else min(n, len(rows))
        self.shape = count, *_images(rows[:1], name).shape[1:]
        self.ndim = len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice | npt.NDArray[np.int_]) -> np.ndarray:
        if isinstance(rows, slice):
            wanted = np.asarray(range(len(self))[rows])
        else:
            wanted = np.arange(len(self))[rows]
        if not wanted.size:
            return np.zeros((0, *self.shape[1:]), self.dtype)
        start, stop = wanted.min(), wanted.max() + 1
        try:
            found = self._rows[start:stop]
        except (OSError, BrokenError, RefusedError) as error:
            raise ValueError(f"cannot read {self._name}: {error}.") from error
        read = _images(found, self._name, start)
        if read.shape[1:] != self.shape[1:]:
            raise ValueError(
                f"{self._name}: x[{start}:{stop}] have the shape {list(read.shape[1:])}, x[0] has "
                f"{list(self.shape[1:])}."
            )
        return read if np.array_equal(wanted, range(start, stop)) else read[wanted - start]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[:].astype(self.dtype if dtype is None else dtype, copy=False)


def opened(path: str | PathLike, n: int | None = None) -> tuple[Unread, np.ndarray]:
    """Opens a data set of any size, of whose samples only those take memory that are asked for.

    Args:
      path: a ``.npz`` file as of :func:`load_npz`, whose samples are mapped or, if they are
        compressed, decompressed up to the last one that is asked for; a folder of ``x.npy`` and
        ``y.npy``, which are mapped; or a folder that Hugging Face's ``datasets`` has saved to the
        disk (its package is needed), with a column ``x``, ``image`` or ``img`` and a column ``y``
        or ``label``.
      n: the first ``n`` samples only.

    Returns:
      The samples, which are read by slices, and ``[n]`` labels.

    Raises:
      ValueError: as :func:`load_npz`; what is wrong with samples when they are read. The checksum
        of samples that are mapped, or decompressed in part, is not verified.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(f"{folder}/x.npy", np.full((9, 1), 255, np.uint8))
    ...     np.save(f"{folder}/y.npy", np.arange(9))
    ...     x, y = opened(folder)
    ...     x[7:], y[7:]
    (array([[1.],
           [1.]], dtype=float32), array([7, 8], dtype=int32))
    """
    path = Path(path)
    with _reading(path):
        if (path / "state.json").is_file():
            x, y = _columns(path)
        elif path.is_dir():
            x, y = (archive.mapped(path / f"{name}.npy", name) for name in "xy")
        elif not path.is_file():
            raise BrokenError("it is no file")
        else:
            with path.open("rb") as file:
                (y,) = _samples(file, "y")
                x = archive.on_disk(path, file, "x")
        return Unread(x, str(path), n), _labels(y, len(x), str(path))[:n]


def load(path: str | PathLike, n: int | None = None) -> Dataset:
    """Reads samples from a file or folder, as of :func:`opened`.

    Args:
      path: of the file or folder.
      n: the first ``n`` samples only; all, if there are fewer.

    Returns:
      A :class:`Dataset` in float32 and int32.

    Raises:
      ValueError: as :func:`load_npz`, of what is read.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(f"{folder}/d.npz", x=np.full((2, 1), 255, np.uint8), y=[0, 1])
    ...     load(f"{folder}/d.npz", 1)
    Dataset(x=array([[1.]], dtype=float32), y=array([0], dtype=int32))
    """
    if n is None and Path(path).is_file():
        return load_npz(path)  # Which verifies checksums.
    x, y = opened(path, n)
    return Dataset(x[:], y)


class _Column:
    """A column of a Hugging Face table; images of one channel get an axis for it."""

    def __init__(self, table: Any, name: str) -> None:
        self._table, self._name = table.with_format("numpy"), name

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, rows: slice) -> np.ndarray:
        found = np.asarray(self._table[rows][self._name])
        kind = self._table.features[self._name]
        while hasattr(kind, "feature"):
            kind = kind.feature
        if getattr(kind, "dtype", "") == "uint8":  # The numpy format widens integers.
            found = found.astype(np.uint8)
        image = type(kind).__name__ == "Image"
        return found[..., None] if image and found.ndim == 3 else found


_NAMES = {"x": ("x", "image", "img"), "y": ("y", "label")}
"""Names of columns."""


def _columns(path: Path) -> list[Any]:
    """The columns of samples and labels of a table in a folder."""
    try:
        import datasets
    except ImportError:
        raise BrokenError(
            "it is a table of Hugging Face, which needs a package: pip install datasets"
        ) from None
    try:
        table = datasets.load_from_disk(str(path))
    except Exception as error:  # It reads its JSON unchecked, which fails in many ways.
        raise BrokenError(shown(f"{type(error).__name__}: {error}")) from None
    names = [next((n for n in known if n in table.column_names), "") for known in _NAMES.values()]
    if not all(names):
        raise BrokenError(f"its columns are {shown(', '.join(table.column_names))}")
    x, y = (table.select_columns([name]) for name in names)
    return [_Column(x, names[0]), _Column(y, names[1])[:]]
