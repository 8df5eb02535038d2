"""Models of ONNX files and of PyTorch modules: their graphs, run by our table of operators."""

import collections
import contextlib
import functools
import io
import logging
import math
import tempfile
import warnings
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from wdjax import distinct
from wdjax.checks import independence
from wdjax.core import Model
from wdjax.files import onnx_file
from wdjax.files.onnx_file import OnnxGraph, OnnxValue
from wdjax.files.state_pickle import shown
from wdjax.models.graphs.execute import GraphFunction, Parts, needed, prepared
from wdjax.models.graphs.laid import MAX_SIZE, channels_last
from wdjax.models.opaque import refuse_training
from wdjax.models.pytorch import Converted

TOLERANCE = 1e-4
"""Largest relative difference between our logits and the reference's."""
_TRIED = 3
"""Samples by which a model is compared with its reference."""
_LAYOUTS = ("NHWC", "NCHW")


class GraphReport(NamedTuple):
    """What was read from a graph; ``print`` it."""

    source: str
    operators: dict[str, int]
    """How often each operator of the file is used."""
    parameters: int
    """Numbers in the leaves of the model."""
    dtypes: tuple[str, ...]
    """Dtypes of the file's tensors of floats; leaves are float32."""
    input_name: str
    input_shape: tuple[int, ...]
    """One sample's shape for the model, without the number of samples."""
    file_shape: tuple[int | str, ...]
    """The input's shape in the file."""
    output_name: str
    output_shape: tuple[int, ...]
    """One sample's output."""
    opset: int
    folded: int
    """How many nodes were computed when the file was read."""
    parity: float | None
    """Largest difference from the reference's outputs over the largest output; None if there was
    no reference."""
    notes: tuple[str, ...] = ()

    def __str__(self):
        counts = ", ".join(f"{name} {count}" for name, count in sorted(self.operators.items()))
        parity = "not measured" if self.parity is None else f"{self.parity:.1e}"
        rows = [
            f"{self.source}: {sum(self.operators.values())} nodes (version {self.opset}), "
            f"{self.folded} computed when read, {self.parameters:,} parameters",
            f"input {self.input_name} {list(self.input_shape)} (file: {list(self.file_shape)}), "
            f"output {self.output_name} {list(self.output_shape)}",
            f"operators: {counts}",
            f"parity: {parity}",
        ]
        return "\n".join(rows + [f"note: {note}" for note in self.notes])


def load_onnx(path: str | PathLike[str], *, layout: str = "NHWC") -> Converted:
    """Loads the classifier of an ONNX file.

    Operators come from :data:`wdjax.models.graphs.OPERATORS`; nothing in the file is run. All its
    tensors of floats are leaves of the model, by their names in the file, but for single numbers
    without axes, and those of which shapes are made. The number of samples is free, even if the
    file was exported for one.

    Args:
      path: the file, of operator version 7 or later, with one input of fixed shape (but for the
        number of samples) and an output of floats.
      layout: "NHWC" makes images ``[n, C, H, W]`` of the file ``[n, H, W, C]`` for the model;
        "NCHW" keeps the file's own order of axes. Inputs with other than four axes, and images that
        the file itself takes channels last, are never reordered.

    Returns:
      ``Converted(model, report)``; ``.input_shape`` is one sample's shape.

    Raises:
      ValueError: the file is unreadable; an operator is not covered, or in its training form;
        samples depend on each other; outputs differ from those of ``onnxruntime``, if it is
        installed, by more than 1e-4 of the largest.
      ImportError: the ``onnx`` package is absent.

    Cost: one pass over the file, one compilation, three samples.

    >>> model, report = load_onnx("net.onnx")  # doctest: +SKIP
    """
    if layout not in _LAYOUTS:
        raise ValueError(f"layout is 'NHWC' or 'NCHW', got {layout!r}.")
    graph = onnx_file.read(path)
    reference = functools.partial(_by_runtime, str(path))
    return _converted(graph, str(path), layout, frozenset(), reference)


