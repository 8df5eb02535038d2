"""A fitted distribution: its mixtures, its samples, and the history of its fit."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from wdjax import distinct
from wdjax.balls import Lp
from wdjax.core import AnyArray, Array
from wdjax.nppr import family as families
from wdjax.nppr import mixture as mixtures
from wdjax.nppr import upsample as up
from wdjax.nppr.family import Family, Params
from wdjax.nppr.mixture import Mixture


class FitHistory(NamedTuple):
    """Measurements of every step, ``[steps]``, on its batch and soft samples."""

    loss: Array
    survived: Array
    """Share of samples that are classified correctly: the running NPPR."""
    entropy: Array
    """Entropy ratio of the average proportions."""
    own_entropy: Array
    """Mean entropy ratio of each input's own proportions: 0 if every input has one component."""
    gradient: Array
    """Norm of the gradient; zero in all steps if the model's gradients are masked."""


@distinct.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Fitted:
    """A fitted distribution of perturbations, a pytree and a ``Perturbation``.

    Made by :func:`wdjax.nppr.fit`.
    """

    family: Family = dataclasses.field(metadata={"static": True})
    ball: Lp = dataclasses.field(metadata={"static": True})
    eps: Array
    params: Params
    stats: Params
    history: FitHistory
    features: Callable[[Array], Array] | None
    """The features of an input that the heads use."""
    offset: Callable[..., Array] | None
    model: Any
    """The model that the offset attacks, or None."""
    labels: Array | None = None
    """``[K]``: how many samples of the fit have each label; None inside a training."""

    def mixture(self, x: Array, y: Array) -> Mixture:
        """The mixtures of inputs, by the running averages: each depends on its own input alone."""
        seen = None
        if self.family.sees_input:
            assert self.features is not None
            seen = self.features(x).reshape(len(x), -1)
        moved = None
        if self.offset is not None:
            moved = self.offset(self.model, x, y).reshape(len(x), -1)
        made, _ = families.mixture(
            self.family, self.params, self.stats, seen, y, x.shape[1:], offset=moved
        )
        return made

    def context(self, x: Array, y: Array) -> Mixture:
        """The mixture of every input, ``[n, 1, ...]`` leaves."""
        return jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (len(x), *leaf.shape[1:]))[:, None],
            self.mixture(x, y),
        )

    def deltas(self, keys: Array, context: Mixture, x: Array, draws: int) -> Array:
        """Perturbations ``[n, draws, *shape]`` from hard samples, each input by its own key."""
        latent = jax.vmap(lambda key, one: mixtures.hard(key, one, 1, draws)[0])(keys, context)
        return self.to_ball(latent, x.shape[1:])

    def to_ball(self, latent: Array, shape: tuple[int, ...]) -> Array:
        """Perturbations ``[n, M, *shape]`` of latent samples ``[n, M, L]``."""
        matrix = families.to_input(self.family, self.params, shape)
        v = latent if matrix is None else latent @ matrix
        return up.into_ball(v, self.eps, self.ball.norm).reshape(*latent.shape[:2], *shape)

    def unfitted(self, y: AnyArray) -> str | None:
        """A remark on samples whose labels ``y``, ``[n]``, no sample of the fit had; else None.

        What depends on such a label is still as random as at the start of the fit.
        """
        if self.labels is None or not self.family.sees_label:
            return None
        y = np.asarray(y)
        missing = np.asarray(self.labels)[y] == 0
        if not missing.any():
            return None
        return (
            f"{missing.sum()} of {len(y)} samples have labels that no correctly classified sample "
            f"of the fit had ({', '.join(map(str, np.unique(y[missing])[:10]))}): their "
            "distributions are random ones, not the worst, and NPPR is too high; fit on samples of "
            "all labels, or with a mode that does not see them"
        )

    @property
    def learnt(self) -> bool:
        """Whether any step had a nonzero gradient."""
        return bool(jnp.any(self.history.gradient > 0))
