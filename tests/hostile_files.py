"""Hostile and broken checkpoints, assembled opcode by opcode: what each is, and what must be said.

A case is ``Case(name, content, architecture, options, message)``. Run as a script on a folder, this
loads every case there and prints what happened, what it cost, and whether the process is unharmed.
"""

import io
import json
import os
import re
import struct
import sys
import time
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

MAGIC = 0x1950A86A20F9469CFC6C


class Case(NamedTuple):
    """One file and the fault that its refusal must name."""

    name: str
    content: bytes
    message: str
    arch: str = "mlp"
    options: tuple[tuple[str, Any], ...] = ()


def text(value):
    content = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(content)) + content


def number(value):
    if 0 <= value < 256:
        return b"K" + bytes([value])
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    content = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(content)]) + content


def tuple_of(*parts):
    return b"(" + b"".join(parts) + b"t"


def sizes(*values):
    return tuple_of(*map(number, values))


def name_of(module, name):
    return f"c{module}\n{name}\n".encode()


def call(function, *arguments):
    return function + tuple_of(*arguments) + b"R"


def ordered():
    return name_of("collections", "OrderedDict") + b")R"


def storage(count=4, kind="FloatStorage", key="0", view=b""):
    named = text("storage") + name_of("torch", kind) + text(key) + text("cpu") + number(count)
    return tuple_of(named, view) + b"Q"


def tensor(shape=(2, 2), strides=(2, 1), offset=0, held=None, rebuild="_rebuild_tensor_v2"):
    function = name_of("torch._utils", rebuild)
    held = storage() if held is None else held
    return call(
        function, held, number(offset), sizes(*shape), sizes(*strides), b"\x89", ordered()
    )  # fmt: skip


def dict_of(items, start=b"}"):
    return start + b"(" + b"".join(text(key) + value for key, value in items.items()) + b"u"


def pickled(body, protocol=2):
    return b"\x80" + bytes([protocol]) + body + b"."


def zipped(body, stored=None, deflated="", extra=()):
    file = io.BytesIO()

    def method(name):
        return zipfile.ZIP_DEFLATED if name == deflated else zipfile.ZIP_STORED

    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickled(body), method("pickle"))
        archive.writestr("archive/byteorder", "little")
        for key, content in ({"0": bytes(16)} if stored is None else stored).items():
            archive.writestr(f"archive/data/{key}", content, method(key))
        for name, content in extra:
            archive.writestr(name, content)
    return file.getvalue()