def _converted(graph, source, layout, named, reference):
    """The model of a graph, tried on random inputs and compared with ``reference``.

    ``source`` is the file's name for messages, ``named`` the weights that a state dict names, and
    ``reference`` computes the outputs of the original, or tells why it cannot.
    """
    value, notes = _only_input(graph, source), list[str]()
    result, parts = _chosen(graph, source, value, named, notes)
    channels = layout == "NHWC" and len(value.shape) == 4 and not _is_channels_last(graph, value)
    order = channels_last(4) if channels else tuple(range(len(value.shape)))
    shape = tuple(value.shape[axis] for axis in order[1:])
    fixed = value.shape[0] if isinstance(value.shape[0], int) else None
    function = GraphFunction(
        parts.nodes, parts.constants, parts.orders, value.name, order, result, graph.opset, fixed,
        shape,
    )  # fmt: skip
    params = {name: jnp.asarray(array) for name, array in parts.params.items()}
    try:
        function = _for_any_number(function, params, shape, notes)
        model = Model(function, params)
        x = np.random.default_rng(0).uniform(size=(_TRIED * (fixed or 1), *shape))
        x = x.astype(np.float32)
        independence.check(model, x)
        parity = _parity(model, x, value, result, order, fixed, reference, notes)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    return Converted(
        model, _report(graph, source, value, shape, result, parts, parity, model, notes)
    )


def _only_input(graph: OnnxGraph, source: str) -> OnnxValue:
    """The input, whose shape must be known but for the number of samples."""
    if len(graph.inputs) != 1:
        names = ", ".join(shown(value.name) for value in graph.inputs[:8])
        raise ValueError(
            f"{source} has {len(graph.inputs)} inputs ({names}), expected one; export the model "
            "with the others fixed."
        )
    (value,) = graph.inputs
    if len(value.shape) < 2:
        raise ValueError(
            f"{source}: the input {shown(value.name)!r} has the shape {list(value.shape)}, without "
            "an axis for samples; export it with one."
        )
    free = [axis for axis in value.shape[1:] if not isinstance(axis, int)]
    if free or 0 in value.shape or math.prod(map(int, value.shape[1:])) > MAX_SIZE:
        raise ValueError(
            f"{source}: the input {shown(value.name)!r} has the shape {list(value.shape)}; only "
            "the number of samples may be free, and sizes must be usual ones. Export it for one "
            "size of images."
        )
    if value.dtype not in (np.float32, np.float64):
        raise ValueError(
            f"{source}: the input {shown(value.name)!r} is {value.dtype}, expected float32; export "
            "the model in float32, from images in [0, 1]."
        )
    return value


def _chosen(graph, source, value, named, notes) -> tuple[str, Parts]:
    """The name of the first output that is an array of float32, and the part of the graph for it.

    Without one, raises what is wrong with the first output. ``notes`` gets a remark if the graph
    has more than one.
    """
    faults = []
    for name in graph.outputs:
        try:
            parts = prepared(graph, name, named)
            _check_finite(parts)
            function = GraphFunction(
                parts.nodes,
                parts.constants,
                parts.orders,
                value.name,
                tuple(range(len(value.shape))),
                name,
                graph.opset,
                None,
            )
            n = value.shape[0] if isinstance(value.shape[0], int) else _TRIED
            out = _shape(function, parts.params, (n, *value.shape[1:]))
            if out.dtype == jnp.float32 and out.ndim:
                if len(graph.outputs) > 1:
                    notes.append(f"{shown(name)} is used of {len(graph.outputs)} outputs")
                return name, parts
            faults.append(ValueError(f"the output {shown(name)!r} is no array of floats."))
        except ValueError as error:
            faults.append(error)
    first = faults[0] if faults else "it has no output"
    raise ValueError(f"{source}: {first}") from (faults[0] if faults else None)


def _check_finite(parts: Parts) -> None:
    """Raises for parameters that are not numbers; infinity may be added, as masks are."""
    adding = {"Add", "Where", "Attention", "Min", "Max"}
    masks = {name for node in parts.nodes if node.operator in adding for name in node.inputs}
    masks -= {name for node in parts.nodes if node.operator not in adding for name in node.inputs}
    for name, array in parts.params.items():
        if np.isnan(array).any() or (name not in masks and not np.isfinite(array).all()):
            raise ValueError(f"the tensor {shown(name)!r} holds NaN or infinity.")


def _shape(function, params, shape):
    """Shape and dtype of a function's result, without computing it."""
    leaves = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    return jax.eval_shape(function, leaves, jax.ShapeDtypeStruct(shape, jnp.float32))


def _is_channels_last(graph: OnnxGraph, value: OnnxValue) -> bool:
    """Whether the first use of images but for arithmetic is to bring their channels forward, as in
    exports of TensorFlow."""
    same, first = {value.name}, []
    entrywise = {"Add", "Sub", "Mul", "Div", "Cast", "Identity", "Clip"}
    for node in graph.nodes:
        if not same.intersection(node.inputs):
            continue
        if node.operator in entrywise:
            same.update(node.outputs)
        else:
            first.append(node)
    return bool(first) and all(
        node.operator == "Transpose" and node.attributes.get("perm") == (0, 3, 1, 2)
        for node in first
    )


