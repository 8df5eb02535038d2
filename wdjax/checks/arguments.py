"""Checks kinds and types of the arguments that public functions share; errors name the argument.

These checks work on tracers too. Values, and whether arguments fit together, are checked by
:mod:`wdjax.checks.validate` and by the functions themselves.
"""

import inspect
import textwrap
import types
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from wdjax import losses
from wdjax.checks import purity, validate

_PARTS = {
    "attack": ("ball", "budget", "random", "stages", "init", "point", "finished"),
    "perturbation": ("ball", "eps", "context", "deltas"),
    "noise": ("step", "pattern", "level", "radius"),
}
"""Attributes that an instance must have, by the protocols of :mod:`wdjax.core`, ``nppr`` and
``smoothing.noise``."""
_HOME = {"attack": "attacks", "perturbation": "nppr.distributions", "noise": "smoothing.noise"}
_GREY = 100
"""How wide a box is, at least, that is one of grey levels rather than of images in [0, 1]."""
_WRAPPERS = {"wdjax.engine.diagnosis", "wdjax.ensembles.second_look", "wdjax.precision"}
"""The modules of decorators whose frames lie between a public function and its caller."""


def check(*optional: str, **given: Any) -> None:
    """Checks arguments by their names, first thing in a public function.

    Args:
      *optional: names of the arguments that may be None.
      **given: ``attack``, ``model``, ``perturbation``, ``noise``, ``x`` and ``z`` (samples
        ``[n, *shape]``), ``y`` (``[n]``), ``eps``, ``key``, ``keys``. Warns of an ``eps`` beyond
        the diameter of ``ball`` (or of the attack's or perturbation's ball), unless the caller is
        the package itself. A ``criterion`` must be callable; else only what follows is checked.

    Raises:
      ValueError: an argument of the wrong kind; tells what was given and expected, and what to do.
        A ball of norm 0, unless the attack is ``sparse``. A ``model``, criterion or
        attack's loss that is no pure function of its parameters; inside a trace, or if the caller
        is the package itself, this is not looked at.

    >>> check(key=0)
    Traceback (most recent call last):
      ...
    ValueError: key must be one typed key, got 0; pass key=jax.random.key(0).
    """
    ball, criterion = given.pop("ball", None), given.pop("criterion", None)
    for name, value in given.items():
        if value is not None or name not in optional:
            _KINDS[name](name, value)
    x, y, eps, perturbation = (given.get(name) for name in ("x", "y", "eps", "perturbation"))
    if x is not None and y is not None and np.shape(y) != np.shape(x)[:1]:
        raise ValueError(
            f"y must be integer labels [{len(x)}], one for every sample of x, got {described(y)}"
            f"{_as_one(x)}."
        )
    attack = given.get("attack")
    if attack is not None:
        ball = attack.ball
    if perturbation is not None:
        ball, eps = perturbation.ball, perturbation.eps
        _radius("the perturbation's eps", eps)
    if getattr(ball, "norm", None) == 0 and not getattr(attack, "sparse", False):
        raise ValueError(
            f"{'this' if attack is None else type(attack).__name__} is not for norm 0, got {ball}; "
            "attacks.SigmaZero finds flips of few changes, attacks.PGD flips within eps changes."
        )
    if ball is not None and eps is not None:
        warn(too_far(ball, np.shape(given["x"])[1:], eps) or too_near(ball, eps))
    if criterion is not None:
        validate.check_criterion(criterion)
    model = given.get("model")
    if model is None or x is None or validate.traced(model, x, criterion) or _caller()[0]:
        return
    purity.check(model, x)
    loss = None if getattr(attack, "targets", 0) else getattr(attack, "loss", None)
    for name, function in (("attack's loss", loss), ("criterion", criterion)):
        if function is not None and getattr(function, "__module__", None) != losses.__name__:
            purity.check_loss(name, function, model, x)


def described(value: Any) -> str:
    """A short description of an argument, for error messages.

    >>> described(np.ones((2, 3))), described({"a": 1}), described(dict)
    ('float64[2, 3]', "a dict of 'a'", 'the class dict')
    """
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, dict):
        return f"a dict of {', '.join(map(repr, list(value)[:4]))}"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, list | tuple) and value and all(hasattr(one, "shape") for one in value):
        more = ", ..." * (len(value) > 4)
        return f"a {type(value).__name__} of {', '.join(map(described, value[:4]))}{more}"
    return textwrap.shorten(repr(value), 80, placeholder=" ...")


