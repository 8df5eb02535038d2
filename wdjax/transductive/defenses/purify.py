"""Purification: a few gradient steps move each input before it is classified."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from wdjax import distinct, loops, losses
from wdjax.attacks.ascent import setting
from wdjax.checks import validate
from wdjax.core import Array, Model, PyTree
from wdjax.transductive.defense import Stateless
from wdjax.xla_cpu import drawn


@distinct.register_dataclass
@dataclasses.dataclass(frozen=True)
class Purify(Stateless):
    r"""An anti-adversary: descends the loss of the predicted class, from a noisy copy of the input.

    ``x' = x + r``, where r begins as noise in the ball of ``radius`` and takes ``steps`` steps that
    make the model more confident in its prediction there, projected on the ball. The optimisation
    is part of :meth:`predict`, so that an attack on a bank differentiates through all of it,
    exactly, with the memory of one step (``jax.checkpoint``). The noise is private and new in every
    round.

    Args:
      model: the classifier.
      steps: steps of the optimisation.
      radius: linf radius within which inputs are moved.
      step_size: root mean square of a step, in the units of ``x``.
      box: ends of what inputs may be, to which they are clipped; None for no clipping.

    Raises:
      ValueError: fewer than one step.

    Cost: ``steps + 1`` forward and ``steps`` backward passes for a prediction; its gradient about
      three times that.

    Source: Alfarra et al. [alfarra2022], with noise added; one of the defences broken by Croce et
      al. [croce2022].

    >>> net = Model(lambda w, x: x @ w, jnp.eye(2))
    >>> guard = Purify(net, radius=0.1)
    >>> noise, _ = guard.adapt(jax.random.key(0), (), (), jnp.ones((1, 2)))
    >>> bool(guard.predict((), noise, jnp.array([[0.6, 0.4]]))[0, 0] > 0.6)
    True
    """

    uses_inputs: ClassVar[bool] = False

    model: Model
    steps: int = setting(4)
    radius: float | Array = 8 / 255
    step_size: float | Array = 4 / 255
    box: tuple[float, float] | None = setting((0.0, 1.0))

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", validate.check_count("steps", self.steps))

    def prepare(self, key: Array, x: Array, y: Array) -> PyTree:
        return ()

    def base(self, memory: PyTree, state: PyTree, n: int) -> PyTree:
        """The model without purification."""
        return _Noise(jax.random.key_data(jax.random.key(0)), jnp.zeros(()))

    def adapt(self, key: Array, memory: PyTree, state: PyTree, x: Array) -> tuple[PyTree, PyTree]:
        return _Noise(jax.random.key_data(key), jnp.ones(())), state

    def predict(self, memory: PyTree, adapted: "_Noise", x: Array) -> Array:
        key = jax.random.wrap_key_data(adapted.key)
        noise = drawn(jax.random.uniform, key, x.shape[1:], x.dtype, -1.0, 1.0) * self.radius
        ends = (None, None) if self.box is None else self.box
        start = jnp.clip(x + adapted.strength * noise, *ends)
        label = jax.lax.stop_gradient(jnp.argmax(self.model(start), axis=-1))

        @jax.checkpoint
        def step(now: Array, _: None) -> tuple[Array, None]:
            def loss(now: Array) -> Array:
                return jnp.sum(losses.cross_entropy(self.model(now), label))

            moved = now - self.step_size * adapted.strength * _soft_sign(jax.grad(loss)(now))
            return jnp.clip(jnp.clip(moved, x - self.radius, x + self.radius), *ends), None

        return self.model(loops.scan(step, start, length=self.steps)[0])


@distinct.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Noise:
    key: Array
    strength: Array
    """0 for the model without purification."""


def _soft_sign(gradient: Array) -> Array:
    """The l2 unit vector of a gradient times the root of its size, in place of its sign.

    It is as long as a sign vector, and unlike the sign it has a gradient.
    """
    flat = gradient.reshape(len(gradient), -1)
    square = jnp.sum(flat**2, axis=1, keepdims=True)
    length = jnp.sqrt(jnp.where(square > 0, square, 1.0))
    root = float(flat.shape[1]) ** 0.5
    return (flat / length * root).reshape(gradient.shape)