def _for_any_number(function, params, shape, notes):
    """The function for any number of samples, if need be by taking them one by one."""
    fixed = function.fixed
    one = _shape(function, params, (fixed or _TRIED, *shape))
    if one.shape[0] != (fixed or _TRIED):
        raise ValueError(
            f"the output has the shape {list(one.shape)} for {fixed or _TRIED} samples; its first "
            "axis must be that of samples."
        )
    if fixed is None or _suits(function, params, shape, one.shape[1:]):
        return function
    if fixed == 1:
        notes.append("exported for one sample, whose number is part of the graph: vmap over it")
        return GraphFunction(**{**_fields(function), "alone": True})
    raise ValueError(
        f"it was exported for batches of {fixed} samples, and shapes in it depend on that number; "
        "export it for any number of samples (dynamic_axes or dynamic_shapes), or for one."
    )


def _fields(function):
    return {name: getattr(function, name) for name in function.__dataclass_fields__}


def _suits(function, params, shape, row):
    """Whether three times the number of samples give three times the rows, each by its own."""
    n = _TRIED * function.fixed
    try:
        if _shape(function, params, (n, *shape)).shape != (n, *row):
            return False
        shown_ = independence.proof(Model(function, params), shape, jnp.dtype(jnp.float32), n)
    except ValueError:
        return False
    return shown_.alone and shown_.alike


@distinct.jit
def _outputs(model, x):
    """Takes the weights as an argument, so that they are not compiled into the program."""
    return model(x)