def legacy(body, stored=None, magic=MAGIC, protocol=1001, little=True):
    if stored is None:
        stored = {"0": bytes(16)} if text("storage") in body else {}
    system = dict_of({"protocol_version": number(1001), "little_endian": b"\x88"})
    system = system if little else dict_of({"little_endian": b"\x89"})
    keys = b"](" + b"".join(map(text, stored)) + b"e"
    head = b"".join(map(pickled, (number(magic), number(protocol), system)))
    head += pickled(body) + pickled(keys)
    return head + b"".join(struct.pack("<q", len(c) // 4) + c for c in stored.values())


def state_dict(shapes, values=None):
    """A body and its storages: float32 zeros of these shapes, or the values given."""
    items, stored = {}, {}
    for key, (name, shape) in enumerate(shapes.items()):
        value = np.zeros(shape, np.float32) if values is None else values[name]
        kind = {"f4": "Float", "f8": "Double", "i8": "Long", "f2": "Half"}[value.dtype.str[1:]]
        strides = tuple(step // value.itemsize for step in np.zeros(shape, value.dtype).strides)
        held = storage(value.size, kind + "Storage", str(key))
        items[name] = tensor(shape, strides, held=held)
        stored[str(key)] = value.tobytes()
    return dict_of(items, ordered()), stored


MLP = {"0.weight": (5, 4), "0.bias": (5,), "2.weight": (3, 5), "2.bias": (3,)}


def number_type(code="f4", state=None):
    made = call(name_of("numpy", "dtype"), text(code), b"\x89", b"\x88")
    if state is None:
        state = (number(3), text("<"), b"N", b"N", b"N", number(-1), number(-1), number(0))
    return made + tuple_of(*state) + b"b"


def built(target):
    return target + dict_of({"__class__": number(1)}) + b"b"


def scalar(kind=None, content=b"abcd"):
    packed = call(name_of("_codecs", "encode"), text(content.decode("latin-1")), text("latin1"))
    return call(
        name_of("numpy.core.multiarray", "scalar"), number_type() if kind is None else kind, packed
    )


def swapped(order, itemsize=-1):
    state = (number(3), text(order), b"N", b"N", b"N", number(itemsize), number(-1), number(0))
    return number_type(state=state)


def lists_of_lists(count, times):
    """Lists that hold their predecessor several times: few bytes, many paths."""
    first = b"(]q\x00"
    return (
        first
        + b"".join(
            b"]q" + bytes([i + 1]) + b"(" + (b"h" + bytes([i])) * times + b"e" for i in range(count)
        )
        + b"t"
    )


def bodies():
    """Pickles that are refused as they are read: name -> (body, message)."""
    float_type = name_of("torch", "FloatStorage")
    deep = b")" + b"\x85" * 100_000
    nested, bomb = lists_of_lists(80, 2), lists_of_lists(60, 100)
    return {
        "os.system": (call(name_of("posix", "system"), text("touch owned")), r"posix\.system"),
        "eval": (call(name_of("builtins", "eval"), text("1 + 1")), r"builtins\.eval"),
        "getattr": (name_of("builtins", "getattr"), r"builtins\.getattr"),
        "whole module": (
            name_of("torch.nn.modules.linear", "Linear") + b")\x81", "state_dict.. instead",
        ),
        "numpy reconstruct": (name_of("numpy.core.multiarray", "_reconstruct"), "_reconstruct"),
        "stack global": (text("os") + text("system") + b"\x93", r"os\.system"),
        "terminal codes": (name_of("a\x1b[2Jb", "c"), r"a\\x1b\[2Jb"),
        "instance": (b"(" + text("x") + b"iposix\nsystem\n", "opcode INST"),
        "object": (b"(" + name_of("collections", "OrderedDict") + b"o", "opcode OBJ"),
        "newobj": (name_of("collections", "OrderedDict") + b")\x81", "opcode NEWOBJ"),
        "extension": (b"\x82\x01", "opcode EXT1"),
        "buffer": (b"\x97", "opcode NEXT_BUFFER"),
        "text pid": (b"Pstorage\n", "opcode PERSID"),
        "build on a tensor": (built(tensor()), "set the state of Tensor"),
        "build on a storage": (built(storage()), "set the state of Storage"),
        "build on a storage type": (built(float_type), "set the state of Global"),
        "build on a list": (built(b"]"), "set the state of list"),
        "build on a dict": (built(b"}"), "set the state of dict"),
        "build by a tuple": (ordered() + b")b", "tuple the state of a dict"),
        "byte order": (scalar(swapped(">")), "byte order or size"),
        "itemsize": (scalar(swapped("<", 1)), "byte order or size"),
        "type of fields": (scalar(number_type("V4")), "NumPy dtype 'V4'"),
        "object number": (scalar(number_type("O8")), "NumPy dtype 'O8'"),
        "short number": (scalar(content=b"ab"), "f4 of 2 bytes"),
        "memo": (b"}r" + struct.pack("<I", 0x0FFFFFFF), "memo's place 268435455"),
        "empty memo": (b"h\x07", "empty place 7"),
        "empty stack": (b"0", "opcode POP"),
        "underflow": (b"a", "empty stack"),
        "no mark": (b"u", "misses a mark"),
        "left behind": (b"}}", "leaves values behind"),
        "only a mark": (b"(", "empty stack"),
        "key without value": (b"}(" + text("a") + b"u", "key without a value"),
        "tuple key": (b"})Ns", "dict key of type tuple"),
        "append to a tuple": (b")Na", "append to tuple"),
        "self-reference": (b"]q\x00h\x00a", "holds itself"),
        "dict in itself": (b"}q\x00" + text("a") + b"h\x00s", "holds itself"),
        "deep tuples": (deep, "nested deeper than 64"),
        "lists of lists twice": (nested, "nested deeper than 64"),
        "ten to the 120": (bomb, "got tuple"),
        "deep pid": (deep + b"Q", "no storage"),
        "pid of a string": (text("storage") + b"Q", "no storage"),
        "storage of a list": (
            tuple_of(text("storage"), b"]", text("0"), text("cpu"), number(4)) + b"Q", "type list",
        ),
        "storage of no size": (tensor(held=storage(-1)), "key or size"),
        "huge storage": (tensor(held=storage(1 << 40)), r"bytes for 1099511627776|cut short"),
        "missing storage": (tensor(held=storage(key="7")), "data/7|list of storages"),
        "storage twice": (
            dict_of({"a": tensor(), "b": tensor(held=storage(2, "DoubleStorage"))}),
            "described twice",
        ),
        "view past its storage": (
            tensor(held=storage(view=tuple_of(text("v"), number(2), number(3)))),
            "view that leaves",
        ),
        "view of a view": (
            tensor(held=storage(view=tuple_of(text("v"), storage(), number(3)))),
            "view that leaves",
        ),
        "tensor past its view": (
            tensor((3,), (1,), held=storage(view=tuple_of(text("v"), number(1), number(2)))),
            "reaches past",
        ),
        "tensor past its storage": (tensor((8,), (1,)), "reaches past"),
        "offset past its storage": (tensor((1,), (1,), offset=4), "reaches past"),
        "negative stride": (tensor((2,), (-1,), offset=3), "offset, size or strides"),
        "negative size": (tensor((-2, -2)), "offset, size or strides"),
        "tensor of nothing": (tensor(held=b"N"), "or no storage"),
        "one stride for two": (tensor((2, 2), (1,)), "size .2, 2. and strides .1."),
        "forty axes": (tensor((1,) * 40, (1,) * 40), "offset, size or strides"),
        "a terabyte of nothing": (tensor((1 << 50, 0, 1 << 50), (0, 0, 0)), "a tensor of size"),
        "one element a terabyte": (tensor((1 << 38,), (0,)), "tensors claim"),
        "call of a list": (b"]" + b")R", "would call list"),
        "call of a string": (text("os.system") + b")R", "would call str"),
        "call of a storage type": (float_type + b")R", r"would call torch\.FloatStorage"),
        "long string": (b"X\xff\xff\xff\x0f", "string of 268435455 bytes"),
        "longest string": (b"\x8d" + struct.pack("<Q", 1 << 62), "bytes|string"),
        "huge number": (b"\x8b\x00\x00\x04\x00" + b"\x7f" * (1 << 18), "bits"),
        "a line without end": (b"c" + b"a" * (1 << 21), "line of more than"),
        "no UTF-8": (b"X\x02\x00\x00\x00\xff\xfe", "decode|UTF-8|utf-8"),
        "old string no UTF-8": (b"U\x02\xff\xfe", "no UTF-8"),
        "unknown opcode": (b"\xff", "opcode"),
        "endless opcodes": (b"N" * 600_000, "more than 250000 opcodes"),
        "endless lists": (b"]" * 600_000, "more than 65536 containers"),
        "endless marks": (b"(" * 600_000, "more than 64 open marks"),
        "colliding keys": (
            b"}(" + b"".join(number(i * ((1 << 61) - 1)) + b"N" for i in range(9, 20_000)) + b"u",
            "dict key of type int",
        ),
        "a number": (number(3), "got int"),
        "nothing": (b"N", "got NoneType"),
        "a type by itself": (dict_of({"a": float_type}), "leaves a Global"),
        "no tensors": (dict_of({"epoch": number(3)}), "besides tensors"),
    }  # fmt: skip


def pickle_cases():
    cases = []
    for name, (body, message) in bodies().items():
        cases.append(Case(f"zip, {name}", zipped(body), message))
        cases.append(Case(f"legacy, {name}", legacy(body), message))
    return cases


def container_cases():
    """Broken archives and files of other kinds."""
    body, stored = state_dict(MLP)
    good = zipped(body, stored)
    flipped = bytearray(zipped(*state_dict(MLP, {n: np.ones(s, "f4") for n, s in MLP.items()})))
    flipped[flipped.index(np.ones(5, "f4").tobytes()) + 2] ^= 64
    many = io.BytesIO()
    with zipfile.ZipFile(many, "w") as archive:
        for i in range(50_000):
            archive.writestr(f"archive/data/{i:060}", b"")
    end = good.rindex(b"PK\x05\x06")
    claimed = good[: end + 12] + b"\xff\xff\xff\x7f" + good[end + 16 :]
    npz = io.BytesIO()
    np.savez(npz, x=np.zeros(3))
    bomb = zipped(body, {**stored, "0": bytes(200 << 20)}, "0")
    lfs = b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 5\n"
    tar = b"a.txt".ljust(257, b"\0") + b"ustar\x0000" + bytes(512)
    zipf = {"extra": [("other/data.pkl", pickled(body))]}
    return [
        Case("deflate bomb", bomb, "data/0 is compressed"),
        Case("deflated pickle", zipped(body, stored, "pickle"), "data.pkl is compressed"),
        Case("two pickles", zipped(body, stored, **zipf), "no data.pkl"),
        Case("short storage", zipped(body, {**stored, "0": bytes(8)}), "has 8 bytes for 20"),
        Case("a missing entry", zipped(body, {"0": stored["0"]}), "no archive/data/1"),
        Case("flipped bit", bytes(flipped), "CRC.*archive/data/"),
        Case("many entries", many.getvalue(), "zip directory claims"),
        Case("claimed directory", claimed, "zip directory"),
        Case("zip without a pickle", _bare(), "holds no data.pkl"),
        Case("npz", npz.getvalue(), "NumPy's .npz"),
        Case("npy", b"\x93NUMPY\x01\x00", "NumPy array"),
        Case("empty", b"", "the file is empty"),
        Case("one byte", b"P", "begins with"),
        Case("html", b"\n <!DOCTYPE html><html><title>Sign in</title>", "web page"),
        Case("git-lfs", lfs, "git-lfs pointer"),
        Case("tar", tar, "tar archive"),
        Case("gzip", b"\x1f\x8b\x08\x00", "gzip"),
        Case("hdf5", b"\x89HDF\r\n\x1a\n", "HDF5"),
        Case("json", b'{"state_dict": {}}', "JSON"),
        Case("wrong magic", legacy(body, stored, magic=5), "magic number"),
        Case("wrong protocol", legacy(body, stored, protocol=9), "protocol version"),
        Case("big-endian", legacy(body, stored, little=False), "big-endian"),
        Case("bare pickle", pickled(dict_of({"a": number(1)})), "magic number"),
        *safetensors_cases(),
    ]


def _bare():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("hello.txt", "hello")
    return file.getvalue()


def safe(header, data=b"", length=None):
    content = json.dumps(header).encode() if isinstance(header, dict) else header
    return struct.pack("<Q", len(content) if length is None else length) + content + data


def safetensors_cases():
    def one(**changes):
        return {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}

    return [
        Case("safetensors, long header", safe(one(), bytes(8), 1 << 40), "header claims"),
        Case("safetensors, short data", safe(one(), bytes(4)), "corrupt"),
        Case("safetensors, trailing data", safe(one(), bytes(64)), "corrupt"),
        Case("safetensors, unknown dtype", safe(one(dtype="F99"), bytes(8)), "corrupt"),
        Case("safetensors, shape", safe(one(shape=[1 << 62, 4]), bytes(8)), "corrupt"),
        Case("safetensors, offsets", safe(one(data_offsets=[8, 0]), bytes(8)), "corrupt"),
        Case("safetensors, nested", safe(b"{" + b'"a":{' * 9999), "corrupt"),
        Case("safetensors, list", safe(b"{[", bytes(8)), "corrupt"),
        Case(
            "safetensors, forty axes",
            safe(one(shape=[2] + [1] * 40), bytes(8)),
            "41 axes",
        ),
    ]


def truncations():
    body, stored = state_dict(MLP)
    header = {"0.weight": {"dtype": "F32", "shape": [5, 4], "data_offsets": [0, 80]}}
    kinds = {
        "zip": zipped(body, stored),
        "legacy": legacy(body, stored),
        "safetensors": safe(header, bytes(80)),
    }
    message = "truncated, corrupt or no PyTorch checkpoint"
    return [
        Case(f"{kind}, {part}/16", content[: len(content) * part // 16], message)
        for kind, content in kinds.items()
        for part in range(16)
    ]


def conversions():
    """Readable files that fit no model."""
    from wdjax.models import zoo
    from wdjax.models.pytorch import slots

    def values(family, **options):
        shapes = {n: slot.shape for n, slot in slots(zoo.build(family, options)).items()}
        return {name: np.full(shape, 0.1, np.float32) for name, shape in shapes.items()}

    def case(name, state, message, arch, **options):
        body, stored = state_dict({n: v.shape for n, v in state.items()}, state)
        return Case(name, zipped(body, stored), message, arch, tuple(options.items()))

    wide = values("wide_resnet", depth=10, width=1)
    net = values("wong_mnist")
    file = {"conv1": "0", "conv2": "2", "fc1": "5", "fc2": "7"}
    net = {f"{file[n.split('.')[0]]}.{n.split('.')[1]}": v for n, v in net.items()}
    swin = values("swin", width=8, depths=(1,) * 4, heads=(1,) * 4, classes=3)
    vit = values("vit", width=8, depth=1, heads=2, classes=3)
    far = np.zeros(3, np.float32)
    nan, ten = np.float32("nan"), np.float32(10)
    return [
        case("NaN", {**net, "7.bias": net["7.bias"] * nan}, "fc2.bias holds NaN", "wong_mnist"),
        case("inf", {**net, "0.bias": net["0.bias"] * np.inf}, "conv1.bias holds", "wong_mnist"),
        case(
            "negative variance",
            {**wide, "bn1.running_var": wide["bn1.running_var"] - ten},
            "bn1.running_var is a variance and holds -9.9",
            "wide_resnet",
        ),
        case("double", {**net, "5.bias": net["5.bias"].astype("f8")}, "cast=True", "wong_mnist"),
        case("half", {**net, "5.bias": net["5.bias"].astype("f2")}, "cast=True", "wong_mnist"),
        case("long", {**net, "5.bias": net["5.bias"].astype("i8")}, "int64, exp", "wong_mnist"),
        case("axis", {**net, "7.bias": net["7.bias"][:, None]}, "fc2.bias has shape", "wong_mnist"),
        case("scalar", {**wide, "fc.bias": far[0, ...]}, "fc.bias has shape", "wide_resnet"),
        case("swapped family", net, "unknown 0.weight", "wide_resnet"),
        case("swapped family back", wide, "unknown block1", "wong_mnist"),
        case("swin for vit", swin, "no vit|does not fit|features", "vit"),
        case("vit for swin", vit, "no swin|does not fit", "swin"),
        case("wide for mlp", wide, "matrices only", "mlp"),
        case("vit for convnext", vit, "no convnext|does not fit", "convnext"),
        case(
            "one index of 2000000000",
            {**wide, "block1.layer.2000000000.bn1.bias": far},
            r"unknown block1\.layer\.2000000000",
            "wide_resnet",
        ),
        case("index in a vit", {**vit, "blocks.2000000000.x": far}, "2000000000", "vit", heads=2),
        case("index in a swin", {**swin, "layers.0.blocks.2000000000.x": far}, "20000", "swin"),
        case("index of digits", {**wide, f"block1.layer.{'9' * 99}.x": far}, "999", "wide_resnet"),
        case("long name", {**net, "a" * 5000: far}, "no names of tensors", "wong_mnist"),
        case("odd name", {**net, "a\x1b[2J": far}, r"a\\x1b", "wong_mnist"),
        case("surrogate", {**net, "a\ud800": far}, r"a\\ud800", "wong_mnist"),
        case("two names", {**net, "conv1.bias": net["0.bias"]}, "in two ways", "wong_mnist"),
        case("no such option", net, "does not take.*depth", "wong_mnist", depth=3),
        case("no whole number", vit, "heads must be a whole number", "vit", heads=4.0),
        case("no heads", vit, "heads must be from 1", "vit", heads=0),
        case("no width", wide, "width must be from 1", "wide_resnet", width=0),
        case("depth of a billion", wide, "depth must be from 1", "wide_resnet", depth=10**9 + 6),
        case("no blocks", wide, "depth must be 6 n", "wide_resnet", depth=4),
        case("window", swin, "window", "swin", window=5),
    ]  # fmt: skip


def cases():
    """All of them."""
    return [*pickle_cases(), *container_cases(), *truncations(), *conversions()]


def _peak():
    status = Path("/proc/self/status").read_text()
    return {key: int(re.search(rf"{key}:\s+(\d+)", status)[1]) / 1024 for key in ("VmHWM", "VmRSS")}


def attempt(read, *arguments, **options):
    """What reading a file said and cost: seconds, and megabytes above what was there before."""
    Path("/proc/self/clear_refs").write_text("5")
    before, began = _peak()["VmRSS"], time.process_time()
    try:
        read(*arguments, **options)
        kind, said = "loaded", ""
    except Exception as error:
        kind, said = type(error).__name__, str(error)
    seconds = time.process_time() - began
    return {"kind": kind, "said": said, "seconds": seconds, "mb": _peak()["VmHWM"] - before}


def main(folder):
    import jax.numpy as jnp
    import ml_dtypes

    from wdjax.models import convert

    os.chdir(folder)
    found = {}
    for number_, case in enumerate(cases()):
        path = Path(f"{number_}.pt")
        path.write_bytes(case.content)
        files = set(Path().iterdir())
        outcome = attempt(convert.load, path, case.arch, **dict(case.options))
        found[case.name] = outcome | {"written": sorted(map(str, set(Path().iterdir()) - files))}
        path.unlink()
    there = np.array([1.5, -2.0], ml_dtypes.bfloat16)
    unharmed = np.asarray(jnp.asarray(there)).astype(np.float32).tolist() == [1.5, -2.0]
    print(json.dumps({"cases": found, "unharmed": unharmed}))


if __name__ == "__main__":
    main(sys.argv[1])
