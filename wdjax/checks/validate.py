"""Checks of concrete arguments, with error messages: shapes, dtypes, labels, boxes and budgets."""

import math
import operator
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from wdjax import loops, losses
from wdjax.checks import independence
from wdjax.core import AnyArray, Array, Attack, PyTree, Samples

EntryBox = tuple[float | tuple[float, ...], float | tuple[float, ...]] | None
"""Least and largest inputs: numbers, or one for every entry of a sample, in a row. None for none.
"""


def traced(*trees: PyTree) -> bool:
    """Whether any leaf is a tracer, so that we are inside ``jit``, ``vmap`` or ``grad``."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(trees))


def staged() -> bool:
    """Whether ``jit`` is tracing, so that even operations on constants have no values yet."""
    return isinstance(jax.device_put(np.zeros(())), jax.core.Tracer)


_TORCH = "torch.nn.modules.module.Module"
"""The class is recognised by its name, so that PyTorch need not be installed."""


def on_device(values: Any, dtype: Any = None) -> Array:
    """``jnp.asarray`` without compilation for NumPy arrays of a new shape."""
    if isinstance(values, jax.Array):
        return values if dtype is None else values.astype(dtype)
    return jax.device_put(np.asarray(values, dtype))


def check_model(model: Callable[[Array], PyTree]) -> None:
    """Checks that a model is a callable pytree of arrays."""
    if any(f"{kind.__module__}.{kind.__name__}" == _TORCH for kind in type(model).__mro__):
        raise ValueError(
            f"the model is a PyTorch module, {type(model).__name__}, which JAX cannot trace: "
            "convert it by wdjax.convert.from_torch(module.eval(), example).model; docs/models.md "
            "shows other ways."
        )
    if isinstance(model, type) or not callable(model):
        short = reprlib.repr(model)  # A list of models would print their weights.
        raise ValueError(f"the model must be a callable pytree of arrays, got {short}.")
    for leaf in jax.tree.leaves(model):
        if not hasattr(leaf, "dtype") and not isinstance(leaf, (int, float)):
            raise ValueError(
                f"the model must be a callable pytree of arrays, got a leaf {leaf!r}; wrap a plain "
                "function as wdjax.Model(apply, params), a Flax module with "
                "wdjax.models.functional."
            )


def shapes_of(model: Callable[[PyTree], PyTree], x: PyTree) -> PyTree:
    """The shapes and dtypes of ``model(x)``; ``x`` is an array, or a pytree of arrays.

    Raises:
      ValueError: the model cannot be called with samples of this shape.
    """
    try:
        some = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), x)
        return jax.eval_shape(model, some)
    except Exception as error:  # Whatever the model's own code raises.
        shape = jax.tree.map(lambda leaf: list(leaf.shape), x)
        swapped = getattr(x, "ndim", 0) == 4 and x.shape[1] in (1, 3) and x.shape[-1] not in (1, 3)
        hint = "; models here take channels last: x.transpose(0, 2, 3, 1)" if swapped else ""
        raise ValueError(
            f"the model does not accept x of shape {shape}{hint}: {type(error).__name__}: {error}"
        ) from error


def check_shapes(
    model: Callable[[Array], PyTree],
    x: AnyArray,
    y: AnyArray,
    criterion: Callable[[PyTree, Array], Array] | None = None,
) -> int:
    """Checks shapes and dtypes of the samples and of the model's output; returns ``K``, the number
    of classes.

    Without a criterion, the model must return logits ``[n, K]``.
    """
    if jnp.ndim(x) < 2 or x.dtype not in (np.float32, np.float64):
        raise ValueError(
            "x must be floats [n, *shape] in the box, of 32 or 64 bits since fewer cannot resolve "
            f"a budget, got {x.dtype}{list(jnp.shape(x))}; convert uint8 images with "
            "x.astype(np.float32) / 255, and cast to half precision inside the model."
        )
    n = len(x)
    if jnp.shape(y) != (n,) or not jnp.issubdtype(y.dtype, jnp.integer):
        raise ValueError(f"y must be integer labels [{n}], got {y.dtype}{list(jnp.shape(y))}.")
    if n == 0:
        raise ValueError("x and y are empty: pass at least one sample.")
    check_model(model)
    out = shapes_of(model, x)
    leaves = jax.tree.leaves(out)
    if criterion is None:
        if getattr(out, "ndim", 0) != 2 or out.shape[0] != n or out.shape[1] < 2:
            got = getattr(out, "shape", type(out).__name__)
            advice = "" if hasattr(out, "shape") else ": return the array of logits only"
            if got in ((n,), (n, 1)):
                advice = "; of the one logit z of two classes return jnp.stack([0 * z, z], axis=-1)"
            raise ValueError(
                f"the model must return logits [{n}, K] with K >= 2, got {got}{advice}."
            )
        if not jnp.issubdtype(out.dtype, jnp.floating):
            raise ValueError(f"the model must return logits as floats, got {out.dtype}: cast them.")
        return int(out.shape[1])
    if not leaves or any(leaf.ndim < 1 or leaf.shape[0] != n for leaf in leaves):
        shapes = [leaf.shape for leaf in leaves]
        raise ValueError(f"every output of the model must have the leading axis {n}, got {shapes}.")
    check_criterion(criterion)
    check_each(
        "criterion", jax.eval_shape(criterion, out, jax.ShapeDtypeStruct((n,), jnp.int32)), n
    )
    return int(leaves[0].shape[-1]) if leaves[0].ndim > 1 else np.iinfo(np.int32).max


def check_criterion(criterion: Any) -> None:
    """Raises unless a criterion is a function, before anything that would fail of it in JAX."""
    if isinstance(criterion, type) or not callable(criterion):
        raise ValueError(
            "criterion must be a function (out, y) -> [n], positive where the attacker has won, "
            f"such as wdjax.losses.decision_margin, got {criterion!r}."
        )


ANY_MISTAKE = (
    "its losses are those of any mistake. Use fast or wda_star, whose attacks follow a criterion, "
    "or cascade of attacks with a loss of it"
)
"""Why ensembles of attacks with fixed losses refuse a criterion: they would miss what it asks."""


def refuse_criterion(name: str, options: Mapping[str, Any], why: str = ANY_MISTAKE) -> None:
    """Raises if the options of an ensemble that follows no other criterion have one."""
    if "criterion" in options:
        raise ValueError(f"{name} does not take criterion: {why}.")


def check_each(what: str, value: Any, n: int) -> Any:
    """The ``value`` of a criterion or a loss; raises unless it is floats ``[n]``.

    A loss of another shape would be summed to another attack, without a word.
    """
    if not hasattr(value, "shape"):
        got = type(value).__name__
        raise ValueError(f"the {what} must return floats [{n}], one a sample, got {got}.")
    shape, dtype = jnp.shape(value), jnp.result_type(value)
    if shape != (n,) or not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"the {what} must return floats [{n}], one a sample, got {dtype}{list(shape)}."
        )
    return value


def check_samples(
    model: Callable[[Array], PyTree],
    x: AnyArray,
    y: AnyArray,
    box: EntryBox = (0.0, 1.0),
    criterion: Callable[[PyTree, Array], Array] | None = None,
    transductive: bool = False,
) -> tuple[Array, Array]:
    """Checks concrete samples ``x``, ``[n, *shape]``, and labels ``y``, ``[n]``.

    Returns them as JAX arrays, labels as int32. Unless it is ``transductive``, the model must treat
    each sample alone.
    """
    x, labels = on_device(x), np.asarray(y)  # NumPy keeps 64-bit labels as they are.
    classes = check_shapes(model, x, labels, criterion)
    host = np.asarray(x)  # NumPy, so that nothing is compiled for each number of samples.
    low, high = float(host.min()), float(host.max())
    if not (math.isfinite(low) and math.isfinite(high)):
        bad = int(np.argmin(np.isfinite(host.reshape(len(host), -1)).all(axis=-1)))
        raise ValueError(f"x[{bad}] holds a value that is not finite; remove or repair it.")
    ends = () if box is None else tuple(np.asarray(end, x.dtype) for end in box)
    if any(end.ndim for end in ends):
        rows = host.reshape(len(host), -1)
        if np.any(outside := (rows < ends[0]) | (rows > ends[1])):
            row, entry = (int(i) for i in np.argwhere(outside)[0])
            least, most = (np.broadcast_to(end, rows.shape[1])[entry] for end in ends)
            raise ValueError(
                f"entry {entry} of x[{row}] is {rows[row, entry]:g}, outside its box "
                f"[{least:g}, {most:g}]."
            )
    elif ends and (low < ends[0] or high > ends[1]):
        raise ValueError(
            f"x spans [{low:.9g}, {high:.9g}], outside the box [{ends[0]:g}, {ends[1]:g}]; rescale "
            "it. If it was normalised by mean and std, put that inside the model; data that are no "
            "images may have another box, Lp(box=(low, high)), or none, box=None."
        )
    check_labels(labels, classes)
    if not transductive:
        independence.check(model, x)
    return x, on_device(labels, np.int32)


def check_labels(labels: np.ndarray, classes: int) -> None:
    """Raises unless all labels ``[n]`` are classes of the model."""
    smallest, largest = int(labels.min()), int(labels.max())
    if smallest < 0 or largest >= classes:
        raise ValueError(
            f"labels span {smallest}..{largest}, but the model has the classes 0..{classes - 1}."
        )


def gate(
    model: Callable[[Array], PyTree],
    x: AnyArray,
    y: AnyArray,
    box: EntryBox = (0.0, 1.0),
    criterion: Callable[[PyTree, Array], Array] | None = None,
    *,
    beside: PyTree = None,
    transductive: bool = False,
    alike: bool = False,
) -> tuple[Array, Array, Array | None]:
    """Checks a model and samples, at top level or inside a trace: the gate of functions of both.

    Args:
      model: a pytree callable.
      x: ``[n, *shape]`` samples.
      y: ``[n]`` labels.
      box: the range of valid samples, or None.
      criterion: what is asked of the model's output instead of logits.
      beside: the function's other arguments; a tracer among them makes it one inside a trace.
      transductive: whether the model's outputs may depend on the whole batch.
      alike: whether they must also be those of a batch of one.

    Returns:
      Samples and labels as JAX arrays, labels as int32; and inside a trace, where nothing can be
      raised, ``[n]`` booleans: which samples are finite, in the box, with a label in range, and
      treated alone. None at top level.

    Raises:
      ValueError: shapes or dtypes; at top level also what the booleans say.
    """
    inside = traced(model, x, y, beside) or staged()
    if inside:
        x, y, sound = _sound(model, x, y, box, criterion)
    else:
        (x, y), sound = check_samples(model, x, y, box, criterion, transductive=True), None
    if sound is not None and not transductive:
        sound &= independence.holds(model, x, alike)
    elif not transductive:
        independence.check(model, x)
    return x, y, sound


def _sound(
    model: Callable[[Array], PyTree],
    x: AnyArray,
    y: AnyArray,
    box: EntryBox,
    criterion: Callable[[PyTree, Array], Array] | None,
) -> tuple[Array, Array, Array]:
    """Inside a trace: samples, labels, and which of both would pass :func:`check_samples`."""
    x, y = on_device(x), y if traced(y) else np.asarray(y)
    classes = check_shapes(model, x, y, criterion)
    labels, rows = jnp.asarray(y).astype(jnp.int32), x.reshape(len(x), -1)
    sound = jnp.all(jnp.isfinite(rows), axis=-1) & (labels >= 0) & (labels < classes)
    if box is not None:
        low, high = (np.asarray(end, x.dtype) for end in box)
        sound &= jnp.all((rows >= low) & (rows <= high), axis=-1)
    return x, labels, sound


def check_search(
    attack: Attack,
    model: Callable[[Array], PyTree],
    x: AnyArray,
    y: AnyArray,
    *,
    eps: Any,
    key: Array | None,
    criterion: Callable[[PyTree, Array], Array] | None,
    start: Any,
    only: Any,
    index: Any,
    transductive: bool,
) -> tuple[Attack, Samples, Array | None, Array, Any, Array | None]:
    """Checks the arguments of :func:`wdjax.search`, which describes them.

    Returns:
      The attack, its numbers in the dtype of x; the samples, without outputs; the points to begin
      at, ``[n, *shape]``, or None; the samples' indices in a larger data set, ``[n]``; the samples
      to attack, ``[n]`` booleans, or None; and the third of :func:`gate`, where an invalid radius
      is False too.
    """
    name = type(attack).__name__
    if eps is None and attack.budget != "none":
        raise ValueError(f"{name} looks inside a ball: pass its radius, eps=...")
    if attack.random and key is None:
        raise ValueError(f"{name} is random: pass key=jax.random.key(seed).")
    rest = attack, criterion, eps, key if attack.random else None, start, only, index
    x, n = on_device(x), len(x)
    radii = None if eps is None else _radii(check_radii(eps, n), x)
    start, only = check_like("start", start, x), check_mask("only", only, n)
    attack, indices = settle(attack, x.dtype), check_index(index, n)
    x, y, sound = gate(
        model, x, y, attack.ball.box, criterion, beside=rest, transductive=transductive
    )
    if sound is None and transductive:
        raise ValueError(
            "a transductive model needs its whole batch, which is kept inside jit only: wrap the "
            "search in jax.jit, or play a game (wdjax.transductive)."
        )
    if criterion is not None:
        _check_loss(attack, shapes_of(model, x), y)
    if attack.budget == "data":
        _check_axis(attack)
    if sound is not None and radii is not None:
        sound &= jnp.isfinite(radii) & (radii >= 0)
    return attack, Samples(x, y, radii, None), start, indices, only, sound


def _check_loss(attack: Attack, out: PyTree, y: Array) -> None:
    """Raises unless an attack's loss takes ``out``, the shapes of a model's outputs.

    With a criterion these may be any pytree, of which the losses of the library know logits alone.
    """
    if not hasattr(attack, "loss") or getattr(attack, "targets", None):
        return
    name, loss = type(attack).__name__, attack.loss
    try:
        jax.eval_shape(losses.cross_entropy if loss is None else loss, out, y)
    except Exception as error:  # Whatever the loss's own code raises.
        called = "the default" if loss is None else getattr(loss, "__name__", repr(loss))
        raise ValueError(
            f"the loss of {name}, {called}, does not take the model's outputs, of shapes "
            f"{jax.tree.map(jnp.shape, out)}: pass {name} a loss=(out, y) -> [n] that rises where "
            "the criterion does, or use Walk, FMN or PDPGD, which follow the criterion "
            f"({type(error).__name__}: {error})."
        ) from error


def _check_axis(attack: Attack) -> None:
    """Raises if a budget of all samples would be one of a shard, or names no axis of a mesh."""
    name, axis = type(attack).__name__, getattr(attack, "axis", None)
    if axis is None and loops.sharded():
        how = f'say {name}(axis="batch") with the name of its axis, or ' * hasattr(attack, "axis")
        raise ValueError(
            f"{name} has one budget for all samples, but inside jax.shard_map it sees a shard of "
            f"them: {how}search outside of it, with mesh=."
        )
    if axis is not None:
        try:
            jax.lax.axis_index(axis)
        except NameError as error:
            raise ValueError(
                f"{name}(axis={axis!r}) is for searches inside jax.shard_map over a mesh with this "
                "axis; leave it out elsewhere, where mesh= splits a search."
            ) from error


def _radii(eps: Any, x: Array) -> Array:
    """Radii ``[n]`` in the dtype of ``x``; NumPy broadcasts concrete ones, so nothing compiles."""
    if traced(eps):
        return jnp.broadcast_to(jnp.asarray(eps, x.dtype), len(x))
    with np.errstate(over="ignore"):
        radii = np.asarray(eps).astype(x.dtype)
    if not np.all(np.isfinite(radii)):
        raise ValueError(f"eps must be finite in {x.dtype}, got {eps!r}.")
    return jax.device_put(np.broadcast_to(radii, len(x)))


def check_number(name: str, value: Any, least: float = 0.0) -> Any:
    """Checks that a number is finite and at least ``least``; a traced one is not checked."""
    if traced(value):
        return value
    array = np.asarray(value)
    if array.ndim != 0 or not np.issubdtype(array.dtype, np.number):
        raise ValueError(f"{name} must be a single number, got {value!r}; vmap over several.")
    if not (np.isfinite(array) and array >= least):
        raise ValueError(f"{name} must be finite and at least {least:g}, got {value!r}.")
    return value


def check_radii(eps: Any, n: int) -> Any:
    """Checks radii: a number, ``[n]``, or None; traced ones are not checked."""
    if eps is None or traced(eps):
        return eps
    array = np.asarray(eps)
    if array.shape not in ((), (n,)) or not np.issubdtype(array.dtype, np.number):
        raise ValueError(
            f"eps must be a single number or one a sample [{n}], got {eps!r}; vmap over several."
        )
    if not np.all(np.isfinite(array) & (array >= 0)):
        raise ValueError(f"eps must be finite and at least 0, got {eps!r}.")
    return eps


def check_unmasked(name: str, value: Any, expected: str) -> None:
    """Raises for NumPy's masked arrays."""
    if isinstance(value, np.ma.MaskedArray):
        raise ValueError(
            f"{name} must be {expected}, got a masked array, whose mask would be dropped: pass "
            f"{name}.filled(value), or the entries that count."
        )


