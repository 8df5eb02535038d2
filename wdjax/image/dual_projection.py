"""Wu et al.'s projected gradient ascent over transport plans."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar, Literal, NamedTuple

import jax.numpy as jnp

from wdjax import distinct, loops, losses
from wdjax.attacks import ascent
from wdjax.attacks.ascent import setting
from wdjax.checks import validate
from wdjax.core import Array, Info, PyTree, Samples, Stage, Victim
from wdjax.image import plans, variance
from wdjax.image.ball import ImageWasserstein, TransportPlan
from wdjax.image.plan_attack import PlanAttack, begun, remember, seen_from, task, unit
from wdjax.image.prices import ImageProblem, Spent, find_price

_TURNS = 25
"""Maximum number of iterations for the thresholds; active sets only shrink."""
_STEPS = 20
"""Maximum number of Newton steps for the price of distance."""


class State(NamedTuple):
    plan: Array
    """``[n, C, O, L]``"""
    price: Array
    """``[n]``: the price of distance in the last projection."""
    best: Array
    """The plan of the best iterate."""
    value: Array
    flipped: Array


@distinct.register_dataclass
@dataclasses.dataclass(frozen=True)
class DualProjection(PlanAttack):
    r"""Projected gradient ascent over transport plans; the budget's dual gives the projection.

    Each step adds to every flow of the plan the gradient at its target, and projects on the plans
    with the image's mass and within the budget. What then exceeds a pixel's capacity returns to its
    senders, so that every iterate is in the ball and the box.

    Args:
      ball: window, power, channels and the largest value of a pixel.
      steps: gradient steps; a sample ends at its first flip.
      loss: ``(out, y) -> [n]``, to be increased.
      step_size: of the plan, in pixel values, by default a tenth of the largest one; the largest
        entry of the gradient is 1.
      smoothness: weight of the plan's :func:`~wdjax.image.total_variance` against that largest
        entry; if positive, neighbouring mass tends to move alike.

    Raises:
      ValueError: fewer than one step.

    Cost: per step 1 forward and 1 backward pass, and 1 forward at the end; memory for three plans a
      sample. On one CPU core about 1 ms for an MNIST image and step.

    Differs: Wu et al. enforce the pixels' capacity by one projection after the last step; here
      every iterate is repaired, and the best one is returned.

    Source: Wu et al. [wu2020], Section 3; Hu et al. [hu2020], A.5, for ``smoothness``.

    >>> import wdjax.image
    >>> w = jnp.array([[0.0, 0.0], [0.0, 1.0], [-0.5, 1.0], [0.0, 0.0]])
    >>> model = wdjax.Model(lambda w, x: 4 * x.reshape(len(x), -1) @ w - jnp.eye(2)[1], w)
    >>> x, y = jnp.array([0.6, 0.2, 0.2, 0.0]).reshape(1, 1, 4, 1), jnp.array([1])
    >>> attack = wdjax.image.DualProjection(wdjax.image.ImageWasserstein(window=3), steps=10)
    >>> found = wdjax.search(attack, model, x, y, eps=0.3)
    >>> found.success.tolist(), bool(found.cost[0] <= 0.3)
    ([True], True)
    """

    budget: ClassVar[Literal["sample"]] = "sample"

    ball: ImageWasserstein = setting(ImageWasserstein())
    steps: int = setting(60)
    loss: Callable[[PyTree, Array], Array] = setting(losses.cross_entropy)
    step_size: float | Array | None = None
    smoothness: float | Array = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", validate.check_count("steps", self.steps))

    @property
    def stages(self) -> tuple[Stage, ...]:
        return Stage(self._step, self.steps, self.finished), Stage(self._end, 1, self.finished)

    def init(
        self, victim: Victim, samples: Samples, start: Array | None, keys: Array | None
    ) -> State:
        problem = task(self.ball, samples)
        plan = begun(problem, start)
        value = jnp.full(len(samples.y), -jnp.inf, samples.x.dtype)
        return State(plan, jnp.zeros_like(value), plan, value, jnp.zeros(len(samples.y), bool))

    def _step(self, victim: Victim, samples: Samples, state: State) -> tuple[State, Info]:
        """One projected gradient step over plans; samples with a flip stay.

        The gradient at every flow's target is added to the plan, less a multiple of the gradient of
        the total variance if ``smoothness`` is not 0; then the plan is projected on the budget and
        repaired.
        """
        problem = task(self.ball, samples)
        seen = ascent.slope(victim, seen_from(problem, state.plan), samples.y, self.loss)
        info = ascent.note(victim, samples.y, seen)
        state = remember(victim, samples, state, seen.out)
        stencil = problem.space.stencil
        ahead = stencil.of_targets(unit(stencil.flat(seen.gradient)))
        ahead = ahead - self.smoothness * variance.slope(stencil, state.plan)[:, None, :, None]
        step = 0.1 * self.ball.high if self.step_size is None else self.step_size
        plan, price = project(problem, state.plan + step * ahead, state.price)
        plan = plans.repair(problem.space, plan, problem.x, problem.weights, problem.budget)
        return ascent.hold(state.flipped, state, state._replace(plan=plan, price=price)), info

    def point(self, samples: Samples, state: State) -> tuple[Array, TransportPlan]:
        problem = task(self.ball, samples)
        plan = plans.exact_rows(problem.space, state.best, problem.x)
        return seen_from(problem, plan), TransportPlan(problem.space.stencil.mass(plan))


def project(task: ImageProblem, plan: Array, price: Array) -> tuple[Array, Array]:
    r"""The nearest plan whose rows sum to ``x`` and whose cost is within the budget.

    It is ``max(plan - price c - t_i, 0)`` with a threshold t_i for each row i and the price of
    distance c at which the budget is spent.

    Args:
      task: the ball of every sample.
      plan: ``[n, C, O, L]``, any numbers.
      price: ``[n]``, first guess.

    Returns:
      The plan, and the price of distance, ``[n]``.
    """
    stencil = task.space.stencil
    valid = jnp.asarray(stencil.valid())[None, None]
    costs = jnp.asarray(stencil.costs(task.space.power), plan.dtype)[None, None, :, None]
    costs = costs * task.weights[:, :, None, None]

    def rows(price: Array) -> tuple[Array, Array]:
        values = plan - price[:, None, None, None] * costs
        return values, _thresholds(values, task.x, valid)

    def spend(price: Array) -> Spent:
        values, threshold = rows(price)
        active = valid & (values > threshold) & (task.x > 0)[:, :, None]
        flow = jnp.where(active, values - threshold, 0.0)
        count = jnp.maximum(jnp.sum(active, axis=2, dtype=plan.dtype), 1)
        first = jnp.sum(jnp.where(active, costs, 0.0), axis=2)
        second = jnp.sum(jnp.where(active, costs**2, 0.0), axis=2)
        cost = jnp.sum(flow * costs, axis=(1, 2, 3))
        return Spent(cost, jnp.sum(first**2 / count - second, axis=(1, 2)))

    # At this price no move pays, not even to a neighbour.
    highest = jnp.max(jnp.where(valid, plan, -jnp.inf), axis=(1, 2, 3))
    lowest = jnp.min(jnp.where(valid, plan, jnp.inf), axis=(1, 2, 3))
    top = (highest - lowest + task.space.high) / jnp.min(task.weights, axis=1)
    price = find_price(task, spend, jnp.minimum(price, top), _STEPS, top)
    values, threshold = rows(price)
    inside = valid & (task.x > 0)[:, :, None]
    return jnp.where(inside, jnp.maximum(values - threshold, 0.0), 0.0), price


def _thresholds(values: Array, x: Array, valid: Array) -> Array:
    """``[n, C, 1, L]``: the t with ``sum max(values - t, 0) = x``, for every sending pixel.

    The sum is over the O offsets of ``values`` ``[n, C, O, L]`` whose targets are in the image
    (``valid``, ``[1, 1, O, L]``); ``x`` ``[n, C, L]`` is the mass of each pixel. Pixels without
    mass may get any t.
    """

    def turn(carried: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        threshold, _, count = carried
        active = valid & (values > threshold)
        whole = jnp.sum(jnp.where(active, values, 0.0), axis=2, keepdims=True) - x[:, :, None]
        raised = whole / jnp.maximum(jnp.sum(active, axis=2, keepdims=True, dtype=x.dtype), 1)
        return jnp.maximum(raised, threshold), threshold, count + 1

    def go_on(carried: tuple[Array, Array, Array]) -> Array:
        threshold, last, count = carried
        return (count < _TURNS) & jnp.any((threshold > last) & (x > 0)[:, :, None])

    low = jnp.full((*x.shape[:2], 1, x.shape[2]), -jnp.inf, values.dtype)
    first, _, _ = turn((low, low, jnp.zeros((), jnp.int32)))
    return loops.while_loop(go_on, turn, (first, low, jnp.zeros((), jnp.int32)))[0]
