"""The aim of a training: robustness to an attack, a certificate, robustness to noise, or none."""

import dataclasses
import math
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np

from wdjax import norms
from wdjax.balls import Lp
from wdjax.checks import arguments, validate
from wdjax.core import Array, Attack


class AttackAim(NamedTuple):
    """What is trained against; a pytree."""

    attack: Attack
    eps: Array
    """One radius, or ``[epochs]``: one for each epoch."""
    kappa: Array | None

    def of_epoch(self, epoch: Array | int) -> "AttackAim":
        """The aim in an epoch, with its radius alone."""
        return self if self.eps.ndim == 0 else self._replace(eps=self.eps[epoch])


Blend = Literal["losses", "logits", "powers"]
"""How the bounds' loss and the attack's become one: by the mean of both (MTL-IBP), by the loss of
the mean logits (CC-IBP), or by the product of powers of both (Exp-IBP)."""


class TrainableCertificate(Protocol):
    """Bounds to train through, such as :class:`wdjax.certify.CertifiedTraining`; a pytree."""

    attack: Attack | None
    blend: Blend
    mix: float | Array
    small: float | Array

    @property
    def ball(self) -> Lp: ...

    def share(self, done: Array) -> Array:
        """The share of the radius; ``done`` in [0, 1] is the share of training steps done."""

    def weight(self, done: Array) -> Array:
        """The weight of the robust loss; the rest is that of the loss on clean samples."""

    def margins(self, model: Any, x: Array, y: Array, eps: Array, done: Array) -> Array:
        """``[n, K]`` lower bounds of the margins within the share of ``eps``."""

    def penalty(self, model: Any, x: Array, eps: Array, done: Array) -> Array | float:
        """What is added to the loss."""


class CertificateAim(NamedTuple):
    """What is trained towards; a pytree."""

    certificate: TrainableCertificate
    eps: Array
    steps: Array
    """The number of steps of the whole training."""


class TrainingNoise(Protocol):
    """What is added to samples, such as :class:`wdjax.smoothing.noise.Gaussian`; a pytree."""

    def offset(self, key: Array, x: Array) -> Array:
        """The noise for one sample ``[*shape]``."""
        ...


class NoiseAim(NamedTuple):
    """What is trained under; a pytree."""

    noise: TrainingNoise


Aim: TypeAlias = AttackAim | CertificateAim | NoiseAim | None


def aim(
    attack: Attack | None,
    certificate: TrainableCertificate | None,
    noise: TrainingNoise | None,
    eps: Any,
    kappa: Any,
    dtype: np.dtype,
    steps: int,
    epochs: int = 1,
) -> Aim:
    """The aim from a training's arguments; at most one of attack, certificate and noise is given.

    Raises a ValueError if they do not fit together. ``eps`` and ``kappa`` are numbers, but an
    attack's ``eps`` may be one for each of the ``epochs``; ``dtype`` is the samples', ``steps`` the
    number of steps of the whole training.

    >>> aim(None, None, None, None, None, np.dtype("float32"), 10) is None
    True
    """
    given = [one for one in (attack, certificate, noise) if one is not None]
    if len(given) > 1:
        raise ValueError(
            f"either an attack, a certificate or noise: got {' and '.join(map(repr, given))}."
        )
    if certificate is not None and not callable(getattr(certificate, "margins", None)):
        raise ValueError(
            "certificate must be bounds to train through, such as certify.CertifiedTraining(), got "
            f"{certificate!r}."
        )
    either = certificate if attack is None else attack
    if (kappa is not None and attack is None) or (eps is not None and either is None):
        raise ValueError(
            f"eps and kappa go with an attack: got eps={eps!r}, kappa={kappa!r} and no attack; eps "
            "also goes with a certificate."
        )
    if noise is not None:
        if not hasattr(noise, "offset"):
            raise ValueError(f"noise must be of wdjax.smoothing.noise, got {noise!r}.")
        return NoiseAim(validate.settle(noise, dtype))
    if either is None:
        return None
    if eps is None:
        raise ValueError(f"attack or certificate and eps go together: got {either!r} and no eps.")
    if attack is not None and np.ndim(eps) == 1:
        budget = jnp.asarray(_schedule(eps, epochs), dtype)
    else:
        budget = jnp.asarray(validate.check_number("eps", eps), dtype)
    if attack is None:
        return CertificateAim(
            validate.settle(certificate, dtype), budget, jnp.asarray(steps, dtype)
        )
    split = None if kappa is None else jnp.asarray(validate.check_number("kappa", kappa, 1.0))
    return AttackAim(validate.settle(attack, dtype), budget, split)