def check_like(name: str, points: Any, x: Array) -> Array | None:
    """Checks points like the samples ``x``, ``[n, *shape]``, or None; returns them in x's dtype."""
    if points is None:
        return None
    check_unmasked(name, points, "like x")
    if isinstance(points, list | tuple):
        points = np.asarray(points)
    if jnp.shape(points) != x.shape:
        raise ValueError(
            f"{name} must have the shape of x, {list(x.shape)}, got {list(jnp.shape(points))}."
        )
    if not traced(points) and not (finite := np.isfinite(np.asarray(points, float))).all():
        wrong = np.flatnonzero(~finite.reshape(len(finite), -1).all(axis=1))
        raise ValueError(f"{name} must be finite, but is not at samples {wrong[:5].tolist()}.")
    return on_device(points, x.dtype)


def check_mask(name: str, mask: Any, n: int) -> Any:
    """Checks booleans ``[n]``, or None; returns them on the host, traced ones as they are."""
    if mask is None:
        return None
    mask = mask if traced(mask) else np.asarray(mask)
    if mask.shape != (n,) or mask.dtype != bool:
        raise ValueError(f"{name} must be booleans [{n}], got {mask.dtype}{list(mask.shape)}.")
    return mask


def check_index(index: Any, n: int) -> Array:
    """Checks the samples' indices in a larger data set ``[n]``; by default they count from 0."""
    if index is None:
        return on_device(np.arange(n))
    given = index if traced(index) else np.asarray(index)
    if given.shape != (n,) or not np.issubdtype(given.dtype, np.integer):
        raise ValueError(f"index must be integers [{n}], got {given.dtype}{list(given.shape)}.")
    if not traced(index) and not np.all((given >= 0) & (given < 2**31)):
        raise ValueError(
            f"index must lie between 0 and 2**31 - 1, got {given.min()} and {given.max()}."
        )
    return on_device(given)


