r"""Families of perturbation distributions: what a mixture depends on, and the networks behind it.

| mode | proportions | means and covariances |
|---|---|---|
| ``independent`` | parameters | parameters |
| ``label`` | the label's embedding | parameters |
| ``label-full`` | the label's embedding | parameters; means also depend on the label |
| ``input`` | features | features |
| ``joint`` | the label's embedding | features |
| ``joint-full`` | features and label | features; means also depend on the label |

The paper has four of these modes; in its ``joint`` the proportions do not depend on the input.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from wdjax.checks import validate
from wdjax.core import Array
from wdjax.nppr import mixture as mixtures
from wdjax.nppr import upsample as up
from wdjax.nppr.mixture import Mixture
from wdjax.precision import promoted

Mode = Literal["independent", "label", "label-full", "input", "joint", "joint-full"]
"""What a distribution may depend on; :class:`Family` explains each."""
MODES: tuple[Mode, ...] = ("independent", "label", "label-full", "input", "joint", "joint-full")
"""All modes."""
PAPER: tuple[Mode, ...] = ("independent", "label", "input", "joint")
"""The modes of the paper."""

Params = dict[str, Any]
_SEES_INPUT = ("input", "joint", "joint-full")
_SEES_LABEL = ("label", "label-full", "joint", "joint-full")
_MOMENTUM = 0.9
_EPSILON = 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    r"""A set of mixtures to choose from; changing any setting recompiles.

    Args:
      mode: what a mixture depends on; see the table in :mod:`wdjax.nppr.family`.
      components: K.
      latent: L, the dimension of the mixture's space; without up-sampling it is that of an input.
      upsample: ``"learnable"`` or ``"fixed"`` linear map to a small image and bicubic
        interpolation, or ``"none"``: the mixture lives in input space.
      side: side of the small image; by default half that of the input, but at least 8. Inputs other
        than images ``[height, width, channels]`` are mapped to directly.
      covariance: ``"full"`` or ``"diagonal"``, in latent coordinates.
      hidden: width of the layer shared by all heads.
      embedding: dimension of a label's embedding, a vector of length 1.
      sigma: standard deviation at the start.
      spread: means start uniformly in ``[-spread, spread]``.
      floor: lower bound on the factors' diagonals, so that a density exists.

    Raises:
      ValueError: a setting that is out of range.

    Source: Wang et al. [wang2025], section 4, figure 4 and table 4.

    >>> Family(mode="label", components=3).latent
    32
    """

    mode: Mode = "joint"
    components: int = 7
    latent: int = 32
    upsample: up.Upsample = "learnable"
    side: int | None = None
    covariance: Literal["full", "diagonal"] = "full"
    hidden: int = 256
    embedding: int = 64
    sigma: float = 0.5
    spread: float = 0.5
    floor: float = 1e-3

    def __post_init__(self) -> None:
        validate.check_choice("mode", self.mode, MODES)
        validate.check_choice("upsample", self.upsample, up.UPSAMPLE)
        validate.check_choice("covariance", self.covariance, ("full", "diagonal"))
        for name in ("components", "latent", "hidden", "embedding"):
            validate.check_count(name, getattr(self, name))
        if self.side is not None:
            validate.check_count("side", self.side)
        for name in ("sigma", "spread", "floor"):
            validate.check_number(name, getattr(self, name))
        if not self.sigma > self.floor > 0:
            raise ValueError(
                f"sigma must exceed the floor, and both 0, got {self.sigma!r}, {self.floor!r}."
            )

    @property
    def sees_input(self) -> bool:
        """Whether anything depends on the input's features."""
        return self.mode in _SEES_INPUT

    @property
    def sees_label(self) -> bool:
        """Whether anything depends on the label."""
        return self.mode in _SEES_LABEL

    def size(self, shape: tuple[int, ...]) -> int:
        """L, for inputs of a shape."""
        return math.prod(shape) if self.upsample == "none" else self.latent


class Temperatures(NamedTuple):
    """Divisors of the heads' outputs during training; 1 in evaluation."""

    proportions: Any = 1.0
    mean: Any = 1.0
    sigma: Any = 1.0
    shared: Any = 1.0


ONE = Temperatures()


