"""What the attacks over transport plans share: the balls in the layout of plans, and the end."""

from typing import Any, ClassVar

import jax.numpy as jnp

from wdjax import norms
from wdjax.attacks import ascent, nearest
from wdjax.core import Array, Info, PyTree, Samples, Victim
from wdjax.image import plans
from wdjax.image.ball import ImageWasserstein
from wdjax.image.prices import ImageProblem


def task(ball: ImageWasserstein, samples: Samples) -> ImageProblem:
    """The balls of the samples, in the layout of plans."""
    space = ball.space(samples.x.shape[1:])
    x = space.stencil.flat(samples.x)
    weights = ball.weights(x)
    budget = ball.budget(x, samples.radius) - ball.reserve(space, x, weights)
    return ImageProblem(space, x, weights, jnp.maximum(budget, 0.0))


def begun(task: ImageProblem, start: Array | None) -> Array:
    """The plan of no move, or a plan in the ball towards given images ``[n, H, W, C]``."""
    if start is None:
        return plans.stay(task.space, task.x)
    near = plans.towards(task.space, task.x, task.space.stencil.flat(start))
    return plans.repair(task.space, near, task.x, task.weights, task.budget)


def seen_from(task: ImageProblem, plan: Array) -> Array:
    """The images ``[n, H, W, C]`` that result from a plan."""
    return task.space.stencil.image(plans.result(task.space, plan))


def unit(gradient: Array) -> Array:
    """A gradient ``[n, C, L]`` whose largest entry is 1 in absolute value, or 0."""
    size = jnp.max(jnp.abs(gradient), axis=(1, 2), keepdims=True)
    return gradient / jnp.where(size > 0, size, 1.0)


def remember(victim: Victim, samples: Samples, state: Any, out: PyTree) -> Any:
    """Stores ``state.plan`` if its criterion is the best so far; nothing replaces a flip."""
    value = victim.criterion(out, samples.y)
    better = ~state.flipped & (value > state.value)
    return state._replace(
        best=jnp.where(norms.spread(better, state.plan), state.plan, state.best),
        value=jnp.where(better, value, state.value),
        flipped=state.flipped | nearest.flips(victim, samples, out),
    )


class PlanAttack:
    """What attacks with a fixed budget share whose state has ``plan`` and ``flipped``."""

    random: ClassVar[bool] = False

    ball: ImageWasserstein

    def _task(self, samples: Samples, state: Any) -> ImageProblem:
        """The balls of the present step."""
        return task(self.ball, samples)

    def _end(self, victim: Victim, samples: Samples, state: Any) -> tuple[Any, Info]:
        """A last stage without a gradient, in which the last iterate is tested."""
        problem = self._task(samples, state)
        out, info = ascent.judge(victim, seen_from(problem, state.plan), samples.y)
        return remember(victim, samples, state, out), info

    def finished(self, state: Any) -> Array:
        return state.flipped
