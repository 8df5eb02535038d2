"""A minimum-norm attack in the image-Wasserstein distance."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar, Literal, NamedTuple

import jax.numpy as jnp

from wdjax import distinct, losses, norms
from wdjax.attacks import ascent, nearest
from wdjax.attacks.ascent import setting
from wdjax.checks import validate
from wdjax.core import Array, Info, PyTree, Samples, Stage, Victim
from wdjax.image import linear_oracle, plans
from wdjax.image.ball import ImageWasserstein, TransportPlan
from wdjax.image.linear_oracle import Prices
from wdjax.image.plan_attack import seen_from, unit
from wdjax.image.prices import ImageProblem

_FIRST = 10
"""The first radius without eps: so many pixels' mean mass moved by one pixel."""
_FAR = 2.0
"""The largest radius, in widths of the window."""


class State(NamedTuple):
    plan: Array
    """``[n, C, O, L]``"""
    slope: Array
    prices: Prices
    radius: Array
    """``[n]``: the radius, in mass times distance."""
    taken: Array
    best: Array
    """The plan of the nearest flip, ``[n, C, O, L]``."""
    cost: Array
    """``[n]``: its cost; inf until there is a flip."""
    low: Array
    """``[n]``: largest share of the best plan known not to flip, for the final bisection."""