def first_params(
    family: Family, key: Array, shape: tuple[int, ...], features: int, classes: int
) -> tuple[Params, Params]:
    """Initial parameters, and the running averages of batch normalisation.

    Args:
      family: which mixtures.
      key: a typed ``jax.random.key``.
      shape: shape of an input.
      features: the number of features; 0 if the family does not use them.
      classes: the number of classes.
    """
    size, count = family.size(shape), family.components
    cells = mixtures.packed_size(size) if family.covariance == "full" else size
    widths = {"pi": count, "mean": count * size, "factor": count * cells}
    small = math.prod(up.small_shape(shape, family.side))
    take = _numbers(key, family, widths, size, small, features, classes)
    params: Params = {}
    if family.upsample != "none":
        params["map"] = up.orthogonal(take(max(size, small), min(size, small)), size)
    if family.sees_label:
        params["embedding"] = take(classes, family.embedding)
    stats: Params = {}
    if family.sees_input:
        bound = 1 / math.sqrt(features)
        shared = {"kernel": take(features, family.hidden), "bias": take(family.hidden)}
        params["shared"] = jax.tree.map(lambda leaf: bound * leaf, shared)
        params["scale"], params["shift"] = jnp.ones(family.hidden), jnp.zeros(family.hidden)
        stats = {"mean": jnp.zeros(family.hidden), "var": jnp.ones(family.hidden)}
    first = _first_outputs(family, take(count, size), size, cells)
    for name, width in widths.items():
        inputs = _inputs(family, name)
        params[name] = {"bias": first[name].ravel()}
        if inputs:
            params[name]["kernel"] = take(inputs, width) / math.sqrt(inputs)
    return params, stats


def _numbers(
    key: Array,
    family: Family,
    widths: dict[str, int],
    size: int,
    small: int,
    features: int,
    classes: int,
) -> Callable[..., Array]:
    """Returns ``take(*shape)``, which slices one long array of uniform numbers in [-1, 1].

    A single draw compiles faster than many. ``widths`` are the heads' numbers of outputs, ``size``
    is L and ``small`` the number of entries of the small image; with ``features`` and ``classes``
    they determine the array's length.
    """
    total = size * small + classes * family.embedding + (features + 1) * family.hidden
    total += widths["mean"]
    total += sum(_inputs(family, name) * width for name, width in widths.items())
    numbers, taken = jax.random.uniform(key, (total,), minval=-1.0, maxval=1.0), 0

    def take(*shape: int) -> Array:
        nonlocal taken
        taken += math.prod(shape)
        return numbers[taken - math.prod(shape) : taken].reshape(shape)

    return take


def _inputs(family: Family, name: str) -> int:
    """The number of inputs of the head ``name`` (pi, mean or factor); 0 if it is only a bias."""
    hidden = family.hidden if family.sees_input else 0
    if name == "pi":
        sees = {"joint": family.embedding, "joint-full": hidden + family.embedding}
        return sees.get(family.mode, family.embedding if family.sees_label else hidden)
    if name == "mean" and family.mode.endswith("full"):
        return hidden + family.embedding
    return hidden


def _first_outputs(family: Family, unit: Array, size: int, cells: int) -> dict[str, Array]:
    """The heads' initial biases: ``pi [K]``, ``mean [K, L]`` and ``factor [K, cells]``.

    ``unit`` ``[K, L]`` are uniform numbers in [-1, 1], the means in units of ``family.spread``. All
    components begin with equal proportions and standard deviation ``family.sigma``.
    """
    count = family.components
    raw = math.log(math.expm1(family.sigma - family.floor))
    if family.covariance == "diagonal":
        factor = np.full((count, size), raw, np.float32)
    else:
        indices = np.cumsum(np.arange(1, size + 1)) - 1  # The diagonal of a packed triangle.
        factor = np.zeros((count, cells), np.float32)
        factor[:, indices] = raw
    return {"pi": jnp.zeros(count), "mean": family.spread * unit, "factor": jnp.asarray(factor)}


def replaced(params: Params, start: Params) -> Params:
    """Parameters with some of them replaced by others of the same shapes.

    Raises:
      ValueError: a name or a shape that the family does not have.
    """
    new = dict(params)
    for name, value in start.items():
        mine = jax.tree.map(jnp.shape, params.get(name))
        if name not in params or jax.tree.map(jnp.shape, value) != mine:
            raise ValueError(
                f"start has {name!r} of shapes {jax.tree.map(jnp.shape, value)}, where the family "
                f"has {mine}."
            )
        new[name] = jax.tree.map(jnp.asarray, value)
    return new


