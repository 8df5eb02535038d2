"""Data sets: what comes out, and what is refused at the door."""

import io
import os
import re
import struct
import subprocess
import sys
import types
import warnings
import zipfile

import hostile_files
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


def test_bytes_of_0_and_1_only_are_told():
    with pytest.warns(UserWarning, match="hold 0 and 1 only"):
        data.as_dataset(np.eye(3, dtype=np.uint8), np.arange(3))
    with warnings.catch_warnings(action="error"):
        data.as_dataset(2 * np.eye(3, dtype=np.uint8), np.arange(3))
        data.as_dataset(np.zeros((3, 3), np.uint8), np.arange(3))


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
        ({"x": X, "y": Y.astype("m8[s]")}, "timedelta64"),
        ({"x": X, "y": Y.astype("M8[s]")}, "datetime64"),
        ({"x": X, "y": Y > 0}, "bool"),
        ({"x": X, "y": Y.astype(str)}, "<U21"),
        ({"x": X.astype("c8"), "y": Y}, "complex64"),
        ({"x": X.astype("f4,f4"), "y": Y}, "no plain numbers"),
        ({"x": X[:, :0], "y": Y}, "n >= 1"),
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


def npy(header, content=b"", version=(1, 0)):
    """A file of ``np.save`` with this header."""
    text = header if isinstance(header, bytes) else header.encode()
    length = struct.pack("<H" if version == (1, 0) else "<I", len(text))
    return b"\x93NUMPY" + bytes(version) + length + text + content


def header(descr="'<f4'", shape="(3, 2)"):
    return f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n"


def archived(x, how=zipfile.ZIP_STORED, also=()):
    labels, file = io.BytesIO(), io.BytesIO()
    np.save(labels, Y)
    with zipfile.ZipFile(file, "w", how) as archive:
        archive.writestr("x.npy", x)
        archive.writestr("y.npy", labels.getvalue())
        for name in also:
            archive.writestr(name, b"")
    return file.getvalue()


def changed(content, place, form, value):
    """An archive in whose directory one field of ``x.npy`` is another."""
    start = content.index(b"PK\x01\x02") + place
    return content[:start] + struct.pack(form, value) + content[start + struct.calcsize(form) :]


FLOATS = npy(header(), X.astype("<f4").tobytes())
GOOD = archived(FLOATS)
HEADERS = {
    "huge": header(shape="(1000000000000, 3)"),
    "of 4000 digits": header(shape="(" + "9" * 4000 + ", 3)"),
    "negative": header(shape="(-3, -2)"),
    "of booleans": header(shape="(True, 6)"),
    "many axes": header(shape="(" + "1, " * 40 + "3, 2)"),
    "no tuple": header(shape="6"),
    "floats": header(shape="(3.0, 2.0)"),
    "long numbers": header(shape="(3L, 1000000L)"),
    "not closed": header(shape="(3, 2"),
    "no dict": "[1, 2]\n",
    "a call": "__import__('os').system('touch owned')\n",
    "signs": "-" * 4000 + "1\n",
    "brackets": "(" * 4000 + "\n",
    "a string without end": "'" + "a" * 3000 + "\n",
    "empty": "",
    "no text": b"\xff\xfe" * 20,
    "a null": "\0" * 40,
    "fields of a billion": header("[('a', '<f4', (1000000000,))]"),
    "words": header("'<U1000000000'"),
    "an object": header("'|O'"),
    "no type": header("'spam'"),
    "a number as type": header("7"),
    "deep type": header("[('a', " * 50 + "'<f4'" + ")]" * 50),
    "time": header("'<m8[s]'"),
    "long": header() + " " * 60_000,
}