def _is_known(number: Any) -> bool:
    """Whether it is one number whose value can be looked at: of Python, NumPy or JAX."""
    if isinstance(number, np.generic | np.ndarray | jax.Array):
        return np.ndim(number) == 0 and not validate.traced(number)
    return isinstance(number, int | float)


def _schedule(eps: Any, epochs: int) -> np.ndarray:
    """Checks radii ``[epochs]``."""
    radii = np.asarray(eps)
    if len(radii) != epochs:
        raise ValueError(f"eps must be a number or one an epoch [{epochs}], got {len(radii)}.")
    for radius in radii:
        validate.check_number("eps", radius)
    return radii


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheduled:
    """The base of certified trainings: a ball, the schedule of its radius and loss weight, and the
    attack whose points the bounds may share the loss with, or be centred near."""

    norm: float = math.inf
    box: tuple[float, float] | None = (0.0, 1.0)
    warm: float | Array = 0.05
    ramp: float | Array = 0.6
    clean: float | Array = 0.0
    attack: Attack | None = None
    blend: Blend = "losses"
    mix: float | Array = 1.0
    small: float | Array = 1.0

    def __post_init__(self) -> None:
        """Checks norm, box and schedule; numbers that are traced or placeholders are left alone."""
        object.__setattr__(self, "norm", norms.check_norm(self.norm))
        object.__setattr__(self, "box", validate.check_box(self.box))
        validate.check_choice("blend", self.blend, get_args(Blend))
        numbers = self.warm, self.ramp, self.clean, self.mix, self.small
        if not all(map(_is_known, numbers)):
            return  # Traced, several, or a placeholder of JAX's pytree functions.
        if not 0 <= self.warm < self.ramp <= 1:
            raise ValueError(f"0 <= warm < ramp <= 1 must hold, got {self.warm!r}, {self.ramp!r}.")
        for name in ("clean", "mix", "small"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {getattr(self, name)!r}.")
        arguments.check("attack", attack=self.attack)
        if self.attack is None and not self.mix == self.small == 1:
            raise ValueError(
                f"mix and small go with an attack: got mix={self.mix!r}, small={self.small!r} and "
                "no attack."
            )
        attack = self.attack
        if attack is not None and (attack.budget != "sample" or attack.ball != self.ball):
            raise ValueError(
                f"the attack must stay within eps in the ball {self.ball!r} of the bounds, such as "
                f"attacks.PGD({self.ball!r}); got {attack!r}."
            )

    @property
    def ball(self) -> Lp:
        """The ball, without its radius."""
        return Lp(self.norm, self.box)

    def share(self, done: Array | float) -> Array:
        """The share in [0, 1] of the radius, when a share ``done`` of all steps is done."""
        return jnp.clip((done - self.warm) / (self.ramp - self.warm), 0.0, 1.0)

    def weight(self, done: Array) -> Array:
        """The weight of the robust loss, when a share ``done`` of all steps is done."""
        return self.share(done) * (1 - self.clean)

    def penalty(self, model: Any, x: Array, eps: Array, done: Array) -> Array | float:
        """What is added to the loss: nothing, unless a training has regularisers."""
        return 0.0
