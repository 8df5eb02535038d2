"""What a certificate of samples is asked: its ball, the box, and radii of samples or of entries."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from wdjax import norms
from wdjax.balls import Lp
from wdjax.bounds import moved_mass
from wdjax.bounds.region import Domain, Norm
from wdjax.checks import arguments, validate
from wdjax.core import AnyArray, Array, Classifier

EntryRange = tuple[ArrayLike, ArrayLike] | None
"""A box: least and largest inputs, numbers or ``[*shape]``; None for none."""


def check(
    model: Classifier, x: AnyArray, y: AnyArray, norm: Norm, box: EntryRange, **radius: ArrayLike
) -> None:
    """The checks that all certificates of samples share; most have a radius ``eps``."""
    if isinstance(x, list | tuple):
        raise ValueError(
            f"x must be an array [n, *shape], got {arguments.described(x)}; pass "
            f"np.asarray(x, np.float32){arguments.FLAT}."
        )
    eps = radius.get("eps")
    if moved_mass.moves_mass(norm):
        _no_entries(norm, eps)
        arguments.check(model=model, x=x, y=y, ball=domain(norm, box, x).norm, **radius)
        return
    if isinstance(norm, str):
        raise ValueError(
            f"norm must be 1, 2, inf or an image.ImageWasserstein(), got {norm!r}"
            f"{norms.meant(norm)}."
        )
    if box is not None and not hasattr(box, "__len__"):
        validate.check_box(box)  # Raises, since it has no ends.
    simple = (eps is None or np.ndim(eps) < 2) and all(np.ndim(end) == 0 for end in box or ())
    ball = Lp(norms.check_norm(norm), validate.check_box(box)) if simple else None
    arguments.check(model=model, x=x, y=y, ball=ball, **radius)


def _no_entries(norm: Norm, eps: ArrayLike | None) -> None:
    """Raises for radii of single entries where mass moves between them."""
    if moved_mass.moves_mass(norm) and eps is not None and np.ndim(eps) > 1:
        raise ValueError(
            "where mass moves between pixels eps is a number or [n], and entries have no scale, "
            f"got {list(np.shape(eps))}."
        )


def domain(norm: Norm, box: EntryRange, x: AnyArray) -> Domain:
    """The checked norm and box, whose ends may be numbers or ``[*shape]``, for samples ``x``.

    Where mass moves, it moves anywhere, whatever the ball's window.
    """
    if moved_mass.moves_mass(norm):
        if [np.ravel(end).tolist() for end in box or ()] != [[end] for end in norm.box]:
            raise ValueError(f"images of {norm!r} lie in box={norm.box}, got {box!r}; pass that.")
        anywhere: Any = dataclasses.replace(norm, window=None)  # type: ignore[type-var]
        anywhere.diameter(np.shape(x)[1:])  # Raises unless samples are images.
        return Domain(anywhere, norm.box)
    return Domain(norms.check_norm(norm), validate.check_entry_box(box, x))


def radii(eps: ArrayLike, x: AnyArray) -> tuple[Array, Array | None]:
    """Radii ``[n]``, and the entries' scales ``[n, *shape]`` if ``eps`` is one of every entry.

    A number that the samples' dtype lacks is rounded up: what holds within it holds within ``eps``.
    Raises for NaN, negative and infinite ones.
    """
    shape = np.shape(x)
    if not validate.traced(eps):
        # NumPy, since inside jit even JAX operations on constants have no values.
        given, eps = np.asarray(eps, float), np.asarray(eps, x.dtype)
        eps = np.where(eps < given, np.nextafter(eps, np.asarray(np.inf, x.dtype)), eps)
        if not np.all((eps >= 0) & (eps < np.inf)):
            raise ValueError(f"eps must be finite and at least 0, got {eps!r:.80}.")
    else:
        eps = jnp.asarray(eps)
    if eps.ndim == len(shape) and eps.shape[1:] == shape[1:] and eps.shape[0] in (1, shape[0]):
        return jnp.ones(shape[0], x.dtype), jnp.broadcast_to(jnp.asarray(eps), shape)
    if eps.shape not in ((), shape[:1]):
        raise ValueError(
            f"eps must be a number, [{shape[0]}] numbers, or one of every entry, "
            f"{[1, *shape[1:]]} or {list(shape)}, got {list(eps.shape)}."
        )
    return jnp.broadcast_to(jnp.asarray(eps), shape[:1]), None


def scales(scale: AnyArray | None, norm: Norm, x: AnyArray) -> Array | None:
    """The entries' scales ``[n, *shape]`` of :func:`wdjax.certify.radius`; None for none.

    Raises for another rank than the samples', and for what :func:`radii` refuses.
    """
    if scale is None:
        return None
    _no_entries(norm, scale)
    if np.ndim(scale) != np.ndim(x):
        raise ValueError(
            f"scale must be {[1, *np.shape(x)[1:]]} or {list(np.shape(x))}, one of every entry, "
            f"got {list(np.shape(scale))}."
        )
    return radii(scale, x)[1]
