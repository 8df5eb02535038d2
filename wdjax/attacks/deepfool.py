"""DeepFool: steps onto the nearest linearised boundary until the class changes."""

import dataclasses
import functools
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from wdjax import distinct, losses, norms, program
from wdjax.attacks import ascent, nearest
from wdjax.attacks.ascent import setting
from wdjax.attacks.nearest import Nearest
from wdjax.balls import Lp
from wdjax.checks import validate
from wdjax.core import Array, Info, PyTree, Samples, Stage, Victim

_FEW = 5
"""Most samples flip within so many steps; a stage of this length lets them leave early."""


class State(NamedTuple):
    x: Array
    best: Nearest


@distinct.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeepFool(nearest.NearestAttack):
    r"""DeepFool: the shortest step onto the nearest linearised boundary, again until a flip.

    ``j = argmin |f_j| / ||w_j||_s`` with ``f_j = z_j - z_y`` and its gradient ``w_j``; the step is
    ``|f_j| / ||w_j||_s M_r(w_j)``, enlarged by ``overshoot``.

    Args:
      ball: norm and box. For norm 1 a step moves one coordinate that can still move.
      steps: maximum number of steps.
      rivals: the number of classes compared, those of largest logit at the sample.
      overshoot: enlarges each step by this share.

    Raises:
      ValueError: a count below 1, a model without logits.

    Cost: 1 forward and ``min(rivals, K - 1)`` backward passes a step until the flip, 1 more
    forward.

    Differs: points are clipped to the box. A step aims where a flip survives rounding, and is never
    shorter than floats can resolve; the authors' code adds 1e-4 to each step instead. As in that
    code every step is enlarged, where the paper enlarges the total perturbation once, at the end.

    Source: Moosavi-Dezfooli et al. [moosavi2016], Algorithm 2 and equation 12.

    >>> import wdjax
    >>> model = wdjax.Model(lambda w, x: x @ w, jnp.array([[1.0, -1.0], [-1.0, 1.0]]))
    >>> x, y = jnp.array([[0.6, 0.4], [0.9, 0.1]]), jnp.array([0, 0])
    >>> found = wdjax.search(DeepFool(), model, x, y)
    >>> [round(float(d), 3) for d in found.cost]
    [0.102, 0.408]
    """

    uneven: ClassVar[bool] = True

    ball: Lp = setting(Lp())
    steps: int = setting(50)
    rivals: int = setting(9)
    overshoot: float | Array = 0.02

    def __post_init__(self) -> None:
        for name in ("steps", "rivals"):
            object.__setattr__(self, name, validate.check_count(name, getattr(self, name)))

    @property
    def stages(self) -> tuple[Stage, ...]:
        few = min(_FEW, self.steps)
        return (
            Stage(self._step, few, self.finished),
            Stage(self._step, self.steps - few, self.finished),
            Stage(self._end, 1, self.finished),
        )

    def init(
        self, victim: Victim, samples: Samples, start: Array | None, keys: Array | None
    ) -> State:
        ascent.need_logits("DeepFool", samples.out)
        x = samples.x if start is None else self.ball.clip(start)
        return State(x, nearest.nearest_before(victim, samples))

    def _step(self, victim: Victim, samples: Samples, state: State) -> tuple[State, Info]:
        """One step, of each sample, onto the nearest of its ``rivals`` linearised boundaries.

        Takes one backward pass for each rival. Samples with a flip stay where they are. The step is
        enlarged by ``overshoot`` and clipped to the box.
        """
        x, y = state.x, samples.y
        logits, pullback = jax.vjp(victim.model, x)
        value = victim.criterion(logits, y)
        best = nearest.keep_nearest(state.best, self.ball, victim, samples, x, logits)
        classes = ascent.top_rivals(samples.out, y, self.rivals).T

        def towards_one(carry: PyTree, rival: Array) -> tuple[PyTree, None]:
            least, step, zeros, fault = carry
            towards = jax.nn.one_hot(rival, logits.shape[-1]) - jax.nn.one_hot(y, logits.shape[-1])
            seen = ascent.look(pullback(towards.astype(logits.dtype))[0], logits)
            towards_it = functools.partial(losses.targeted_margin, target=rival)
            margin = ascent.read(towards_it, samples, logits).beyond.astype(x.dtype)
            size, move = self._onto(samples, x, jnp.abs(margin), seen.gradient)
            nearer = (size < least) & jnp.isfinite(margin)
            least = jnp.where(nearer, size, least)
            step = jnp.where(norms.spread(nearer, x), move, step)
            zeros, fault = zeros + seen.zero.astype(jnp.int32), fault | seen.fault
            return (least, step, zeros, fault), None

        none = jnp.zeros(len(y), jnp.int32)
        nothing = jnp.full(len(y), jnp.inf, x.dtype), jnp.zeros_like(x), none, ~jnp.isfinite(value)
        (_, step, zeros, fault), _ = program.scan(towards_one, nothing, classes)
        moved = self.ball.clip(x + (1 + self.overshoot) * step)
        still = norms.spread(best.known, x)
        one = jnp.ones(len(y), jnp.int32)
        info = Info(value, len(classes) * one, one, zeros, fault)
        return State(jnp.where(still, x, moved), best), info

    def _onto(
        self, samples: Samples, x: Array, margin: Array, gradient: Array
    ) -> tuple[Array, Array]:
        """The shortest step from ``x`` onto one linearised boundary, by Hoelder's inequality.

        Args:
          samples: not used.
          x: ``[n, *shape]``, the present points.
          margin: ``[n]``, the absolute margin to one rival.
          gradient: ``[n, *shape]``, that margin's gradient at ``x``.

        Returns:
          The distance to the boundary ``[n]``, inf where the gradient is 0, and the step
          ``[n, *shape]``, which is at least long enough not to be lost in rounding. The box is
          respected only for norm 1, whose step uses no coordinate that is at its end.
        """
        norm = self.ball.norm
        if norm == 1 and self.ball.box is not None:
            low, high = self.ball.box
            stuck = ((gradient > 0) & (x >= high)) | ((gradient < 0) & (x <= low))
            gradient = jnp.where(stuck, 0.0, gradient)
        steep = norms.lp_norm(gradient, norms.dual(norm))
        known = (steep > 0) & jnp.isfinite(steep)
        size = jnp.where(known, margin / jnp.where(known, steep, 1.0), jnp.inf)
        least = ascent.shortest(self.ball, x)
        usable = jnp.where(jnp.isfinite(size), jnp.maximum(size, least), 0.0)
        return size, norms.spread(usable, x) * norms.dual_maximizer(gradient, norm)