def warn(text: str | None) -> None:
    """Warns the caller of the running public function, unless that caller is in the package itself.

    Private and nested functions may lie between that function and this one.
    """
    inside, level = _caller()
    if text is not None and not inside:
        warnings.warn(text, UserWarning, stacklevel=level)


def _caller() -> tuple[bool, int]:
    """Whether the running public function is called by the package; the caller's ``stacklevel``."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and _is_inner(frame):
        frame, level = frame.f_back, level + 1
    frame, level = frame and frame.f_back, level + 1
    while frame is not None and _module(frame) in _WRAPPERS:
        frame, level = frame.f_back, level + 1
    return frame is not None and _module(frame).split(".")[0] == "wdjax", level


def _is_inner(frame: types.FrameType) -> bool:
    """Whether a frame runs a check, or a private or nested function of the package."""
    names = frame.f_code.co_qualname.split(".")
    private = any(name.startswith("_") and not name.endswith("__") for name in names)
    shared = _module(frame).startswith("wdjax.") and names[-1] == "check"
    return _module(frame).startswith("wdjax.checks") or shared or private or "<locals>" in names


def _module(frame: types.FrameType) -> str:
    """The name of the module that a frame runs."""
    return str(frame.f_globals.get("__name__", ""))


def too_far(ball: Any, shape: tuple[int, ...], eps: Any) -> str | None:
    """A warning if a radius exceeds the ball's diameter, else None.

    Args:
      ball: has ``diameter(shape)`` and ``units``, such as :class:`wdjax.Lp`; None for others.
      shape: of a sample.
      eps: radii of any shape; None if traced.

    >>> from wdjax import Lp
    >>> too_far(Lp(), (28, 28, 1), 1.0) is None, "8/255" in too_far(Lp(), (28, 28, 1), 8)
    (True, True)
    """
    known = hasattr(ball, "diameter") and not validate.traced(eps)
    return beyond(ball.diameter(shape), eps, ball.units) if known else None


def too_near(ball: Any, eps: Any) -> str | None:
    """A warning if all radii are below one grey level in a box of grey levels, else None.

    Args:
      ball: may have a ``box``, two numbers.
      eps: radii of any shape; None if traced.

    >>> from wdjax import Lp
    >>> too_near(Lp(), 8 / 255) is None, "in [0, 1]" in too_near(Lp(box=(0, 255)), 8 / 255)
    (True, True)
    """
    box = getattr(ball, "box", None)
    if getattr(ball, "norm", None) is None:  # Moved mass has no grey levels.
        return None
    if not box or validate.traced(eps) or any(np.ndim(end) for end in box):
        return None
    largest = float(np.max(np.asarray(eps, float), initial=0.0))
    if not 0 < largest < 1 or not _GREY <= box[1] - box[0] < np.inf:
        return None
    return (
        f"eps={largest:g} is less than one grey level of the box [{box[0]:g}, {box[1]:g}]; "
        "multiply a radius for images in [0, 1] by 255."
    )


def beyond(most: float, eps: Any, units: str) -> str | None:
    """A warning if the largest of the radii ``eps`` exceeds ``most``, else None."""
    largest = float(np.max(np.asarray(eps, float), initial=0.0))
    if not largest > most * (1 + 1e-6):
        return None
    return (
        f"eps={largest:g} is beyond {most:g}, the largest distance between two inputs here, so "
        f"that every input is in reach and nothing can be robust: {units}."
    )


FLAT = "; of a pytree concatenate the leaves [n, d], and split them inside the model"


def _as_one(x: Any) -> str:
    """For an error message: as what samples were read that are a list or a tuple; else empty."""
    if not isinstance(x, list | tuple):
        return ""
    return (
        f"; x is a {type(x).__name__}, which is read as one array {list(np.shape(x))}: a pytree of "
        "leaves [n, ...] is a tuple or dict in searches; elsewhere concatenate the leaves [n, d], "
        "and split them inside the model"
    )


def _points(name: str, value: Any) -> None:
    array = _array(name, value, "floats [n, *shape]", FLAT)
    if array.dtype not in (np.float32, np.float64) or len(array.shape) < 2:
        raise ValueError(
            f"{name} must be floats [n, *shape] in the box, of 32 or 64 bits since fewer cannot "
            f"resolve a budget, got {described(array)}; convert uint8 images with "
            f"{name}.astype(np.float32) / 255, and cast to half precision inside the model."
        )
    if array.shape[0] == 0:
        raise ValueError(f"{name} is empty, {described(array)}: pass at least one sample.")


def _labels(name: str, value: Any) -> None:
    """Raises unless the value is integer labels ``[n]``."""
    array = _array(name, value, "integer labels [n]")
    if not jnp.issubdtype(array.dtype, jnp.integer) or len(array.shape) != 1:
        advice = f"; of one-hot rows take {name}.argmax(axis=1)" * (len(array.shape) == 2)
        raise ValueError(f"{name} must be integer labels [n], got {described(array)}{advice}.")


def _radius(name: str, value: Any) -> None:
    """Raises unless the value is a real number or several, outside traces finite and at least 0."""
    array = _array(name, value, "a number, or several where that is documented")
    came = described(array if len(array.shape) else value)
    if not any(jnp.issubdtype(array.dtype, kind) for kind in (jnp.floating, jnp.integer)):
        raise ValueError(f"{name} must be a single number that is real, got {came}.")
    if not validate.traced(value) and not np.all(np.isfinite(array) & (np.asarray(array) >= 0)):
        raise ValueError(f"{name} must be finite and at least 0, got {came}.")


def _key(name: str, value: Any) -> None:
    """Raises unless the value is one typed random key; the message says how to make one."""
    typed = hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    if typed and not value.shape:
        return
    if typed:
        advice = "vmap over several, or take one of them"
    elif hasattr(value, "dtype") and value.dtype == np.uint32 and value.shape == (2,):
        advice = f"of an old one make {name}=jax.random.wrap_key_data(key)"
    else:
        seed = value if isinstance(value, int | np.integer) else "seed"
        advice = f"pass {name}=jax.random.key({seed})"
    raise ValueError(f"{name} must be one typed key, got {described(value)}; {advice}.")


def _instance(name: str, value: Any) -> None:
    """Raises if the value is a class, lacks an attribute of its protocol, or is no pytree."""
    if isinstance(value, type):
        raise ValueError(
            f"{name} must be an instance, {value.__name__}(...), got the class {value.__name__}."
        )
    missing = [part for part in _PARTS[name] if not hasattr(value, part)]
    if missing:
        raise ValueError(
            f"{name} must be of wdjax.{_HOME[name]}, or have the same attributes, got "
            f"{described(value)}, without {', '.join(missing)}."
        )
    if jax.tree_util.all_leaves([value]):
        raise ValueError(
            f"{name} must be a pytree, as those of wdjax.{_HOME[name]} are, got {described(value)}:"
            f" decorate {type(value).__name__} with @jax.tree_util.register_dataclass and "
            "@dataclasses.dataclass(frozen=True)."
        )
    ball, loss = getattr(value, "ball", None), getattr(value, "loss", None)
    if "ball" in _PARTS[name] and (isinstance(ball, type) or not hasattr(ball, "box")):
        raise ValueError(
            f"the {name}'s ball must be an instance such as wdjax.Lp(2), got {described(ball)}."
        )
    if loss is not None and not callable(loss):
        raise ValueError(
            f"the {name}'s loss must be a function such as wdjax.losses.margin, got {loss!r}."
        )


def _keys(name: str, value: Any) -> None:
    """Raises unless the value is an array ``[S]`` of typed random keys."""
    typed = hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    if not typed or len(value.shape) != 1:
        raise ValueError(
            f"{name} must be typed keys [S], got {described(value)}; pass "
            "jax.random.split(jax.random.key(seed), S)."
        )


def _model(name: str, value: Any) -> None:
    """Raises unless the value is a model, by :func:`wdjax.checks.validate.check_model`."""
    validate.check_model(value)


def _array(name: str, value: Any, expected: str, advice: str = "") -> Any:
    """The value as an array with dtype and shape; a ValueError, with advice, if it is none."""
    if isinstance(value, jax.Array | jax.ShapeDtypeStruct):
        return value
    validate.check_unmasked(name, value, expected)
    try:
        array = jnp.asarray(value) if validate.traced(value) else np.asarray(value)
    except (TypeError, ValueError, RuntimeError):
        array = None
    if array is None or array.dtype.kind in "OUSMm":
        raise ValueError(f"{name} must be {expected}, one array, got {described(value)}{advice}.")
    return array


_KINDS: dict[str, Callable[[str, Any], None]] = {
    "attack": _instance,
    "perturbation": _instance,
    "noise": _instance,
    "model": _model,
    "x": _points,
    "z": _points,
    "y": _labels,
    "eps": _radius,
    "key": _key,
    "keys": _keys,
}