def check_count(name: str, value: Any, least: int = 1) -> int:
    """Checks an integer setting; NumPy's integers become Python's."""
    try:
        count = operator.index(value)
    except TypeError:
        count = None
    if count is None or isinstance(value, bool) or count < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}.")
    return count


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> str:
    """Checks a setting that is one of a few strings."""
    if value not in choices:
        raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}, got {value!r}.")
    return value


def check_order(order: Any) -> float:
    """Checks a Wasserstein order; returns it as a Python number."""
    number = isinstance(order, (int, float, np.number)) and not isinstance(order, bool)
    if traced(order) or np.ndim(order) or not number:
        raise ValueError(f"order must be a number of at least 1, or inf, got {order!r}.")
    if not order >= 1:
        raise ValueError(f"order must be a number of at least 1, or inf, got {order!r}.")
    return float(order)


def check_entry_box(box: Any, x: Any) -> EntryBox:
    """Checks a box whose ends are numbers or arrays ``[*shape]``, one for every entry of a sample;
    the latter become rows of numbers."""
    ends = box if box is not None and len(box) == 2 else ()
    if all(np.ndim(end) == 0 for end in ends):
        return check_box(box)
    shape = np.shape(x)[1:]
    low, high = (np.asarray(end, float) for end in ends)
    if any(end.shape not in ((), shape) for end in (low, high)) or not np.all(low <= high):
        raise ValueError(
            f"box must be (low, high), each a number or {list(shape)}, one for every entry, with "
            f"low <= high, got ends of shape {list(low.shape)} and {list(high.shape)}."
        )
    rows = (np.broadcast_to(end, shape).reshape(-1).tolist() for end in (low, high))
    low_row, high_row = map(tuple, rows)
    return low_row, high_row


def check_box(box: Any) -> tuple[float, float] | None:
    """Checks a box of valid inputs, or None for none."""
    if box is None:
        return None
    try:
        low, high = (float(end) for end in box)
    except (TypeError, ValueError):
        low = high = math.nan
    if not low < high:
        raise ValueError(f"box must be (low, high) with low < high, or None; got {box!r}.")
    return low, high


def settle(attack: Any, dtype: np.dtype) -> Any:
    """The attack with its numbers as arrays of the samples' dtype, each finite and at least 0.

    Python numbers would work too, but are converted again at every dispatch.
    """

    def convert(path: tuple[Any, ...], leaf: Any) -> Array:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return jnp.asarray(check_number(name, leaf), dtype)

    return jax.tree_util.tree_map_with_path(convert, attack)
