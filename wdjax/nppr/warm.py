r"""Warm starts of fits, by attacks that find failures."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from wdjax import distinct, norms
from wdjax.attacks.margin_pgd import MarginPGD
from wdjax.balls import Lp
from wdjax.checks import arguments, validate
from wdjax.core import AnyArray, Array, Attack, Classifier
from wdjax.engine import driver
from wdjax.nppr.family import Family, Params
from wdjax.nppr.fit import fit
from wdjax.nppr.fit_schedule import Schedule
from wdjax.precision import full_precision

_EDGE = 0.995
"""Bound on coordinates before the inverse of the map into the ball, which is infinite at 1."""
_SURE = 4.0
"""Initial logit of a label's own cluster."""


@distinct.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttackOffset:
    r"""Shifts the means of every input to the point that an attack found for it.

    A mode of its own: the distribution depends on the model's gradient at the input, and every
    input of an evaluation is attacked. The latent space must be large enough to represent the
    attack's points, about as large as the small image. A learning rate of 0.001 suits it better
    than the default, since it begins near the optimum.

    Args:
      eps: radius, that of the fit.
      attack: a deterministic attack with a radius; by default a short ascent of the margin.

    Raises:
      ValueError: an attack that is random, since an input's distribution must not depend on chance,
        or one without a radius.

    Source: this library's own.

    >>> from wdjax import Model, attacks
    >>> model = Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> own = AttackOffset(0.1, attacks.fgsm())
    >>> jnp.sign(own(model, jnp.array([[0.6, 0.4]]), jnp.array([0]))).tolist()
    [[-1.0, 1.0]]
    """

    eps: float | Array
    attack: Attack = dataclasses.field(default_factory=lambda: MarginPGD(steps=10))

    def __post_init__(self) -> None:
        if getattr(self.attack, "random", False) or getattr(self.attack, "budget", "") == "none":
            raise ValueError(
                f"the offset wants a deterministic attack with a radius, got {self.attack!r}."
            )

    def __call__(self, model: Classifier, x: Array, y: Array) -> Array:
        """``[n, *shape]``: vectors that the map into the ball sends to the attack's points."""
        found = driver.search(
            self.attack,
            model,
            x,
            y,
            eps=jnp.asarray(self.eps, x.dtype),
            skip_misclassified=False,
            diagnose=False,
        )
        return pulled_back(found.x_adv - x, self.eps, getattr(self.attack.ball, "norm", math.inf))


def pulled_back(delta: Array, eps: Any, norm: float) -> Array:
    """Approximate inverse of :func:`~wdjax.nppr.upsample.into_ball`, bounded at the ball's edge.

    >>> pulled_back(jnp.array([[0.0464, -0.1]]), 0.1, jnp.inf).round(1).tolist()
    [[0.5, -3.0]]
    """
    unit = delta / jnp.maximum(jnp.asarray(eps, delta.dtype), jnp.finfo(delta.dtype).tiny)
    if norm == math.inf:
        return jnp.arctanh(jnp.clip(unit, -_EDGE, _EDGE))
    rows = unit.reshape(len(unit), -1)
    length = norms.lp_norm(rows, norm)
    size = rows.shape[1] if norm == 1 else math.sqrt(rows.shape[1])
    reach = jnp.arctanh(jnp.minimum(length, _EDGE)) * size / jnp.where(length > 0, length, 1.0)
    return unit * norms.spread(reach, unit)


@full_precision
def universal_start(
    model: Classifier,
    x: AnyArray,
    y: AnyArray,
    *,
    eps: float,
    key: Array,
    family: Family,
    schedule: Schedule = Schedule(),
    ball: Lp = Lp(),
) -> Params:
    r"""Initial parameters for a fit: one universal direction for each label, clustered.

    Fits one normal distribution for each label, clusters their means by k-means into as many
    clusters as there are components, and makes every label prefer its own cluster. For families
    whose means do not depend on the input; for mode ``joint`` it gave no gain.

    Args:
      model: a pytree callable ``[n, *shape] -> [n, K]``.
      x: ``[n, *shape]`` in the box.
      y: ``[n]`` labels.
      eps: radius.
      key: a typed ``jax.random.key``.
      family: family of the fit to begin; its mode must be ``label``.
      schedule: schedule of the fit of the directions.
      ball: norm and box.

    Returns:
      A ``start`` for :func:`~wdjax.nppr.fit`.

    Raises:
      ValueError: another mode, and what a fit refuses.

    Cost: that of a fit.

    Source: this library's own.

    >>> from wdjax import Model
    >>> model = Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> x, y = jnp.array([[0.6, 0.4], [0.4, 0.6]]), jnp.array([0, 1])
    >>> own = Family(mode="label", components=2, upsample="none")
    >>> how = {"eps": 0.2, "key": jax.random.key(0), "schedule": Schedule(steps=50)}
    >>> start = universal_start(model, x, y, family=own, **how)
    >>> sorted(start)
    ['embedding', 'mean', 'pi']
    """
    arguments.check(model=model, x=x, y=y, eps=eps, key=key, ball=ball)
    validate.check_choice("the family's mode", family.mode, ("label",))
    universal = dataclasses.replace(family, mode="label-full", components=1)
    found = fit(model, x, y, eps=eps, key=key, family=universal, schedule=schedule, ball=ball)
    from sklearn.cluster import KMeans

    labels = jnp.unique(jnp.asarray(y))
    shape = jnp.shape(x)[1:]
    rows = jnp.broadcast_to(jnp.asarray(x)[:1], (len(labels), *shape))
    means = np.asarray(found.mixture(rows, labels).mean[:, 0], float)
    count = min(family.components, len(means))
    clusters = KMeans(count, n_init=10, random_state=0).fit(means)
    spare = jax.random.uniform(key, (family.components, means.shape[1]), minval=-0.5, maxval=0.5)
    centres = spare.at[:count].set(jnp.asarray(clusters.cluster_centers_, spare.dtype))
    embedding = found.params["embedding"]
    unit = embedding / jnp.linalg.norm(embedding, axis=-1, keepdims=True)
    wanted = jnp.zeros((len(embedding), family.components))
    wanted = wanted.at[labels, jnp.asarray(clusters.labels_)].set(_SURE)
    kernel = jnp.linalg.pinv(unit) @ wanted
    start: Params = {
        "embedding": embedding,
        "mean": {"bias": centres.ravel()},
        "pi": {"kernel": kernel, "bias": jnp.zeros(family.components)},
    }
    if "map" in found.params:
        start["map"] = found.params["map"]
    return start
