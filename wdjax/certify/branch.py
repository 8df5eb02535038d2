r"""Branch and bound for the margins of single samples: proofs, or points that are misclassified.

Source: Bunel et al. [bunel2020], Wang et al. [wang2021].
"""

import functools
import math
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from wdjax import losses
from wdjax.attacks import PGD
from wdjax.balls import Lp
from wdjax.bounds import leaves, region
from wdjax.bounds.moved_mass import moves_mass
from wdjax.bounds.region import Domain
from wdjax.certify import in_turn, signs
from wdjax.checks import independence
from wdjax.core import Classifier
from wdjax.engine import driver

Numbers = npt.NDArray[Any]

ENDS = "not searched", "closed", "time", "memory", "nothing to split", "misclassified", "flipped"
"""How the search for a sample ended. "not searched": the sample was verified already. "closed": all
leaves are verified. "time", "memory": it ran out of these. "nothing to split": a leaf that is not
verified has no operand left to split, and more steps do not help. "misclassified": the sample
itself is. "flipped": a point within the radius is, found by a short attack or at a leaf."""


class BranchAndBound:
    """Closes the open margins of single samples of one model, norm and box."""

    def __init__(self, model: Classifier, domain: Domain, seconds: float) -> None:
        self.model, self.domain, self.seconds = model, domain, seconds
        self.compiled = False

    def close(
        self,
        x: jax.Array,
        y: jax.Array,
        eps: float,
        low: npt.ArrayLike,
        scale: jax.Array | None = None,
    ) -> tuple[Numbers, Numbers, Numbers]:
        """Tightens bounds ``low``, ``[n, K]``, of the margins of ``x``, ``[n, *shape]``, within
        ``eps``, in units of ``scale``, ``[n, *shape]``.

        Returns the bounds, ``[n]`` indices in ENDS, and points ``[n, *shape]``: a misclassified one
        within ``eps`` where one was found, else the sample. Samples with one keep their bounds.
        """
        found, points = np.array(low), np.array(x)
        ended = np.zeros(len(found), np.int32)
        for i, row in enumerate(found):
            part = None if scale is None else scale[i : i + 1]
            ball = _Ball(self.domain, x[i : i + 1], eps, part)
            if np.all(row > 0):
                continue
            broken = self._broken(ball, y[i : i + 1])
            if broken is not None:
                points[i], how = broken
            else:
                if not self.compiled:
                    self._close(ball, y[i : i + 1], row, 0.0)
                    self.compiled = True
                found[i], how, point = self._close(ball, y[i : i + 1], row, self.seconds)
                points[i] = points[i] if point is None else point
            ended[i] = ENDS.index(how)
        return found, ended, points

    def broken(
        self, x: jax.Array, y: jax.Array, eps: float, scale: jax.Array | None = None
    ) -> tuple[Numbers, str] | None:
        """A misclassified point within ``eps`` of ``x``, ``[1, *shape]``, by a short attack, and
        one of ENDS; None without one. ``scale`` as in :meth:`close`."""
        return self._broken(_Ball(self.domain, x, eps, scale), y)

    def _broken(self, ball: "_Ball", y: jax.Array) -> tuple[Numbers, str] | None:
        """A misclassified point of one sample's ball by a short attack, and how it came."""
        if int(jnp.argmax(self.model(ball.x), axis=-1)[0]) != int(y[0]):
            return np.asarray(ball.x[0]), "misclassified"
        flip = self._flip(ball, y, ball.attacked(self.model, y))
        return None if flip is None else (flip, "flipped")

    def _flip(self, ball: "_Ball", y: jax.Array, points: Numbers) -> Numbers | None:
        """The first of ``points``, ``[L, *shape]``, moved into the ball, that is misclassified by
        the model itself; None without one."""
        inside = ball.inside(points)
        filled = np.concatenate(
            [inside, np.repeat(inside[:1], signs.width() - len(inside), axis=0)]
        )
        out = np.asarray(independence.outputs(self.model, filled))
        label, near = int(y[0]), ball.contains(inside)
        for i in np.flatnonzero(near & (np.argmax(out, axis=1)[: len(inside)] != label)):
            alone = np.asarray(independence.outputs(self.model, inside[i : i + 1]))
            if np.all(np.isfinite(alone)) and int(np.argmax(alone[0])) != label:
                return np.asarray(inside[i])
        return None

    def _close(
        self, ball: "_Ball", y: jax.Array, low: Numbers, seconds: float
    ) -> tuple[Numbers, str, Numbers | None]:
        """:meth:`close` for one ball with bounds ``[K]``: the bounds, how it ended, and a
        misclassified point or None."""
        until = time.monotonic() + seconds
        norm, box = self.domain
        problem = leaves.of_sample(ball.x, y, ball.radius, norm, box, len(low), ball.scale)
        root = leaves.root(self.model, problem, norm)
        low = np.where(np.arange(len(low)) == int(y[0]), low, np.maximum(low, np.asarray(root.low)))
        rows = np.flatnonzero(low <= 0)
        check = functools.partial(self._flip, ball, y)
        found = in_turn.search(self.model, problem, norm, root, rows, low, until, check)
        return found.low, found.ended, found.witness


