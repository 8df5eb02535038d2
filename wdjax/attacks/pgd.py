"""Projected gradient descent and its one-step form, FGSM."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

from wdjax import distinct, losses
from wdjax.attacks.gradient_attack import GradientAttack
from wdjax.balls import Lp
from wdjax.core import Array, PyTree, Samples

_SHARE: dict[float, float] = {0: 1 / 2, 1: 1 / 4}
"""Default steps, in units of ``eps``, where they do not depend on their number."""


@distinct.register_dataclass
@dataclasses.dataclass(frozen=True)
class PGD(GradientAttack):
    r"""Projected gradient ascent: steps that raise a loss, each projected on the ball.

    The iteration is ``x <- P(x + step_size * M_r(grad loss))``, with a loss per sample. In norm 0
    it keeps the ``eps`` coordinates (or pixels) that it moves farthest; there
    :class:`~wdjax.attacks.SigmaZero` is stronger, and restarts and ``losses.margin`` help.

    Args:
      ball: norm and box.
      steps: gradient steps.
      loss: ``(out, y) -> [n]``, to be increased; see :mod:`wdjax.losses`.
      random_start: start uniformly in the ball instead of at the sample; makes a key necessary.
      iterate: ``"best"`` returns the iterate of largest criterion, ``"last"`` the last one.
      restarts: number of runs; all but the first start uniformly in the ball, which makes a key
        necessary, and the best iterate of all runs is returned.
      step_size: may be traced; by default ``2.5 eps / steps``, for norm 1 ``eps / 4``, for norm 0
        ``eps / 2`` (how many coordinates a step moves through the box), and ``eps`` for one step.

    Raises:
      ValueError: fewer than one step or run, another iterate, restarts without ``"best"``.

    Cost: per step 1 forward and 1 backward pass a sample; 1 more forward for ``"best"``, and 1
      forward and 1 backward for every further run.

    Differs: for norm 2 a point is projected on the ball and then clipped to the box, as in all
      implementations; that is not the Euclidean projection on the intersection.

    Source: Madry et al. [madry2018]; the projection is equation 2 of Le et al. [le2025]; for norm 0
    Croce and Hein [croce2019].

    >>> PGD(Lp(2), steps=5) == PGD(Lp(2), steps=5)  # equal settings share one compiled program
    True
    """

    cycles: ClassVar[bool] = True
    sparse: ClassVar[bool] = True

    step_size: float | Array | None = None

    def step(
        self, samples: Samples, x: Array, gradient: Array, memory: PyTree
    ) -> tuple[Array, PyTree]:
        eps, size = samples.radius, self.step_size
        if size is None:
            share = _SHARE.get(self.ball.norm, 2.5 / self.steps)
            size = share * eps if self.steps > 1 else eps
        return self.ball.ascend(x, gradient, size), memory


def fgsm(ball: Lp = Lp(), loss: Callable[[PyTree, Array], Array] = losses.cross_entropy) -> PGD:
    """The fast gradient (sign) method: :class:`PGD` with one step of length ``eps``.

    Args:
      ball: norm and box.
      loss: ``(out, y) -> [n]``, to be increased.

    Cost: 1 forward and 1 backward pass a sample.

    Source: Goodfellow et al. [goodfellow2015].

    >>> fgsm().steps
    1
    """
    return PGD(ball, steps=1, loss=loss, iterate="last")
