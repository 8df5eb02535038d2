"""Data sets: what comes out, and what is refused at the door."""

import subprocess
import sys

import numpy as np
import pytest

from wdjax import data

pytestmark = pytest.mark.fast


def test_digits_are_balanced_disjoint_and_fixed():
    train, test = data.digits()
    assert train.x.dtype == test.x.dtype == np.float32
    assert train.y.dtype == test.y.dtype == np.int32
    assert train.x.shape == (1447, 8, 8, 1)
    assert (test.x.min(), test.x.max()) == (0, 1)
    assert np.bincount(test.y).tolist() == [35] * 10
    assert np.bincount(test.take(50).y).tolist() == [5] * 10
    counts = np.bincount(train.y)
    assert counts.max() - counts.min() <= 10
    seen = {image.tobytes() for image in train.x}
    assert not any(image.tobytes() in seen for image in test.x)
    again = data.digits()
    assert np.array_equal(again.test.x, test.x)


def test_digits_match_their_labels():
    """Nearest class mean, which needs every label at its image."""
    train, test = data.digits()
    means = np.stack([train.x[train.y == label].mean(axis=0) for label in range(10)])
    nearest = np.sum((test.x[:, None] - means) ** 2, axis=(2, 3, 4)).argmin(axis=1)
    assert np.mean(nearest == test.y) > 0.85


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64])
def test_npz_round_trip(tmp_path, dtype):
    images = np.arange(24, dtype=np.uint8).reshape(2, 3, 4, 1) * 10
    x = images if dtype == np.uint8 else (images / 255).astype(dtype)
    np.savez(tmp_path / "d.npz", x=x, y=np.array([4, 0], np.int64), extra=np.ones(3))
    found = data.load_npz(tmp_path / "d.npz")
    assert found.x.dtype == np.float32
    assert found.y.dtype == np.int32
    np.testing.assert_allclose(found.x, images / 255, rtol=1e-6)
    assert found.y.tolist() == [4, 0]


X, Y = np.full((3, 2), 0.5), np.array([0, 1, 2])


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"x": X}, "lacks y; it has x"),
        ({"images": X, "labels": Y}, "lacks x and y"),
        ({"x": X, "y": Y[:2]}, "y must be \\[3\\]"),
        ({"x": X[:0], "y": Y[:0]}, "n >= 1"),
        ({"x": X[:, 0], "y": Y}, "\\*shape"),
        ({"x": X, "y": Y / 2}, "integer labels"),
        ({"x": X, "y": Y - 1}, "from 0"),
        ({"x": X.astype(int), "y": Y}, "uint8 or floats"),
        ({"x": X * 255, "y": Y}, "rescale"),
        ({"x": np.where(Y[:, None] == 1, np.nan, X), "y": Y}, "x\\[1\\]"),
        ({"x": np.where(Y[:, None] == 2, np.inf, X), "y": Y}, "x\\[2\\]"),
        ({"x": np.array([X, None], object), "y": Y[:2]}, "plain arrays"),
    ],
)
def test_bad_archives_are_refused(tmp_path, entries, message):
    np.savez(tmp_path / "bad.npz", **entries)
    with pytest.raises(ValueError, match=message):
        data.load_npz(tmp_path / "bad.npz")


def test_what_is_no_archive_is_refused(tmp_path):
    path = tmp_path / "d.npz"
    np.savez(path, x=X, y=Y)
    whole = path.read_bytes()
    np.save(tmp_path / "single.npy", X)
    single = (tmp_path / "single.npy").read_bytes()
    for content in (b"", b"hello", whole[: len(whole) // 2], single, b"\x80\x04N."):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="cannot read"):
            data.load_npz(path)
    with pytest.raises(ValueError, match="cannot read"):
        data.load_npz(tmp_path / "absent.npz")


def test_real_archives_load(shared):
    found = data.load_npz(shared / "data" / "mnist_test_0_500.npz")
    assert found.x.shape == (500, 28, 28, 1)
    assert found.x.max() == 1


def test_importing_the_package_imports_nothing_heavy():
    """Only what jax, flax and optax bring along anyhow."""
    program = """
import sys
import flax.nnx, optax
before = set(sys.modules)
import wdjax, wdjax.convert, wdjax.data
heavy = "scipy sklearn matplotlib orbax torch ott safetensors tqdm".split()
print(*sorted({name.split(".")[0] for name in set(sys.modules) - before} & {*heavy}))
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == []
