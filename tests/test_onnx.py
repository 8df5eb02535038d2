"""ONNX files against onnxruntime: whole nets, single operators, and what is refused."""

import csv

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wdjax import convert
from wdjax.checks import independence

onnx = pytest.importorskip("onnx", reason="ONNX files need the onnx package")
onnxruntime = pytest.importorskip("onnxruntime", reason="the reference is onnxruntime")


def gap(ours, theirs):
    """The largest difference, relative to the largest output."""
    return np.max(np.abs(np.asarray(ours) - theirs)) / np.max(np.abs(theirs))


def runtime(path, samples):
    """Outputs of onnxruntime, one sample after another: ``[n, ...]`` in the file's layout."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return np.concatenate([session.run(None, {name: sample[None]})[0] for sample in samples])


def competition(shared):
    """The files of the verification competition."""
    folder = shared / "data" / "vnn"
    with (folder / "instances.csv").open() as file:
        rows = list(csv.DictReader(file))
    return sorted({folder / row["benchmark"] / row["onnx"] for row in rows})


def test_nets_of_the_competition(shared):
    """All of them give what onnxruntime gives, to 1e-5 on 100 inputs, in both layouts."""
    found = competition(shared)
    assert len(found) == 35
    rng = np.random.default_rng(0)
    for path in found:
        for layout in ("NCHW", "NHWC"):
            converted = convert.load_onnx(path, layout=layout)
            shape = converted.report.file_shape[1:]
            x = rng.uniform(size=(100, *shape)).astype(np.float32)
            ours = x.transpose(0, 2, 3, 1) if layout == "NHWC" and x.ndim == 4 else x
            assert ours.shape[1:] == converted.input_shape
            assert gap(jax.jit(converted.model)(ours), runtime(path, x)) <= 1e-5, path
            proved = independence.proof(converted.model, ours.shape[1:], jnp.dtype(jnp.float32))
            assert proved.alone, path
            assert proved.alike, path
            assert converted.report.parity <= 1e-5