class _Ball(NamedTuple):
    """The ball of one sample ``x``, ``[1, *shape]``, in units of ``scale``, ``[1, *shape]``."""

    domain: Domain
    x: jax.Array
    eps: float
    scale: jax.Array | None

    @property
    def radius(self) -> jax.Array:
        return jnp.full(1, self.eps, self.x.dtype)

    def _frame(self) -> tuple[Numbers, Numbers, Numbers, Numbers]:
        """The sample, how far each entry may move, and the ends of the box, ``[1, *shape]``, in
        float64."""
        x = np.asarray(self.x, float)
        scale = np.ones_like(x) if self.scale is None else np.asarray(self.scale, float)
        low, high = (np.asarray(end, float) for end in region.ends(self.domain.box, self.x))
        return x, scale, low, high

    def attacked(self, model: Classifier, y: jax.Array) -> Numbers:
        """What projected gradient steps reach, ``[1, *shape]``; where mass moves, the sample."""
        norm, box = self.domain
        if moves_mass(norm):
            return np.asarray(self.x)
        how: dict[str, Any] = {"eps": self.radius[0], "diagnose": False}
        if self.scale is None and not isinstance((box or (0.0,))[0], tuple):
            usual = PGD(Lp(norm, box), steps=40, loss=losses.margin)  # type: ignore[arg-type]
            return np.asarray(driver.run(usual, model, self.x, y, **how).x_adv)
        attack = PGD(Lp(norm, None), steps=40, loss=losses.margin)
        _, scale, low, high = (jnp.asarray(t, self.x.dtype) for t in self._frame())
        moved = jax.tree_util.Partial(_moved, model, self.x, scale, low, high)
        zero = jnp.zeros_like(self.x)
        found = driver.run(attack, moved, zero, y, **how).x_adv
        return np.asarray(_placed(self.x, scale, low, high, found))

    def inside(self, points: Numbers) -> Numbers:
        """Points ``[L, *shape]`` cut by the box, and by the ball if it is one of linf."""
        x, scale, low, high = self._frame()
        reach = self.eps * scale if self.domain.norm == math.inf else np.inf
        low, high = np.maximum(low, x - reach), np.minimum(high, x + reach)
        wide = np.clip(points, low, high)
        near = wide.astype(points.dtype)
        past = (near < low) | (near > high)
        toward = np.asarray(self.x, points.dtype)
        return np.where(past, np.nextafter(near, toward), near)

    def contains(self, points: Numbers) -> npt.NDArray[np.bool_]:
        """``[L]``: which points lie in the ball and in the box; where mass moves, the sample."""
        x, scale, low, high = self._frame()
        move = (points - x).reshape(len(points), -1)
        if moves_mass(self.domain.norm):
            return np.all(move == 0, axis=1)
        widths = np.broadcast_to(scale, x.shape).reshape(1, -1)
        still = np.all((move == 0) | (widths > 0), axis=1)
        far = np.linalg.norm(move / np.where(widths > 0, widths, 1.0), self.domain.norm, axis=1)
        boxed = np.all(((points >= low) & (points <= high)).reshape(len(points), -1), axis=1)
        return np.asarray(still & boxed & (far <= self.eps))


def _placed(x: jax.Array, scale: jax.Array, low: jax.Array, high: jax.Array, u: jax.Array) -> Any:
    """Moves ``u`` in units of ``scale`` as inputs of the box, ``[n, *shape]``."""
    return jnp.clip(x + scale * u, low, high)


def _moved(
    model: Classifier, x: jax.Array, scale: jax.Array, low: jax.Array, high: jax.Array, u: jax.Array
) -> Any:
    """The model's logits of :func:`_placed`."""
    return model(_placed(x, scale, low, high, u))