def _parity(model, x, value, result, order, fixed, reference, notes):
    """The largest difference from the reference, relative to its largest output; or None."""
    images = x.transpose(np.argsort(order)).astype(value.dtype)
    theirs, why = reference(images, value.name, result, fixed)
    if why:
        notes.append(why)
    if theirs is None and fixed:
        rows = np.split(x, len(x) // fixed)
        theirs = np.concatenate([np.asarray(_outputs(model, row)) for row in rows])
    if theirs is None:
        return None
    ours = np.asarray(_outputs(model, x))
    if ours.shape != theirs.shape:
        raise ValueError(f"outputs have the shape {ours.shape}, the reference's {theirs.shape}.")
    if not np.isfinite(theirs).all():
        raise ValueError("outputs of random inputs are not finite; look for overflow in the model.")
    size = np.max(np.abs(theirs), initial=0.0)
    gap = np.max(np.abs(ours - theirs), initial=0.0)
    error = 0.0 if gap == 0 else float(gap / size) if size else math.inf
    if not error <= TOLERANCE:
        raise ValueError(
            f"outputs differ from the reference's by {error:.2g} of the largest, more than "
            f"{TOLERANCE:g}. The import is wrong, or PyTorch's export of a module (it leaves some "
            "settings out), or the model is very sensitive to rounding; please report it with the "
            "file."
        )
    return error if reference is not None and not (why and fixed) else None


def _by_runtime(path, images, name, result, fixed):
    """Outputs by onnxruntime, or None and why there are none."""
    try:
        import onnxruntime
    except ImportError:
        return None, "onnxruntime is not installed, so that outputs were not compared"
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(
            _pruned(path, result), options, providers=["CPUExecutionProvider"]
        )
        parts = np.split(images, len(images) // fixed) if fixed else [images]
        rows = [session.run([result], {name: part})[0] for part in parts]
    except Exception as error:  # Its errors have no class in common.
        said = shown(" ".join(str(error).split()))
        return None, f"onnxruntime does not run it, so that outputs were not compared: {said}"
    return np.concatenate(rows), ""


def _pruned(path, result):
    """The file, or its bytes without nodes that the output does not need, so that none of them is
    run."""
    import onnx

    model = onnx.load(path, load_external_data=False)
    graph = onnx_file.read(path)
    kept = {node.outputs for node in needed(graph.nodes, result)}
    nodes = [node for node in model.graph.node if tuple(node.output) in kept]
    if len(nodes) == len(model.graph.node) and len(model.graph.output) == 1:
        return path
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    outputs = [value for value in model.graph.output if value.name == result]
    del model.graph.output[:]
    model.graph.output.extend(outputs)
    onnx.load_external_data_for_model(model, str(Path(path).parent))
    return model.SerializeToString()


def _report(graph, source, value, shape, result, parts, parity, model, notes):
    """What was read: operators, parameters, shapes, and how far outputs are from the original's.

    ``value`` and ``result`` are the input and the name of the output in the file, ``shape`` that of
    one sample of the model; ``notes`` are remarks for the user.
    """
    out = _shape(model.func, model.args[0], (value.shape[0] if model.func.fixed else 1, *shape))
    counts = collections.Counter(node.operator for node in needed(graph.nodes, result))
    used = [graph.tensors[name] for name in parts.params if name in graph.tensors]
    dtypes = {str(array.dtype) for array in used}
    if dtypes - {"float32"}:
        notes.append("floats of other lengths were cast to float32")
    return GraphReport(
        source=source,
        operators=dict(counts),
        parameters=sum(array.size for array in parts.params.values()),
        dtypes=tuple(sorted(dtypes)),
        input_name=shown(value.name),
        input_shape=tuple(shape),
        file_shape=value.shape,
        output_name=shown(result),
        output_shape=tuple(out.shape[1:]),
        opset=graph.opset,
        folded=parts.folded,
        parity=parity,
        notes=tuple(notes),
    )


def from_torch(module: Any, example: Any) -> Converted:
    """Makes a model of a PyTorch module, by PyTorch's own exporter.

    The module is exported to a temporary ONNX file (``torch.onnx.export(dynamo=True)``), which is
    read as by :func:`load_onnx`. Images are ``[n, H, W, C]`` for the model. Parameters and buffers
    are leaves by their names in the module, but for those that the exporter folds into others.

    Args:
      module: a ``torch.nn.Module`` in inference form (``module.eval()``), in float32.
      example: ``[n, C, H, W]`` or another shape that it takes, a tensor or array of one sample or
        more.

    Returns:
      ``Converted(model, report)``; ``.input_shape`` is one sample's shape.

    Raises:
      ValueError: the module is in its training form, cannot be exported, or has an operator that
        is not covered; outputs differ from the module's by more than 1e-4 of the largest.
      ImportError: ``torch``, ``onnx`` or ``onnxscript`` is absent.

    Cost: an export (seconds), one compilation, three samples.

    >>> model, report = from_torch(net.eval(), torch.rand(1, 3, 32, 32))  # doctest: +SKIP
    """
    try:
        import onnxscript  # noqa: F401  The exporter needs it.
        import torch
    except ImportError as error:
        raise ImportError(
            "from_torch needs torch, onnx and onnxscript: pip install 'wdjax[torch]'."
        ) from error
    refuse_training(module)
    first = torch.as_tensor(example).detach()
    if first.ndim < 2 or not len(first) or first.dtype != torch.float32:
        raise ValueError(
            f"example must be [n, *shape] in float32, got {list(first.shape)} in {first.dtype}."
        )
    pair = torch.cat([first[:1], first[:1]])
    try:
        with torch.no_grad():
            module(pair)
    except Exception as error:
        said = " ".join(str(error).split())[:300]
        raise ValueError(
            f"the module does not run on the example, {list(first.shape)} in {first.dtype}: {said} "
            "(PyTorch's images are [n, channels, height, width].)"
        ) from error
    named = frozenset([*dict(module.named_parameters()), *dict(module.named_buffers())])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        _export(torch, module, pair, path)
        graph = onnx_file.read(path)
    reference = functools.partial(_by_module, torch, module)
    return _converted(graph, type(module).__name__, "NHWC", named, reference)


def _export(torch, module, pair, path):
    """Writes an ONNX file with a free number of samples, or for one if that cannot be."""
    export = functools.partial(torch.onnx.export, module, dynamo=True, verbose=False)
    with _quiet():
        try:
            free = ({0: torch.export.Dim("samples")},)
            program = export((pair,), dynamic_shapes=free)
        except Exception:
            try:
                program = export((pair[:1],))
            except Exception as error:
                said = " ".join(str(error).split())[:600]
                raise ValueError(f"PyTorch cannot export the module: {said}") from error
        program.save(str(path), external_data=True)


@contextlib.contextmanager
def _quiet():
    """Without the exporter's news of its own doings, which errors repeat."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _by_module(torch, module, images, name, result, fixed):
    del name, result
    parts = np.split(images, len(images) // fixed) if fixed else [images]
    with torch.no_grad():
        rows = [module(torch.from_numpy(np.ascontiguousarray(part))) for part in parts]
    if not isinstance(rows[0], torch.Tensor):
        raise ValueError(
            f"the module returns a {type(rows[0]).__name__}: wrap it in one that returns the "
            "tensor of logits only."
        )
    return np.concatenate([row.numpy() for row in rows]), ""
