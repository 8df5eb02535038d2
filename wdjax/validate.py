"""What the front door refuses, and how it says so: shapes, dtypes, labels, boxes and budgets."""

import math

import jax
import jax.numpy as jnp
import numpy as np


def traced(*trees) -> bool:
    """Whether any leaf is a tracer, so that we are inside ``jit``, ``vmap`` or ``grad``."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(trees))


def check_shapes(model, x, y):
    """Checks what shapes and dtypes can tell; returns the number of classes."""
    if jnp.ndim(x) < 2 or x.dtype not in (np.float32, np.float64):
        raise ValueError(
            "x must be floats [n, *shape] in the box, of 32 or 64 bits since fewer cannot resolve "
            f"a budget, got {x.dtype}{list(jnp.shape(x))}; convert uint8 images with "
            "x.astype(np.float32) / 255, and cast to half precision inside the model."
        )
    if jnp.shape(y) != jnp.shape(x)[:1] or not jnp.issubdtype(y.dtype, jnp.integer):
        raise ValueError(
            f"y must be integer labels [{jnp.shape(x)[0]}], got {y.dtype}{list(jnp.shape(y))}."
        )
    if len(y) == 0:
        raise ValueError("x and y are empty: pass at least one sample.")
    for leaf in jax.tree.leaves(model):
        if not hasattr(leaf, "dtype") and not isinstance(leaf, (int, float)):
            raise ValueError(
                f"the model must be a callable pytree of arrays, got a leaf {leaf!r}; wrap a plain "
                "function as wdjax.Model(apply, params), a Flax module with "
                "wdjax.models.functional."
            )
    try:
        logits = jax.eval_shape(model, jax.ShapeDtypeStruct(x.shape, x.dtype))
    except TypeError as error:
        raise ValueError(
            f"the model does not accept x of shape {list(x.shape)}: {error}"
        ) from error
    if getattr(logits, "ndim", 0) != 2 or logits.shape[0] != len(y) or logits.shape[1] < 2:
        got = getattr(logits, "shape", type(logits).__name__)
        raise ValueError(f"the model must return logits [{len(y)}, K] with K >= 2, got {got}.")
    return logits.shape[1]


@jax.jit
def _spans(x, y):
    return jnp.min(x), jnp.max(x), jnp.min(y), jnp.max(y)


def check_samples(model, x, y, box=(0.0, 1.0)):
    """Checks concrete samples at the front door; returns them as JAX arrays, labels as int32."""
    x, y = jnp.asarray(x), jnp.asarray(y)
    classes = check_shapes(model, x, y)
    low, high, smallest, largest = (span.item() for span in jax.device_get(_spans(x, y)))
    if not (math.isfinite(low) and math.isfinite(high)):
        bad = int(jnp.argmax(~jnp.all(jnp.isfinite(x.reshape(len(x), -1)), axis=-1)))
        raise ValueError(f"x[{bad}] holds a value that is not finite; remove or repair it.")
    if box is not None and (low < box[0] or high > box[1]):
        raise ValueError(
            f"x spans [{low:g}, {high:g}], outside the box [{box[0]:g}, {box[1]:g}]; rescale it, "
            "or give the attack another box (box=None for none)."
        )
    if smallest < 0 or largest >= classes:
        raise ValueError(
            f"labels span {smallest}..{largest}, but the model has the classes 0..{classes - 1}."
        )
    return x, y.astype(jnp.int32)


def check_number(name, value, least=0.0):
    """Checks a concrete scalar budget or knob; a traced one passes."""
    if traced(value):
        return value
    array = np.asarray(value)
    if array.ndim != 0 or not np.issubdtype(array.dtype, np.number):
        raise ValueError(f"{name} must be a single number, got {value!r}; vmap over several.")
    if not (np.isfinite(array) and array >= least):
        raise ValueError(f"{name} must be finite and at least {least:g}, got {value!r}.")
    return value
