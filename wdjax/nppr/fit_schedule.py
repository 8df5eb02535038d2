"""The schedule of a fit: steps, learning rate, temperatures."""

import dataclasses
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from wdjax import distinct
from wdjax.checks import validate
from wdjax.core import Array
from wdjax.nppr.family import Family, Temperatures

Pair = tuple[float, float]
Loss = Literal["sigmoid", "softplus"]
"""What a fit minimises: a smooth 0-1 loss, or the paper's softplus of margins."""


def _static(default: Any) -> Any:
    """A static dataclass field: changing it recompiles."""
    return dataclasses.field(default=default, metadata={"static": True})


@distinct.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    r"""The schedule of a fit; a pair is a first and a last value, interpolated geometrically.

    Args:
      steps: Adam steps.
      batch: B, inputs in a step.
      draws: M, samples of each input.
      cycles: cycles of the cosine, each from the full rate; the paper's schedule for the
        independent mode is cyclical.
      warmup: share of the steps in which the rate rises linearly from 0.
      least_rate: lower bound of the learning rate.
      learning_rate: the largest rate; by default 0.005 if the family uses features, else 0.01.
      loss: of a copy whose true class leads by the margin m: ``"sigmoid"`` is ``sigmoid(m / w)``, a
        smoothed survival indicator; ``"softplus"`` is the paper's ``softplus(m + kappa)``.
      width: w, as a share of the unperturbed samples' median margin.
      kappa: for the softplus, the margin in logits beyond the decision boundary, of equation 11.
      tau: temperature of the Gumbel-softmax.
      proportions: temperature of the proportions' logits.
      mean: temperature of the means.
      sigma: temperature of the covariances' factors.
      shared: temperature of the shared layer's output.

    Raises:
      ValueError: a setting that is out of range.

    Differs: the paper's loss is the softplus. Being a mean of margins, it also rewards lowering the
      margins of copies that survive anyway: on four nets it left up to ten points more alive than
      the sigmoid, and never fewer by more than a point or two. The paper has a rate of 5e-4 for 50
      epochs of unknown length; 300 steps at that rate do not converge. It has no formula for its
      temperatures; here they divide the heads' outputs.

    Source: Wang et al. [wang2025], table 4.

    >>> Schedule(steps=100).tau
    (1.0, 0.1)
    """

    steps: int = _static(300)
    batch: int = _static(32)
    draws: int = _static(32)
    cycles: int = _static(1)
    warmup: float = _static(0.1)
    least_rate: float = _static(2e-6)
    loss: Loss = _static("sigmoid")  # noqa: RUF009
    learning_rate: Any = None
    width: Any = 0.25
    kappa: Any = 1.0
    tau: Pair = (1.0, 0.1)
    proportions: Pair = (1.0, 1.0)
    mean: Pair = (1.0, 1.0)
    sigma: Pair = (1.0, 1.0)
    shared: Pair = (1.0, 1.0)

    def __post_init__(self) -> None:
        if not all(isinstance(end, float | int) for end in self.tau):
            return  # JAX rebuilds the dataclass with placeholders as leaves.
        for name in ("steps", "batch", "draws", "cycles"):
            validate.check_count(name, getattr(self, name))
        validate.check_choice("loss", self.loss, get_args(Loss))
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup must be a share in [0, 1), got {self.warmup!r}.")
        for name in ("tau", "proportions", "mean", "sigma", "shared"):
            pair = np.asarray(getattr(self, name), float)
            if pair.shape != (2,) or not np.all(np.isfinite(pair) & (pair > 0)):
                raise ValueError(f"{name} must be two temperatures above 0, got {pair.tolist()}.")
        if self.learning_rate is not None:
            validate.check_number("learning_rate", self.learning_rate)
        validate.check_number("kappa", self.kappa)
        if not validate.check_number("width", self.width) > 0:
            raise ValueError(f"width must be above 0, got {self.width!r}.")

    def settled(self, family: Family, margin: Any = 1.0) -> "Schedule":
        """Sets the default rate for a family and the width in logits; all numbers become arrays."""
        rate = self.learning_rate
        if rate is None:
            rate = 5e-3 if family.sees_input else 1e-2
        scaled = dataclasses.replace(self, learning_rate=rate, width=self.width * margin)
        return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), scaled)

    def rate(self, step: Array) -> Array:
        """The learning rate of a step: a linear rise, then cosines."""
        length = max(self.steps // self.cycles, 1)
        rise = int(self.warmup * length)
        falling = optax.cosine_decay_schedule(1.0, max(length - rise, 1))
        within = step % length
        share = jnp.where(within < rise, (within + 1) / max(rise, 1), falling(within - rise))
        assert self.learning_rate is not None
        return jnp.maximum(self.learning_rate * share, self.least_rate)

    def temperatures(self, step: Array) -> tuple[Array, Temperatures]:
        """The Gumbel-softmax temperature of a step, and those of the heads."""
        done = step / max(self.steps - 1, 1)

        def between(pair: Any) -> Array:
            return pair[0] * (pair[1] / pair[0]) ** done

        heads = (self.proportions, self.mean, self.sigma, self.shared)
        return between(self.tau), Temperatures(*map(between, heads))


TABLE_4 = Schedule(
    loss="softplus", proportions=(3.0, 1.0), mean=(3.0, 1.0), sigma=(1.5, 1.0), shared=(1.5, 1.0)
)
"""The paper's loss and temperatures; on small nets they gain nothing."""
