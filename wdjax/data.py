"""Data sets as arrays: scikit-learn's digits, and ``.npz`` files."""

import os
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import BinaryIO, NamedTuple

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
    try:
        if not path.is_file():
            raise BrokenError("it is no file")
        with path.open("rb") as file:
            x, y = _samples(file)
        return as_dataset(x, y, str(path))
    except MemoryError:
        raise ValueError(f"cannot read {path}: it holds more than there is memory for.") from None
    except (OSError, BrokenError, RefusedError) as error:
        raise ValueError(
            f"cannot read {path}: {error}. Save plain arrays with np.savez(path, x=x, y=y)."
        ) from error


def _samples(file: BinaryIO) -> tuple[np.ndarray, np.ndarray]:
    """The arrays ``x`` and ``y`` of an open npz archive; raises if one is missing or broken."""
    size = os.fstat(file.fileno()).st_size
    opened, entries = archive.opened(file, size)
    with opened:
        held = [name.removesuffix(".npy") for name in entries]
        missing = " and ".join(sorted({"x", "y"} - set(held)))
        if missing:
            raise BrokenError(f"it lacks {missing}; it has {shown(', '.join(held)) or 'nothing'}")
        content = [archive.content(opened, entries, f"{n}.npy", size, deflated=True) for n in "xy"]
    return archive.array(content[0], "x"), archive.array(content[1], "y")


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
    x, y = np.asarray(x), np.asarray(y)
    if x.ndim < 2 or x.size == 0:
        raise ValueError(f"{name}: x must be [n, *shape] with n >= 1, got shape {list(x.shape)}.")
    if y.shape != x.shape[:1]:
        raise ValueError(f"{name}: y must be [{len(x)}] like x, got shape {list(y.shape)}.")
    if y.dtype.kind not in "iu":  # Time differences are integers to NumPy.
        raise ValueError(f"{name}: y must be integer labels, got {y.dtype}; convert them.")
    if y.min() < 0 or y.max() > np.iinfo(np.int32).max:
        raise ValueError(f"{name}: labels must count from 0, got {y.min()}..{y.max()}.")
    if x.dtype == np.uint8:
        x = x.astype(np.float32)
        x /= 255
    elif not np.issubdtype(x.dtype, np.floating):
        raise ValueError(f"{name}: x must be uint8 or floats in [0, 1], got {x.dtype}.")
    low, high = x.min(), x.max()
    if not (np.isfinite(low) and np.isfinite(high)):
        bad = np.flatnonzero(~np.isfinite(x).reshape(len(x), -1).all(axis=1))[0]
        raise ValueError(f"{name}: x[{bad}] holds a value that is not finite; remove or repair it.")
    if low < 0 or high > 1:
        raise ValueError(
            f"{name}: x spans [{low:g}, {high:g}], outside [0, 1]; rescale it, and put a "
            "normalisation inside the model."
        )
    return Dataset(x.astype(np.float32), y.astype(np.int32))