@promoted()
def mixture(
    family: Family,
    params: Params,
    stats: Params,
    features: Array | None,
    y: Array,
    shape: tuple[int, ...],
    *,
    temperatures: Temperatures = ONE,
    offset: Array | None = None,
    of_batch: bool = False,
) -> tuple[Mixture, Params]:
    """The mixtures of some inputs.

    Args:
      family: which mixtures.
      params: from :func:`first_params`, trained.
      stats: running averages.
      features: ``[n, F]``, or None if the family does not use them.
      y: ``[n]`` labels.
      shape: shape of an input.
      temperatures: of the schedule.
      offset: ``[n, d]`` vectors in the input's space (before the map into the ball). Their latent
        coordinates, by least squares, are added to the means.
      of_batch: normalise by the batch's statistics and update the running averages, as in training;
        else by the running averages, so that a mixture depends on its own input alone.

    Returns:
      The mixtures, and the updated running averages.
    """
    seen: dict[str, Array] = {}
    if family.sees_input:
        assert features is not None
        hidden, stats = _shared(params, stats, features, of_batch)
        seen["features"] = hidden / temperatures.shared
    if family.sees_label:
        raw = params["embedding"]
        unit = raw / jnp.maximum(jnp.linalg.norm(raw, axis=-1, keepdims=True), 1e-12)
        seen["label"] = unit[y]
    size, count = family.size(shape), family.components
    logits = _head(params["pi"], _sees(family, "pi", seen)) / temperatures.proportions
    mean = _head(params["mean"], _sees(family, "mean", seen)) / temperatures.mean
    mean = mean.reshape(-1, count, size)
    if offset is not None:
        mean = mean + _coordinates(to_input(family, params, shape), offset)[:, None]
    raw = _head(params["factor"], _sees(family, "factor", seen)).reshape(-1, count, _cells(params))
    factor = _factor(family, raw, size, temperatures.sigma)
    return Mixture(logits, mean, factor), stats


def _cells(params: Params) -> int:
    """The number of stored entries of a covariance factor: L, or L (L + 1) / 2 for a full one."""
    return int(params["factor"]["bias"].size // params["pi"]["bias"].size)


def _sees(family: Family, name: str, seen: dict[str, Array]) -> list[Array]:
    """The arrays that a head takes as input, each ``[n, F]``; an empty list if it is only a bias.

    ``seen`` has those that the family uses: ``"features"`` and ``"label"`` (its embedding).
    """
    full = family.mode.endswith("full")
    if name == "pi" and family.mode in ("label", "label-full", "joint"):
        return [seen["label"]]
    parts = [seen["features"]] if family.sees_input else []
    return parts + [seen["label"]] if full and name != "factor" else parts


def _head(head: Params, seen: list[Array]) -> Array:
    """``[n, outputs]``: the linear layer of a head; ``[1, outputs]`` if it is only a bias."""
    if not seen:
        return head["bias"][None]
    return jnp.concatenate(seen, axis=-1) @ head["kernel"] + head["bias"]


def _shared(params: Params, stats: Params, features: Array, of_batch: bool) -> tuple[Array, Params]:
    """The layer that all heads share: linear, batch normalisation, ReLU; ``[n, hidden]``.

    ``of_batch`` normalises by the batch's own mean and variance, and updates the running averages,
    which are returned second.
    """
    hidden = features @ params["shared"]["kernel"] + params["shared"]["bias"]
    mean, var = stats["mean"], stats["var"]
    if of_batch:
        mean, var = jnp.mean(hidden, axis=0), jnp.var(hidden, axis=0)
        unbiased = var * len(hidden) / max(len(hidden) - 1, 1)
        stats = {
            "mean": _MOMENTUM * stats["mean"] + (1 - _MOMENTUM) * mean,
            "var": _MOMENTUM * stats["var"] + (1 - _MOMENTUM) * unbiased,
        }
    unit = (hidden - mean) * jax.lax.rsqrt(var + _EPSILON)
    return jax.nn.relu(unit * params["scale"] + params["shift"]), stats


def _factor(family: Family, raw: Array, size: int, temperature: Any) -> Array:
    """Covariance factors with a positive diagonal of at least the floor: ``[n or 1, K, L(, L)]``.

    ``raw`` ``[n or 1, K, cells]`` are a head's outputs, the packed rows of a triangle if
    covariances are full; ``temperature`` divides everything but the floor.
    """
    if family.covariance == "diagonal":
        return jax.nn.softplus(raw) / temperature + family.floor
    whole = mixtures.triangular(raw, size)
    eye = np.eye(size, dtype=bool)
    return jnp.where(eye, jax.nn.softplus(whole), whole) / temperature + family.floor * eye


def _coordinates(matrix: Array | None, v: Array) -> Array:
    """``[n, L]``: the latent vectors whose images are closest to ``v`` ``[n, d]``.

    Least squares; a small ridge keeps the system solvable; the map ``matrix`` ``[L, d]`` gets no
    gradient. Without a map, latent and input space are the same and ``v`` is returned.
    """
    if matrix is None:
        return v
    fixed = jax.lax.stop_gradient(matrix)
    gram = fixed @ fixed.T
    ridge = 1e-4 * jnp.trace(gram) / len(gram) * jnp.eye(len(gram))
    return jnp.linalg.solve(gram + ridge, fixed @ v.T).T


def to_input(family: Family, params: Params, shape: tuple[int, ...]) -> Array | None:
    """The matrix ``[L, d]`` from latent space to an input's entries; None for the identity.

    The linear map of a ``"fixed"`` family is a parameter without gradient.
    """
    if family.upsample == "none":
        return None
    layer = params["map"]
    linear = jax.lax.stop_gradient(layer) if family.upsample == "fixed" else layer
    return up.interpolated(linear, up.small_shape(shape, family.side), shape)