@distinct.register_dataclass
@dataclasses.dataclass(frozen=True)
class NearestTransport:
    r"""The nearest flip in the image-Wasserstein distance: Frank-Wolfe in a ball of varying radius.

    Each step is one of :class:`~wdjax.image.FrankWolfe`. If the iterate flips, the radius shrinks
    below its cost; if not, it grows, up to the cost of the nearest flip. The changes fall along a
    cosine. At the end the smallest share of the best plan that still flips is bisected.

    Args:
      ball: window, power, channels and the largest value of a pixel.
      steps: gradient steps.
      loss: ``(out, y) -> [n]``, to be increased.
      sweeps: updates of the capacities' prices in a step.
      bisections: bisections of the best plan's share.
      temperature: of the entropy, as a share of the largest gradient.
      momentum: weight of the running mean of gradients.
      step_size: share of the way to the linear problem's solution; larger in the first steps.
      change: relative change of the radius in the first step; falls to a twentieth.

    Raises:
      ValueError: fewer than one step, sweeps or bisections below 0.

    Cost: per step 1 forward and 1 backward pass; 1 forward pass a bisection; about 0.6 ms an MNIST
      image and step on one core of a CPU.

    Source: this library's own, after Wu et al. [wu2020] and Pintor et al. [pintor2021].

    >>> import wdjax.image
    >>> w = jnp.array([[0.0, 0.0], [0.0, 1.0], [-0.5, 1.0], [0.0, 0.0]])
    >>> model = wdjax.Model(lambda w, x: 4 * x.reshape(len(x), -1) @ w - jnp.eye(2)[1], w)
    >>> x, y = jnp.array([0.6, 0.2, 0.2, 0.0]).reshape(1, 1, 4, 1), jnp.array([1])
    >>> ball = wdjax.image.ImageWasserstein(window=3)
    >>> found = wdjax.search(wdjax.image.NearestTransport(ball, steps=40), model, x, y)
    >>> round(float(found.cost[0]), 2)  # A sixth of the mass has to move by one pixel.
    0.17
    """

    budget: ClassVar[Literal["none"]] = "none"
    random: ClassVar[bool] = False

    ball: ImageWasserstein = setting(ImageWasserstein())
    steps: int = setting(150)
    loss: Callable[[PyTree, Array], Array] = setting(losses.cross_entropy)
    sweeps: int = setting(10)
    bisections: int = setting(8)
    temperature: float | Array = 0.02
    momentum: float | Array = 0.8
    step_size: float | Array = 0.15
    change: float | Array = 0.2

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", validate.check_count("steps", self.steps))
        for name in ("sweeps", "bisections"):
            object.__setattr__(self, name, validate.check_count(name, getattr(self, name), 0))

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (
            Stage(self._step, self.steps),
            Stage(self._end, 1),
            Stage(self._bisect, self.bisections),
        )

    def _task(self, samples: Samples, radius: Array) -> ImageProblem:
        """The :class:`ImageProblem` with the budgets ``radius`` ``[n]``, in mass times distance."""
        space = self.ball.space(samples.x.shape[1:])
        x = space.stencil.flat(samples.x)
        return ImageProblem(space, x, self.ball.weights(x), radius)

    def init(
        self, victim: Victim, samples: Samples, start: Array | None, keys: Array | None
    ) -> State:
        problem = self._task(samples, jnp.zeros(len(samples.y)))
        x, mass = problem.x, jnp.sum(problem.x, axis=(1, 2))
        if samples.eps is None:
            height, width, _ = samples.x.shape[1:]
            radius = mass * _FIRST / (height * width)
        else:
            radius = mass * samples.eps**self.ball.power
        plan = plans.stay(problem.space, x)
        if start is not None:
            near = plans.towards(problem.space, x, problem.space.stencil.flat(start))
            plan = plans.uncrowd(problem.space, plans.exact_rows(problem.space, near, x), x)
        fallen = victim.criterion(samples.out, samples.y) > 0
        cost = jnp.where(fallen, 0.0, jnp.inf).astype(x.dtype)
        taken, low = jnp.zeros(len(mass), jnp.int32), jnp.zeros_like(mass)
        prices, stay = linear_oracle.no_prices(x), plans.stay(problem.space, x)
        return State(plan, jnp.zeros_like(x), prices, radius, taken, stay, cost, low)

    def _step(self, victim: Victim, samples: Samples, state: State) -> tuple[State, Info]:
        """Changes the radius by whether the present image flips, then takes one Frank-Wolfe step.

        The radius, ``[n]`` in mass times distance, shrinks below the cost of a flip, and grows
        otherwise up to the cost of the nearest flip. The present plan is kept if it is the nearest
        flip.
        """
        problem = self._task(samples, state.radius)
        seen = ascent.slope(victim, seen_from(problem, state.plan), samples.y, self.loss)
        info = ascent.note(victim, samples.y, seen)
        flipped = nearest.flips(victim, samples, seen.out)
        cost = plans.moved(problem.space, state.plan, problem.weights)
        state = _keep(state, flipped & (cost < state.cost), cost)
        share = nearest.cosine(self.change, 0.05 * self.change, state.taken, self.steps)
        most = (
            _FAR * problem.space.stencil.window**self.ball.power * jnp.sum(problem.x, axis=(1, 2))
        )
        grown = jnp.minimum(state.radius * (1 + share), jnp.minimum(state.cost, most))
        shrunk = jnp.minimum(state.radius, cost) * (1 - share)
        radius = jnp.where(flipped, shrunk, grown)
        problem = dataclasses.replace(problem, budget=radius)
        gradient = unit(problem.space.stencil.flat(seen.gradient))
        slope = self.momentum * state.slope + (1 - self.momentum) * gradient
        target, prices = linear_oracle.vertex(
            problem, unit(slope), self.temperature, state.prices, self.sweeps
        )
        size = jnp.maximum(self.step_size, 2 / (state.taken + 2)).astype(radius.dtype)
        plan = plans.within(problem.space, state.plan, problem.x, problem.weights, radius)
        plan = plan + size[:, None, None, None] * (target - plan)
        taken = state.taken + 1
        return state._replace(
            plan=plan, slope=slope, prices=prices, radius=radius, taken=taken
        ), info

    def _end(self, victim: Victim, samples: Samples, state: State) -> tuple[State, Info]:
        """The stage after the steps: one forward pass, which may find the nearest flip."""
        problem = self._task(samples, state.radius)
        out, info = ascent.judge(victim, seen_from(problem, state.plan), samples.y)
        cost = plans.moved(problem.space, state.plan, problem.weights)
        nearer = nearest.flips(victim, samples, out) & (cost < state.cost)
        return _keep(state, nearer, cost), info

    def _bisect(self, victim: Victim, samples: Samples, state: State) -> tuple[State, Info]:
        """One bisection step for the smallest share of the nearest flip's plan that still flips.

        The rest of the mass stays in place. ``low`` ``[n]``, the largest share without a flip, is
        relative to the present nearest flip.
        """
        problem = self._task(samples, state.radius)
        share = (state.low + 1) / 2
        tried = plans.blend(state.best, problem.x, share, problem.space.stencil.center)
        flipped, info = ascent.flips(victim, samples, seen_from(problem, tried))
        # Shares are relative to the best plan: a nearer flip rescales the lower end.
        low = jnp.where(flipped, state.low / share, share)
        best = jnp.where(norms.spread(flipped, tried), tried, state.best)
        return state._replace(
            best=best, cost=jnp.where(flipped, state.cost * share, state.cost), low=low
        ), info

    def point(self, samples: Samples, state: State) -> tuple[Array, TransportPlan]:
        problem = self._task(samples, state.radius)
        plan = plans.exact_rows(problem.space, state.best, problem.x)
        return seen_from(problem, plan), TransportPlan(problem.space.stencil.mass(plan))

    def finished(self, state: State) -> Array:
        return jnp.isfinite(state.cost)


def _keep(state: State, nearer: Array, cost: Array) -> State:
    """The state in which the present plan is the nearest flip where ``nearer`` ``[n]`` is True."""
    best = jnp.where(norms.spread(nearer, state.plan), state.plan, state.best)
    return state._replace(best=best, cost=jnp.where(nearer, cost, state.cost))
