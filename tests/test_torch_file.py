"""The torch-free reader against ``torch.load``, and files that must be refused."""

import argparse
import collections
import os
import pickle

import hostile_files
import numpy as np
import pytest

from wdjax.files import torch_file

torch = pytest.importorskip("torch", reason="the reader is compared with torch.load")


def equal(ours, theirs):
    if isinstance(theirs, torch.Tensor):
        theirs = theirs.detach().resolve_conj().resolve_neg()
        bits = theirs.contiguous().reshape(-1).view(torch.uint8).numpy()
        assert tuple(ours.shape) == tuple(theirs.shape)
        np.testing.assert_array_equal(np.ascontiguousarray(ours).reshape(-1).view(np.uint8), bits)
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        for key, value in theirs.items():
            equal(ours[key], value)
    elif isinstance(theirs, (list, tuple)):
        for one, other in zip(ours, theirs, strict=True):
            equal(one, other)
    else:
        assert ours == theirs


def test_every_shared_file_bit_for_bit(shared):
    files = [*shared.glob("data/weights/*"), *shared.glob("fixtures/zoo/*/*.pt")]
    assert len(files) >= 15
    for path in files:
        equal(torch_file.read(path), torch.load(path, map_location="cpu", weights_only=True))


def odd_tensors():
    base = torch.arange(24, dtype=torch.float32)
    return collections.OrderedDict(
        strided=base.reshape(4, 6).T,
        offset=base[5:11],
        shared=base[::2],
        parameter=torch.nn.Parameter(torch.ones(2, 3)),
        bfloat16=torch.linspace(-3, 3, 7).to(torch.bfloat16),
        half=torch.linspace(-3, 3, 7).half(),
        double=torch.ones(2, dtype=torch.float64),
        long=torch.arange(3),
        bool=torch.tensor([True, False]),
        scalar=torch.tensor(3.5),
        empty=torch.zeros(0, 3),
        nested={"list": [torch.ones(1), 3, None, "text"], "size": torch.Size([1, 2])},
        number=np.float64(0.25),
    )


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("zipped", [True, False])
def test_odd_tensors(tmp_path, zipped, protocol):
    path, saved = tmp_path / "odd.pt", odd_tensors()
    torch.save(
        saved, path, _use_new_zipfile_serialization=zipped, pickle_protocol=protocol
    )  # fmt: skip
    saved["nested"]["size"] = (1, 2)
    equal(torch_file.read(path), saved)


def kinds_of_tensors():
    """Of every dtype and layout that ``torch.save`` takes, with each bit that a view may have."""
    dtypes = [kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)]
    base = torch.tensor([[1, 4, 3, 250], [5, 6, 120, 8], [2, 9, 100, 77]])
    for dtype in sorted(set(dtypes), key=str):
        try:
            plain = base.to(dtype) * (1 + 2j) if dtype.is_complex else base.to(dtype)
        except (NotImplementedError, RuntimeError, TypeError):
            continue  # Of less than a byte, or quantised.
        views = {"plain": plain, "turned": plain.T, "part": plain[1:, ::2], "wide": plain[:1]}
        views["wide"] = views["wide"].expand(5, 4)
        for name, view in views.items():
            yield f"{dtype} {name}", view
            if dtype != torch.bool:
                yield f"{dtype} {name} negative", torch._neg_view(view)
                yield f"{dtype} {name} parameter", torch.nn.Parameter(torch._neg_view(view), False)
            if dtype.is_complex:
                yield f"{dtype} {name} conjugate", view.conj()
                yield f"{dtype} {name} both", torch._neg_view(view.conj())
                if dtype != torch.complex32:
                    yield f"{dtype} {name} imaginary", view.conj().imag
    floats = base.float()
    noted, attribute = floats.clone(), torch.nn.Parameter(floats.clone())
    noted.note = attribute.note = "kept"
    yield from {
        "sparse": floats.to_sparse(),
        "rows": floats.to_sparse_csr(),
        "without data": floats.to("meta"),
        "quantised": torch.quantize_per_tensor(floats, 0.1, 3, torch.quint8),
        "nested": torch.nested.nested_tensor([floats, floats[:2]]),
        "buffer": torch.nn.Buffer(floats),
        "noted": noted,
        "noted parameter": attribute,
        "three of one": [floats, torch._neg_view(floats), floats[1:]],
    }.items()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("zipped", [True, False])
def test_every_kind_of_tensor_is_equal_or_refused(tmp_path, zipped):
    path, read, refused = tmp_path / "kind.pt", [], []
    for name, value in kinds_of_tensors():
        torch.save({"w": value}, path, _use_new_zipfile_serialization=zipped)
        try:
            found = torch_file.read(path)
        except ValueError as error:
            refused.append(str(error))
            continue
        equal(found, torch.load(path, weights_only=True))
        read.append(name)
    assert all("refused: the pickle asks for the global torch._" in text for text in refused)
    for kind in ("float32", "float64", "float16", "bfloat16", "int64", "uint8", "complex64"):
        assert f"torch.{kind} wide negative" in read
    assert {"torch.complex64 turned both", "torch.complex128 part imaginary"} <= {*read}
    assert {"three of one", "noted parameter"} <= {*read}


