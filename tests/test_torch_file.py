"""The torch-free reader against ``torch.load``, and files that must be refused."""

import argparse
import collections
import os
import pickle

import numpy as np
import pytest

from wdjax import torch_file

torch = pytest.importorskip("torch", reason="the reader is compared with torch.load")


def equal(ours, theirs):
    if isinstance(theirs, torch.Tensor):
        bits = theirs.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
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
