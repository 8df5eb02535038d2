"""Searches a box for a point whose output a specification forbids: the attack on a property."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from wdjax import distinct, norms
from wdjax.attacks import PGD
from wdjax.balls import Lp
from wdjax.certify.specification import Specification
from wdjax.checks import independence
from wdjax.core import Array, Classifier, PyTree
from wdjax.engine import driver

Numbers = npt.NDArray[Any]

_DRAWS = 256
"""Random points, half of them corners, from which the starts are chosen."""
_STARTS, _MEMBERS = 64, 32
"""Number of starts, and of members of the specification that have starts of their own."""
_STEPS = 40
_TRUSTED = 1e-5
"""A point is evaluated again if its excess is at most this, relative to the outputs' size."""
_AGAIN = 16
"""Number of points that are evaluated again, the best first."""


class Witness(NamedTuple):
    """A point of the box and the forbidden output there."""

    x: Numbers
    """``[*shape]``"""
    y: Numbers
    """``[K]``"""


class Forbidden(NamedTuple):
    """A specification as arrays of fixed size: ``R`` rows, ``M`` members."""

    a: Array
    """``[R, K]``"""
    b: Array
    """``[R]``"""
    member: Array
    """``[M, R]`` booleans: the rows of each member; members without rows fill up."""

    def gain(self, y: Array) -> Array:
        """``[n, M]`` for outputs ``[n, K]``: minus the largest ``A y - b`` of each member, at least
        0 where all its inequalities hold; the least float for members without rows."""
        value = y @ self.a.T - self.b
        most = jnp.max(jnp.where(self.member, value[:, None], -jnp.inf), axis=-1)
        return jnp.where(jnp.any(self.member, axis=-1), -most, jnp.finfo(y.dtype).min)


def forbidden(spec: Specification, rows: int, dtype: Any) -> Forbidden:
    """The arrays of a specification, filled up to ``rows`` rows and members."""
    a, b, member = spec.rows
    more = rows - len(b)
    belongs = np.arange(rows)[:, None] == np.pad(member, (0, more), constant_values=-1)
    return Forbidden(
        jnp.asarray(np.pad(a, ((0, more), (0, 0))), dtype),
        jnp.asarray(np.pad(b, (0, more)), dtype),
        jnp.asarray(belongs),
    )


def witness(
    model: Classifier, spec: Specification, lower: Numbers, upper: Numbers, points: Numbers
) -> Witness | None:
    """The first of ``points``, ``[n, *shape]``, whose output is forbidden; None without one.

    Points are moved into the box ``[lower, upper]`` and evaluated by the model itself; the
    inequalities are decided exactly.
    """
    x = np.clip(points, lower, upper)
    y = np.asarray(independence.outputs(model, x))
    excess = spec.excess(y)
    near = _TRUSTED * (1 + np.abs(y).max(axis=1, initial=0.0))
    order = [i for i in np.argsort(excess) if excess[i] <= near[i]]
    for i in order[:_AGAIN]:
        logits = np.asarray(independence.outputs(model, x[i : i + 1]))[0]
        if spec.violated(logits) and np.all((x[i] >= lower) & (x[i] <= upper)):
            return Witness(x[i], logits)
    return None


class PropertyAttack(NamedTuple):
    """The likeliest violations among random points and corners of a box."""

    points: Numbers
    """``[n, *shape]``"""
    far: bool
    """Whether no point of the box violates if every inequality is linear in the input: a linear
    function of ``d`` inputs is at most ``sqrt(d)`` standard deviations of its values at random
    corners above their mean. A proof is then looked for first."""
    climb: Callable[[], Numbers]
    """Gives the points that projected gradient steps reach from these, ``[n, *shape]``."""


def drawn(
    model: Classifier, spec: Specification, lower: Numbers, upper: Numbers, rows: int, key: Array
) -> PropertyAttack:
    """The attack on a specification of at most so many ``rows``."""
    given = forbidden(spec, rows, lower.dtype)
    members = min(len(spec.members), _MEMBERS)
    members = 1 << (members - 1).bit_length()
    # NumPy draws as well, and does not compile for most of a second.
    random = np.random.default_rng(np.asarray(jax.random.key_data(key)).ravel())
    half = _DRAWS // 2, *lower.shape
    center, corners = np.full((1, *lower.shape), 0.5), random.integers(0, 2, half)
    u = np.concatenate([center, random.random(half), corners]).astype(lower.dtype)
    u, goal, points, far = _chosen(model, given, lower, upper, u, members)

    def climb() -> Numbers:
        return np.asarray(_climbed(model, given, lower, upper, u, goal))

    return PropertyAttack(np.asarray(points), bool(far), climb)


@functools.partial(distinct.jit, static_argnames="members")
def _chosen(
    model: Classifier, given: Forbidden, lower: Array, upper: Array, u: Array, members: int
) -> tuple[Array, Array, Array, Array]:
    """``_STARTS`` of the draws ``u``, unit coordinates, each with its member; the same as inputs;
    and :attr:`PropertyAttack.far`.

    The second half of the draws are corners; each of the ``members`` likeliest members gets its
    best points.
    """
    raw = given.gain(model(_placed(u, lower, upper)))
    gain = jnp.nan_to_num(raw, nan=-jnp.inf)
    best, which = jax.lax.top_k(jnp.max(gain, axis=0), min(members, gain.shape[1]))
    each = max(_STARTS // len(which), 1)
    chosen = jax.lax.top_k(gain[:, which].T, each)[1].reshape(-1)
    least = jnp.finfo(gain.dtype).min
    goal = jnp.repeat(jnp.where(best > least, which, which[0]), each)
    at_corners, free = raw[-(_DRAWS // 2) :], jnp.sum(upper > lower)
    reach = jnp.mean(at_corners, axis=0) + jnp.sqrt(free) * jnp.std(at_corners, axis=0)
    far = jnp.all((reach < 0) | ~jnp.any(given.member, axis=-1))
    return u[chosen], goal, _placed(u[chosen], lower, upper), far


def _placed(u: Array, lower: Array, upper: Array) -> Array:
    """Unit coordinates as points of the box."""
    return jnp.clip(lower + u * (upper - lower), lower, upper)


@distinct.jit
def _climbed(
    model: Classifier, given: Forbidden, lower: Array, upper: Array, u: Array, goal: Array
) -> Array:
    """The points ``[n, *shape]`` that PGD reaches from ``u``, each for the member ``goal``."""
    gains = jax.tree_util.Partial(_gains, (model, given, lower, upper))
    attack = PGD(Lp(norms.NAMES["linf"]), steps=_STEPS, loss=_own, step_size=0.1)
    center = jnp.full_like(u, 0.5)
    found = driver.search(
        attack, gains, center, goal, eps=0.5, criterion=_own, start=u, skip_misclassified=False
    )
    return _placed(found.x_adv, lower, upper)


def _gains(known: tuple[Classifier, Forbidden, Array, Array], u: Array) -> Array:
    model, given, lower, upper = known
    return given.gain(model(_placed(u, lower, upper)))


def _own(gain: PyTree, member: Array) -> Array:
    return jnp.take_along_axis(gain, member[:, None], axis=1)[:, 0]