def forged():
    """Calls that ``torch.save`` never writes: name -> (body, elements)."""
    true, none = b"\x88", b"N"
    floats = np.array([1.5, -2, 0, np.inf], np.float32)
    whole = np.array([-128, 2, 3, 0], np.int8)
    kinds = {"Float": floats, "Char": whole, "Byte": whole.view("u1"), "Bool": whole == 2}
    kinds |= {"ComplexFloat": floats[1] * 1j + np.arange(4, dtype=np.float32)}
    bits = {"neg": true, "conj": true, "odd": true, "no": b"\x89", "one": b"K\x01"}
    for kind, values in kinds.items():
        held = hostile_files.storage(kind=f"{kind}Storage")
        first = held, b"K\x00", hostile_files.sizes(2, 2), hostile_files.sizes(2, 1)
        rest = b"\x89", hostile_files.ordered()
        v2 = hostile_files.name_of("torch._utils", "_rebuild_tensor_v2")
        for name, bit in bits.items():
            given = hostile_files.dict_of({name if bit == true else "neg": bit})
            yield f"{kind} {name}", hostile_files.call(v2, *first, *rest, given), values
        for name, given in {
            "none": none,
            "empty": b"}",
            "list": b"]",
            "word": b"X\0\0\0\0",
        }.items():
            yield f"{kind} {name}", hostile_files.call(v2, *first, *rest, given), values
        yield f"{kind} long", hostile_files.call(v2, *first, *rest, none, none), values
        yield f"{kind} short", hostile_files.call(v2, *first), values
        yield f"{kind} seven", hostile_files.call(v2, *first, b"K\x07", rest[1]), values
        v1 = hostile_files.name_of("torch._utils", "_rebuild_tensor")
        yield f"{kind} old", hostile_files.call(v1, *first), values
        yield f"{kind} old and long", hostile_files.call(v1, *first, *rest), values
    inner, one = hostile_files.tensor(), hostile_files.tensor((1,), (1,))
    for name in ("data", "real", "imag", "note"):
        state = hostile_files.dict_of({name: one})
        for kind, given in {"dict": state, "slots": hostile_files.tuple_of(none, state)}.items():
            function = hostile_files.name_of("torch._utils", "_rebuild_parameter_with_state")
            body = hostile_files.call(function, inner, b"\x89", hostile_files.ordered(), given)
            yield f"parameter {name} {kind}", body, floats
    function = hostile_files.name_of("torch._utils", "_rebuild_parameter")
    yield "short parameter", hostile_files.call(function, inner), floats
    yield "long parameter", hostile_files.call(function, inner, b"\x89", b"}", none, none), floats


def test_forged_arguments_are_read_as_by_torch_or_refused(tmp_path):
    path, read = tmp_path / "forged.pt", []
    for name, body, values in forged():
        content = hostile_files.dict_of({"w": body})
        version = [("archive/version", "3\n")]  # Which PyTorch asks for.
        path.write_bytes(hostile_files.zipped(content, {"0": values.tobytes()}, extra=version))
        try:
            found = torch_file.read(path)
        except ValueError:
            continue
        equal(found, torch.load(path, weights_only=True))
        read.append(name)
    assert {"Float neg", "Byte neg", "ComplexFloat conj", "Bool none", "Char old"} <= {*read}


def test_a_negative_tensor_that_is_named_often_is_one_array(tmp_path):
    path = tmp_path / "often.pt"
    negative = torch._neg_view(torch.ones(1000))
    torch.save([negative] * 1000, path)
    assert len({id(array) for array in torch_file.read(path)}) == 1


@pytest.mark.parametrize("zipped", [True, False])
def test_truncated_and_corrupt(tmp_path, zipped):
    path = tmp_path / "cut.pt"
    torch.save(odd_tensors(), path, _use_new_zipfile_serialization=zipped)
    content = path.read_bytes()
    for length in (0, 3, 40, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match="truncated, corrupt or no PyTorch checkpoint"):
            torch_file.read(path)
    path.write_bytes(b"\x89PNG" + content)
    with pytest.raises(ValueError, match="no PyTorch checkpoint"):
        torch_file.read(path)


def test_a_flipped_bit_in_a_tensor_is_found(tmp_path):
    path = tmp_path / "flip.pt"
    torch.save({"w": torch.full((100,), 1.5)}, path)
    content = bytearray(path.read_bytes())
    content[content.index(np.float32(1.5).tobytes() * 50) + 80] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="CRC"):
        torch_file.read(path)


class Hostile:
    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Hostile(os.system, "touch owned"), "posix.system"),
        (Hostile(eval, "1 + 1"), "__builtin__.eval"),
        (argparse.Namespace(epochs=3), "argparse.Namespace"),
        (torch.nn.Linear(2, 2), "torch.nn.modules.linear.Linear"),
    ],
)
def test_foreign_globals_are_refused_by_name(tmp_path, monkeypatch, zipped, value, name):
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(1), "x": value}, "bad.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(ValueError, match=rf"refused: the pickle asks for the global {name}"):
        torch_file.read("bad.pt")
    assert not (tmp_path / "owned").exists()


def test_a_bare_pickle_is_no_checkpoint(tmp_path):
    path = tmp_path / "bare.pt"
    path.write_bytes(pickle.dumps(Hostile(os.system, "touch owned")))
    with pytest.raises(ValueError, match=r"refused: .* posix\.system"):
        torch_file.read(path)


def test_a_tensor_that_reaches_past_its_storage(tmp_path):
    path = tmp_path / "past.pt"
    torch.save({"w": torch.ones(4)}, path, _use_new_zipfile_serialization=False)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"K\x04\x85", b"K\x08\x85", 1))
    with pytest.raises(ValueError, match="reaches past"):
        torch_file.read(path)
