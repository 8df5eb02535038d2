"""Hu et al.'s attack: gradient ascent with the constrained Sinkhorn projection."""

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax.numpy as jnp

from wdjax import distinct, losses
from wdjax.attacks import ascent
from wdjax.attacks.ascent import setting
from wdjax.checks import validate
from wdjax.core import Array, Info, PyTree, Samples, Stage, Victim
from wdjax.image import plans, sinkhorn
from wdjax.image.ball import ImageWasserstein, TransportPlan
from wdjax.image.plan_attack import PlanAttack, begun, remember, seen_from, task, unit
from wdjax.image.prices import ImageProblem
from wdjax.image.sinkhorn import Duals


class State(NamedTuple):
    plan: Array
    """``[n, C, O, L]``"""
    duals: Duals
    taken: Array
    best: Array
    """The plan of the best iterate."""
    value: Array
    flipped: Array


@distinct.register_dataclass
@dataclasses.dataclass(frozen=True)
class SinkhornPGD(PlanAttack):
    r"""Hu et al.'s attack: gradient steps, each projected by constrained Sinkhorn iterations.

    A step adds ``step_size |x|_1`` times the direction, whose largest entry is 1; the projection
    starts from the last one's duals, and its plan is repaired, so that every iterate is in the ball
    and the box, converged or not.

    Args:
      ball: window, power, channels and the largest value of a pixel.
      steps: gradient steps; a sample ends at its first flip.
      loss: ``(out, y) -> [n]``, to be increased.
      direction: ``"l2"``, the gradient; ``"linf"``, its sign; ``"smooth"``, the gradient smoothed
        by a Gaussian filter of the ball's window, of standard deviation ``width`` pixels.
      growing: search for the least radius: in step t it is ``first + t growth``, and all else is
        kept. The attack then has no ``eps``.
      iterations: maximum number of iterations of a projection.
      step_size: as a share of the image's mass; with an ``eps`` at most half of it.
      lam: weight of the fit in the projection.
      tolerance: of the projection's columns, as a share of the mass; 0.1 is the paper's loose
        tolerance for training.
      first: the radius of the first step.
      growth: increase of the radius in a step.
      width: standard deviation of the filter, in pixels.

    Raises:
      ValueError: fewer than one step or iteration, another direction.

    Cost: per step 1 forward and 1 backward pass and at most ``iterations`` iterations, of 0.15 ms
      each for an MNIST image on one CPU core.

    Differs: the authors clamp steps at 0.0765 of the mass, an overflow guard that the paper does
      not mention, leave up to 1 % of the mass missing, and check the budget only for the mass that
      remains, so that their points leave the ball. Here step sizes of 0.5 and ``lam`` of 10,000 are
      finite in float32.

    Source: Hu et al. [hu2020], Sections 4, 5, A.1 and A.5.

    >>> import wdjax.image
    >>> w = jnp.array([[0.0, 0.0], [0.0, 1.0], [-0.5, 1.0], [0.0, 0.0]])
    >>> model = wdjax.Model(lambda w, x: 4 * x.reshape(len(x), -1) @ w - jnp.eye(2)[1], w)
    >>> x, y = jnp.array([0.6, 0.2, 0.2, 0.0]).reshape(1, 1, 4, 1), jnp.array([1])
    >>> attack = wdjax.image.SinkhornPGD(wdjax.image.ImageWasserstein(window=3), steps=20)
    >>> wdjax.search(attack, model, x, y, eps=0.2).success.tolist()
    [True]
    """

    ball: ImageWasserstein = setting(ImageWasserstein())
    steps: int = setting(40)
    loss: Callable[[PyTree, Array], Array] = setting(losses.cross_entropy)
    direction: str = setting("l2")
    growing: bool = setting(False)
    iterations: int = setting(20)
    step_size: float | Array = 0.06
    lam: float | Array = 1000.0
    tolerance: float | Array = 0.001
    first: float | Array = 0.01
    growth: float | Array = 0.01
    width: float | Array = 1.0

    def __post_init__(self) -> None:
        for name in ("steps", "iterations"):
            object.__setattr__(self, name, validate.check_count(name, getattr(self, name)))
        validate.check_choice("direction", self.direction, ("l2", "linf", "smooth"))

    @property
    def budget(self) -> Literal["sample", "none"]:
        return "none" if self.growing else "sample"

    @property
    def stages(self) -> tuple[Stage, ...]:
        return Stage(self._step, self.steps, self.finished), Stage(self._end, 1, self.finished)

    def _radius(self, samples: Samples, taken: Array) -> Array:
        """``[n]``: the radius of step ``taken``."""
        radius = self.first + self.growth * taken if self.growing else samples.radius
        return jnp.asarray(radius, samples.x.dtype)

    def _task(self, samples: Samples, state: State) -> ImageProblem:
        return task(self.ball, samples._replace(eps=self._radius(samples, state.taken)))

    def init(
        self, victim: Victim, samples: Samples, start: Array | None, keys: Array | None
    ) -> State:
        taken = jnp.zeros(len(samples.y), jnp.int32)
        problem = task(self.ball, samples._replace(eps=self._radius(samples, taken)))
        plan = begun(problem, start)
        fallen = victim.criterion(samples.out, samples.y) > 0
        value = jnp.full(len(samples.y), -jnp.inf, samples.x.dtype)
        return State(plan, sinkhorn.no_duals(problem), taken, plan, value, fallen & self.growing)

    def _step(self, victim: Victim, samples: Samples, state: State) -> tuple[State, Info]:
        problem, radius = self._task(samples, state), self._radius(samples, state.taken)
        seen = ascent.slope(victim, seen_from(problem, state.plan), samples.y, self.loss)
        info = ascent.note(victim, samples.y, seen)
        state = remember(victim, samples, state, seen.out)
        size = jnp.minimum(radius / 2, self.step_size) * jnp.sum(problem.x, axis=(1, 2))
        ahead = self._direction(problem, problem.space.stencil.flat(seen.gradient))
        w = plans.result(problem.space, state.plan) + size[:, None, None] * ahead
        shadow = sinkhorn.project(
            problem, w, self.lam, state.duals, iterations=self.iterations, tolerance=self.tolerance
        )
        plan = plans.repair(problem.space, shadow.plan, problem.x, problem.weights, problem.budget)
        moved = state._replace(plan=plan, duals=shadow.duals, taken=state.taken + 1)
        return ascent.hold(state.flipped, state, moved), info

    def _direction(self, problem: ImageProblem, gradient: Array) -> Array:
        """``[n, C, L]``: the step's direction, from the gradient ``[n, C, L]``.

        By the setting ``direction``: "l2" scales the largest entry to 1, "linf" takes signs,
        "smooth" first averages over the window with a Gaussian of standard deviation ``width``
        pixels.
        """
        if self.direction == "linf":
            return jnp.sign(gradient)
        if self.direction == "smooth":
            stencil = problem.space.stencil
            far = jnp.asarray(stencil.costs(2.0), gradient.dtype)
            bell = jnp.exp(-far / (2 * self.width**2))[:, None]
            bell = bell * jnp.asarray(stencil.valid(), far.dtype)
            bell = bell / jnp.maximum(jnp.sum(bell, axis=0, keepdims=True), 1.0)
            gradient = stencil.send(
                jnp.broadcast_to(bell, (*problem.x.shape[:2], *bell.shape)), gradient
            )
        return unit(gradient)

    def point(self, samples: Samples, state: State) -> tuple[Array, TransportPlan]:
        problem = self._task(samples, state)
        plan = plans.exact_rows(problem.space, state.best, problem.x)
        return seen_from(problem, plan), TransportPlan(problem.space.stencil.mass(plan))