def hostile():
    """Archives that no one needs: name -> (content, message)."""
    content = X.astype("<f4").tobytes()
    for name, text in HEADERS.items():
        yield f"header {name}", archived(npy(text, content)), "x.npy"
    yield "header cut", archived(npy(header())[:20]), "x.npy has a header"
    yield "long header cut", archived(npy("", version=(2, 0))[:8] + b"\xff\xff\xff\x7f"), "header"
    yield "version 9", archived(npy(header(), content, (9, 0))), "x.npy"
    yield "no numpy", archived(b"hello"), "x.npy has a header that is none"
    yield "too few", archived(npy(header(), content[:-1])), "x.npy claims float32.3, 2. and holds"
    yield "too many", archived(npy(header(), content + b"0")), "x.npy claims"
    zeros = npy(header("'|u1'", "(3, 1000000000)"))
    lies = zeros + bytes(120 << 20)
    yield "bomb", archived(lies, zipfile.ZIP_DEFLATED), "claims 1258.* bytes, stored as"
    small = archived(npy(header("'|u1'", "(3, 20971520)"), bytes(60 << 20)), zipfile.ZIP_DEFLATED)
    yield "bomb of less", changed(small, 24, "<L", 1000), "x.npy|CRC"
    yield "bomb that is read", changed(small, 16, "<L", 7), "CRC-32"
    for name, how in {"bzip2": zipfile.ZIP_BZIP2, "lzma": zipfile.ZIP_LZMA}.items():
        yield name, archived(FLOATS, how), "compressed or encrypted in a way"
    for name, place, form, value in [
        ("encrypted", 8, "<H", 1), ("method", 10, "<H", 99), ("more", 24, "<L", 1 << 31),
        ("stored", 20, "<L", 1 << 31), ("checksum", 16, "<L", 5), ("offset", 42, "<L", 1 << 30),
        ("patched", 8, "<H", 1 << 5), ("strongly encrypted", 8, "<H", 1 << 6),
        ("version", 6, "<H", 99), ("name", 28, "<H", 60_000), ("extra", 30, "<H", 60_000),
    ]:  # fmt: skip
        for how in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            yield f"{name} {how}", changed(archived(FLOATS, how), place, form, value), ""
    yield "twice", archived(FLOATS, also=["x.npy"]), "two entries"
    names = [f"n{i:0100}" for i in range(50_000)]
    yield "many", archived(FLOATS, also=names), "zip directory claims"
    escape = archived(FLOATS, also=["a\x1b[2J", "b" * 60_000]).replace(b"x.npy", b"z.npy")
    yield "names", escape, r"it lacks x; it has z, y, a\\x1b\[2J, b+\.\.\."
    for part in range(16):
        yield f"cut {part}", GOOD[: len(GOOD) * part // 16], ""


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_hostile_archives_are_refused_soon(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path, wrong = tmp_path / "d.npz", {}
    path.write_bytes(GOOD)
    assert data.load_npz(path).y.tolist() == [0, 1, 2]
    for name, content, message in hostile():
        path.write_bytes(content)
        found = hostile_files.attempt(data.load_npz, path)
        named = re.search(message, found["said"]) and len(found["said"]) < 500
        cheap = found["seconds"] < 2 and found["mb"] < 300
        if found["kind"] != "ValueError" or not (named and found["said"].isprintable() and cheap):
            wrong[name] = found
    assert wrong == {}
    assert [file.name for file in tmp_path.iterdir()] == ["d.npz"]


def test_what_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(ValueError, match="it is no file"):
            data.load_npz(path)


def test_more_than_there_is_memory_for(tmp_path, monkeypatch):
    np.savez(tmp_path / "d.npz", x=X, y=Y)

    def none(*arguments):
        raise MemoryError

    monkeypatch.setattr(data, "as_dataset", none)
    with pytest.raises(ValueError, match="more than there is memory for"):
        data.load_npz(tmp_path / "d.npz")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("dtype", ["u1", "<f2", ">f4", "<f8", "f16"])
def test_archives_are_read_as_by_numpy(tmp_path, save, dtype):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 2, (5, 3, 4, 2)).astype(dtype) * (255 if dtype == "u1" else 1)
    for turned in (x, np.asfortranarray(x), x[:, ::2].T[:, ::-1].T):
        for y in (np.arange(5, dtype=">i8"), np.arange(10, dtype=np.uint8)[::2]):
            save(tmp_path / "d.npz", x=turned, y=y)
            found = data.load_npz(tmp_path / "d.npz")
            np.testing.assert_array_equal(found.x, (turned != 0).astype("f4"))
            assert found.y.tolist() == y.tolist()
            found.x[0], found.y[0] = 0, 0


def test_data_that_compress_well_load(tmp_path):
    x = np.zeros((3000, 28, 28), np.float64)
    x[:, 3:9, 4:20] = 1
    np.savez_compressed(tmp_path / "d.npz", x=x[:2000], y=np.zeros(2000, int))
    assert data.load_npz(tmp_path / "d.npz").x.shape == (2000, 28, 28)


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
import wdjax, wdjax.models.convert, wdjax.data
heavy = "scipy sklearn matplotlib orbax torch ott safetensors tqdm".split()
print(*sorted({name.split(".")[0] for name in set(sys.modules) - before} & {*heavy}))
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == []


def folder_of(path, x, y):
    path.mkdir(exist_ok=True)
    np.save(path / "x.npy", x)
    np.save(path / "y.npy", y)
    return path


def archived_by(save):
    def write(path, x, y):
        save(path.with_suffix(".npz"), x=x, y=y)
        return path.with_suffix(".npz")

    return write


def table_of(path, x, y):
    datasets = pytest.importorskip("datasets", reason="Hugging Face's package is not installed")
    kinds = {"image": datasets.Image(), "label": datasets.ClassLabel(num_classes=10)}
    columns = {"image": [*x[..., 0]], "label": y}
    table = datasets.Dataset.from_dict(columns, datasets.Features(kinds))
    table.save_to_disk(str(path))
    return path


KINDS = [folder_of, archived_by(np.savez), archived_by(np.savez_compressed), table_of]


@pytest.mark.parametrize("write", KINDS, ids=["folder", "mapped", "deflated", "table"])
def test_rows_that_stay_on_the_disk_are_those_of_the_whole(write, tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (29, 3, 5, 1), np.uint8), np.arange(29) % 10
    path = write(tmp_path / "d", x, y)
    images, labels = data.opened(path)
    whole = x.astype(np.float32) / 255
    assert (len(images), images.shape, images.ndim, images.dtype) == (29, x.shape, 4, np.float32)
    np.testing.assert_array_equal(labels, y)
    slices = slice(3, 9), slice(None), slice(-1, None), slice(None, None, -1), slice(9, 3)
    wanted = [7], [8, 2, 8], [4, 3, 2, 1, 0], [2, 2, 0], [-1, -29], [False] * 28 + [True]
    for rows in (*slices, *map(np.array, wanted), rng.permutation(29), np.array([], int)):
        assert type(images[rows]) is np.ndarray
        np.testing.assert_array_equal(images[rows], whole[rows])
    np.testing.assert_array_equal(np.asarray(images), whole)
    assert len(data.opened(path, 4)[0]) == len(data.opened(path, 4)[1]) == 4
    for n in (None, 4, 99):
        np.testing.assert_array_equal(data.load(path, n).x, whole[:n])
        np.testing.assert_array_equal(data.load(path, n).y, y[:n])


@pytest.mark.parametrize("write", KINDS[:3], ids=["folder", "mapped", "deflated"])
def test_rows_are_refused_when_they_are_read(write, tmp_path):
    for bad, message in ((np.nan, r"x\[5\] holds a value that is not finite"), (7.0, "rescale")):
        x = np.full((9, 2), 0.5, np.float32)
        x[5, 1] = bad
        images, _ = data.opened(write(tmp_path / "d", x, np.zeros(9, int)))
        assert images[:5].shape == (5, 2)
        with pytest.raises(ValueError, match=message):
            images[5:6]
        with pytest.raises(ValueError, match=message):
            np.asarray(images)
    x = np.full((9, 2), 0.5)
    for y, message in ((np.full(9, -1), "from 0"), (np.zeros(8, int), "like x"), (x, "like x")):
        with pytest.raises(ValueError, match=message):
            data.opened(write(tmp_path / "d", x, y))
    for x in (np.full(9, 0.5), np.full((0, 2), 0.5), np.array(0.5), np.full((9, 2), 1)):
        with pytest.raises(ValueError, match=r"n >= 1|uint8 or floats"):
            data.opened(write(tmp_path / "d", x, np.zeros(9, int)))


def test_rows_of_another_shape_than_the_first_are_refused():
    """As of a table whose images have two sizes: each part alone would be a batch."""
    rows = [np.zeros((4, 4, 3), np.uint8)] * 2 + [np.zeros((5, 5, 3), np.uint8)] * 2
    x = data.Unread(rows, "mixed")
    assert x[:2].shape == (2, 4, 4, 3)
    with pytest.raises(ValueError, match=r"mixed: x\[2:4\] have the shape \[5, 5, 3\], x\[0\] has"):
        x[2:]


def test_a_damaged_archive_is_told_when_its_rows_are_read(tmp_path):
    rng = np.random.default_rng(0)
    np.savez_compressed(tmp_path / "d.npz", x=rng.uniform(size=(40, 9)), y=np.zeros(40, int))
    content = (tmp_path / "d.npz").read_bytes()
    refused = 0
    for place in range(200, len(content) - 1200, 250):
        changed = bytearray(content)
        changed[place] ^= 255
        (tmp_path / "d.npz").write_bytes(changed)
        try:
            data.load(tmp_path / "d.npz", 40)
        except ValueError as error:
            refused += "cannot read" in str(error)
    assert refused


@pytest.mark.parametrize("error", [KeyError("x"), TypeError("list"), AttributeError("items")])
def test_a_table_whose_description_is_damaged_is_refused(error, tmp_path, monkeypatch):
    def load_from_disk(path):
        raise error

    (tmp_path / "state.json").write_text("{}")
    fake = types.SimpleNamespace(load_from_disk=load_from_disk)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    with pytest.raises(ValueError, match=f"cannot read .*{type(error).__name__}"):
        data.opened(tmp_path)


def test_folders_that_are_no_data_are_refused(tmp_path):
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ValueError, match="cannot read"):
            data.opened(path)
    folder = folder_of(tmp_path / "d", X, Y)
    whole = (folder / "x.npy").read_bytes()
    bad = {name: npy(text, X.tobytes()) for name, text in HEADERS.items()}
    for content in (b"", whole[:50], whole[:-1], whole + b"0", *bad.values()):
        (folder / "x.npy").write_bytes(content)
        with pytest.raises(ValueError, match=r"cannot read .*x\.npy"):
            data.opened(folder)


def test_compressed_rows_in_another_order_are_refused(tmp_path):
    np.savez_compressed(tmp_path / "d.npz", x=np.asfortranarray(X), y=Y)
    with pytest.raises(ValueError, match="ascontiguousarray"):
        data.opened(tmp_path / "d.npz")
    assert data.load(tmp_path / "d.npz").x.shape == X.shape


def test_reading_rows_takes_no_memory_for_the_others(tmp_path):
    """Of 2 GB, which lie in no block of the disk, twenty rows."""
    shape = (1 << 29, 1)
    np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.float32, shape)
    np.save(tmp_path / "y.npy", np.zeros(4, np.uint8))
    x = data.Unread(np.load(tmp_path / "x.npy", mmap_mode="r"))
    found = hostile_files.attempt(
        lambda: [x[start : start + 20] for start in range(0, 1 << 29, 1 << 25)]
    )
    assert found["kind"] == "loaded"
    assert found["mb"] < 20


def test_values_just_outside_are_shown_to_be_so():
    x = np.array([[0.0, np.nextafter(np.float32(1), np.float32(2))]], np.float32)
    with pytest.raises(ValueError, match=r"spans \[0, 1.00000011\d*\], outside"):
        data.as_dataset(x, np.array([0]))
